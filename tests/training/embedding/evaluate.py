"""How good `mlx-demo-embedding` is, beside counting common letters: `python -m training.embedding.evaluate [FOLDER]`.

Questions about a handbook and about the pages in `readme/`, and sentences with a paraphrase and a sentence that only
looks similar, were written by hand; translations are those held out from the corpus (`--held-out`).
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import mlx.core as mx
import numpy as np

from mlx_backend.embedding.embedding_config import EmbeddingOptions
from mlx_backend.embedding.mlx.loading import load_embedding_model
from mlx_backend.embedding.text_encoder import TextEncoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

type Scorer = Callable[[Sequence[str], Sequence[str]], np.ndarray]
"""Similarities of texts (rows) to others (columns)."""

HERE: Final = Path(__file__).parent
README: Final = {"en": "README.md", "ja": "README_ja_JP.md", "zh": "README_zh_Hans.md"}


def model_scorer(folder: Path, *, random_weights: bool = False) -> Scorer:
    """Return the similarity by the vectors of the model in a folder."""
    model = load_embedding_model(
        str(folder), EmbeddingOptions(), lambda _: None, rerank=False, check_size=lambda *_: None
    )
    encoder = TextEncoder(model.folder, model.name, model.vocabulary_size)
    network = model.network
    if random_weights:
        network = type(network)(json.loads((folder / "config.json").read_bytes()), rerank=False)

    known: dict[str, np.ndarray] = {}

    def vectors(texts: Sequence[str]) -> np.ndarray:
        for start in range(0, len(new := [text for text in texts if text not in known]), 64):
            ids = [
                list(encoder.encode(text, model.context_length).tokens) for text in new[start : start + 64]
            ]
            longest = max(map(len, ids))
            tokens, lengths = (
                mx.array([each + [0] * (longest - len(each)) for each in ids]),
                mx.array([*map(len, ids)]),
            )
            hidden = network.embed(tokens, tokens)
            for layer in network.layers:
                hidden = layer(hidden, lengths)
            hidden = network.normalise(hidden).astype(mx.float32)
            pooled = mx.where((mx.arange(longest)[None] < lengths[:, None])[..., None], hidden, 0).sum(axis=1)
            known.update(
                zip(
                    new[start:],
                    np.array(pooled / mx.linalg.norm(pooled, axis=1, keepdims=True)),
                    strict=False,
                )
            )
        return np.stack([known[text] for text in texts])

    return lambda first, second: vectors(first) @ vectors(second).T


def _trigrams(text: str) -> Counter[str]:
    text = f"  {re.sub(r'\s+', ' ', unicodedata.normalize('NFKC', text).lower())} "
    return Counter(text[at : at + 3] for at in range(len(text) - 2))


def _terms(text: str) -> Counter[str]:
    """Return words in Latin letters, and pairs of the characters of others."""
    text = unicodedata.normalize("NFKC", text).lower()
    terms = re.findall(r"[a-z0-9]+", text)
    for run in re.findall(r"[\u3041-\u30ff\u4e00-\u9fffー]+", text):
        terms += [run[at : at + 2] for at in range(max(1, len(run) - 1))]
    return Counter(terms)


def trigram_scorer(first: Sequence[str], second: Sequence[str]) -> np.ndarray:
    """Return the cosine of counts of three letters in a row, rare ones weighing more."""
    rows, columns = [_trigrams(text) for text in first], [_trigrams(text) for text in second]
    found_in = Counter(term for each in columns for term in each)
    weight = {term: math.log((1 + len(columns)) / (1 + count)) + 0.1 for term, count in found_in.items()}

    def cosine(one: Counter[str], other: Counter[str]) -> float:
        product = sum(count * other[term] * weight.get(term, 0) ** 2 for term, count in one.items())
        sizes = [
            math.sqrt(sum((count * weight.get(term, 3)) ** 2 for term, count in each.items()))
            for each in (one, other)
        ]
        return product / (sizes[0] * sizes[1] or 1)

    return np.array([[cosine(one, other) for other in columns] for one in rows])


def bm25_scorer(first: Sequence[str], second: Sequence[str]) -> np.ndarray:
    """Return BM25 of words, and of pairs of characters in Japanese and Chinese."""
    columns = [_terms(text) for text in second]
    found_in = Counter(term for each in columns for term in each)
    mean = sum(sum(each.values()) for each in columns) / len(columns)

    def score(query: Counter[str], each: Counter[str]) -> float:
        length = 1.2 * (0.25 + 0.75 * sum(each.values()) / mean)
        return sum(
            math.log(1 + (len(columns) - found_in[term] + 0.5) / (found_in[term] + 0.5))
            * each[term]
            * 2.2
            / (each[term] + length)
            for term in query
            if each[term]
        )

    return np.array([[score(_terms(text), each) for each in columns] for text in first])


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs, list items and rows of tables of a page."""
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    for block in re.split(r"\n\s*\n", text):
        for part in re.split(r"\n(?=[-|])", block):
            if len(part) > 20 and not part.startswith(("#", "|---")):
                yield re.sub(r"\s+", " ", part.strip("| \n-"))


@dataclass(frozen=True, slots=True)
class Search:
    """Passages, questions about them, and the number of each question's passage."""

    passages: list[str]
    questions: list[str]
    right: list[int]


def handbook(language: str) -> Search:
    """Return the questions about an employees' handbook."""
    held_out = json.loads((HERE / "held_out_handbook.json").read_bytes())
    questions, right = zip(*held_out["questions"][language], strict=True)
    return Search(held_out["passages"][language], list(questions), list(right))


def handbook_and_page(language: str) -> Search:
    """Return the same, and questions about the plugin's page; all passages together."""
    search = handbook(language)
    page = list(paragraphs((HERE.parents[2] / "readme" / README[language]).read_text("utf-8")))
    for question, key in json.loads((HERE / "held_out_pages.json").read_bytes())[language]:
        right = [at for at, each in enumerate(page) if key in each]
        if right:
            search.questions.append(question)
            search.right.append(len(search.passages) + right[0])
        else:
            print(f"no paragraph of {README[language]} has {key!r}")
    search.passages.extend(page)
    return search


def triplets() -> Iterator[tuple[str, list[list[str]]]]:
    """Yield a language, and sentences with a paraphrase and another sentence."""
    blocks = (HERE / "held_out_triplets.txt").read_text("utf-8").partition("\n")[2].strip().split("\n\n")
    for language, block in zip(README, blocks, strict=True):
        yield language, [line.split("|") for line in block.splitlines()]


def _share_common(question: str, passage: str) -> float:
    """Return the share of a question's terms that the passage has."""
    asked, there = _terms(question), _terms(passage)
    return sum(term in there for term in asked) / len(asked)


def recall(scores: np.ndarray, right: Sequence[int], at: int) -> float:
    """Return the share of rows whose right column is among the best `at`."""
    best = np.argsort(-scores, axis=1)[:, :at]
    return float(np.mean([one in row for one, row in zip(right, best, strict=True)]))


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--held-out", type=Path)
    parser.add_argument(
        "--cpu", action="store_true", help="a GPU compiles for every shape, which takes longer"
    )
    arguments = parser.parse_args()
    if arguments.cpu:
        mx.set_default_device(mx.Device(mx.cpu))
    scorers: dict[str, Scorer] = {
        "model": model_scorer(arguments.folder),
        "untrained": model_scorer(arguments.folder, random_weights=True),
        "trigrams": trigram_scorer,
        "BM25": bm25_scorer,
    }
    for language in README:
        search, about_handbook = handbook_and_page(language), len(handbook(language).questions)
        common = [
            _share_common(question, search.passages[at])
            for question, at in zip(search.questions, search.right, strict=True)
        ]
        few = sorted(range(len(common)), key=common.__getitem__)[: len(common) // 2]
        groups = {
            "": range(len(common)),
            "handbook ": range(about_handbook),
            "page ": range(about_handbook, len(common)),
            "few common words ": few,
        }
        print(f"{language}: {len(common)} questions, {len(search.passages)} passages")
        for name, scorer in scorers.items():
            scores = scorer(search.questions, search.passages)
            parts = []
            for group, numbers in groups.items():
                expected = [search.right[number] for number in numbers]
                found = [f"{recall(scores[list(numbers)], expected, at):.2f}" for at in (1, 3, 5)]
                parts.append(f"{group}({len(numbers)}) {' '.join(found)}")
            print(f"  {name:10}@1 @3 @5: " + ", ".join(parts), flush=True)
    same: dict[str, list[str]] = {}
    for language, each in triplets():
        same[language] = [row[0] for row in each]
        shares = []
        for name, scorer in scorers.items():
            scores = scorer([row[0] for row in each], [text for row in each for text in row[1:]])
            near, far = np.diagonal(scores[:, ::2]), np.diagonal(scores[:, 1::2])
            shares.append(f"{name} {np.mean(np.where(near == far, 0.5, near > far)):.2f}")
        print(f"triplets, {language}: {len(each)}: " + ", ".join(shares))
    translated: dict[str, list[tuple[str, str]]] = {}
    if arguments.held_out:
        with gzip.open(arguments.held_out, "rt", encoding="utf-8") as file:
            for line in file:
                texts = json.loads(line)["texts"]
                for one, other in (("en", "ja"), ("en", "zh"), ("ja", "zh")):
                    if one in texts and other in texts and len(texts[other][0]) > 5:
                        translated.setdefault(f"{one}-{other}", []).append((texts[one][0], texts[other][0]))
    for name, sentences in translated.items():
        chosen = random.Random(0).sample(sorted(dict(sentences).items()), min(1000, len(dict(sentences))))
        first, second = [one for one, _ in chosen], [other for _, other in chosen]
        scores = scorers["model"](first, second)
        own = range(len(chosen))
        there, back = recall(scores, own, 1), recall(scores.T, own, 1)
        print(f"translations, {name}, @1 of {len(chosen)}: {there:.2f}, {back:.2f}")
        scores = trigram_scorer(first[:200], second[:200])
        print(f"  trigrams, @1 of {len(scores)}: {recall(scores, range(len(scores)), 1):.2f}")
    for one, other in (("en", "ja"), ("en", "zh"), ("ja", "zh")):
        scores = scorers["model"](same[one], same[other])
        print(f"everyday, {one}-{other}, @1 of {len(scores)}: {recall(scores, range(len(scores)), 1):.2f}")


if __name__ == "__main__":
    main()
