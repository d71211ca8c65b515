"""From the corpus to pairs of texts that belong together, in tasks of about the same length."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Iterator, Mapping, Sequence

type Row = dict[str, Any]
type Pair = tuple[str, str, str]
"""The task, and the two texts."""

LENGTHS: Final = {"words": (24, 24), "sentences": (64, 64), "passages": (48, 160)}
"""Tokens of the two sides, by task."""
DICTIONARIES: Final = ("jmdict", "cc-cedict", "wordnet", "cldr")
SEPARATOR: Final = {"en": " ", "ja": "、", "zh": "，"}
_SENTENCE_END: Final = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])")


def lexicon(rows: Iterable[Row]) -> dict[str, dict[str, list[str]]]:
    """Return, by language, translations of English words: the common ones of the dictionaries."""
    glosses: dict[str, dict[str, list[str]]] = {"ja": defaultdict(list), "zh": defaultdict(list)}
    texts: dict[str, list[str]] = {"ja": [], "zh": []}
    for row in rows:
        if "texts" not in row:
            continue
        if row["source"] in ("jmdict", "cc-cedict"):
            language = "ja" if row["source"] == "jmdict" else "zh"
            for gloss in row["texts"].get("en", [])[:2]:
                word = re.sub(r"^(to|a|an|the) |\s*\([^)]*\)", "", gloss.lower()).strip()
                if re.fullmatch(r"[a-z]{3,}", word):
                    glosses[language][word] += row["texts"].get(language, [])[:1]
        else:
            for language in ("ja", "zh"):
                texts[language] += row["texts"].get(language, [])[:1]
    found: dict[str, dict[str, list[str]]] = {}
    for language, each in glosses.items():
        words = {word for candidates in each.values() for word in candidates}
        counts = _occurrences(texts[language][:60_000], words)
        found[language] = {
            word: [*sorted(set(candidates), key=lambda one: -counts[one])[:2]]
            for word, candidates in each.items()
            if max((counts[one] for one in candidates), default=0) > 2
        }
    return found


def _occurrences(texts: Sequence[str], words: set[str]) -> Counter[str]:
    """Count words, each text split greedily into the longest ones."""
    counts: Counter[str] = Counter()
    for text in texts:
        at = 0
        while at < len(text):
            size = next((size for size in (4, 3, 2) if text[at : at + size] in words), 1)
            counts[text[at : at + size]] += 1
            at += size
    return counts


def switched(text: str, translations: Mapping[str, list[str]], share: float, random: random.Random) -> str:
    """Return an English text with part of its words replaced by translations."""

    def replace(match: re.Match[str]) -> str:
        word = match[0].lower()
        known = translations.get(word) or translations.get(re.sub(r"(s|ed|ing)$", "", word))
        return random.choice(known) if known and random.random() < share else match[0]

    return re.sub(r"[A-Za-z]{3,}", replace, text)


def group_pairs(
    row: Row, words: Mapping[str, Mapping[str, list[str]]], random: random.Random
) -> Iterator[Pair]:
    """Yield pairs of a group's texts, mostly of two languages."""
    texts = [(language, text) for language, each in row["texts"].items() for text in each]
    is_entry = row["source"] in DICTIONARIES
    task = "words" if is_entry else "sentences"
    for _ in range(min(3, len(texts) * (len(texts) - 1) // 2)):
        (one, first), (_, second) = random.sample(texts, 2)
        other = [text for language, text in texts if language != one]
        yield task, first, random.choice(other) if other and random.random() < 0.8 else second
    english = row["texts"].get("en")
    if is_entry or not english:
        return
    for language in ("zh", "zh", "ja"):
        mixed = switched(english[0], words[language], random.choice((0.5, 0.8, 1.0)), random)
        if mixed != english[0]:
            yield task, mixed, random.choice(texts)[1]


def bag_pairs(rows: Sequence[Row], count: int, random: random.Random) -> Iterator[Pair]:
    """Yield some words of a dictionary at a time, and their translations or explanations in another order."""
    for _ in range(count):
        chosen = random.sample(rows, random.randint(2, 5))
        sides: list[list[str]] = [[], []]
        for row in chosen:
            languages = list(row["texts"])
            first = random.choice([each for each in languages if each != "en"] or languages)
            second = random.choice([each for each in languages if each != first] or languages)
            sides[0].append(random.choice(row["texts"][first]))
            sides[1].append(random.choice(row["texts"][second]))
        random.shuffle(sides[1])
        yield (
            "sentences",
            "".join(sides[0]) if random.random() < 0.5 else " ".join(sides[0]),
            " ".join(sides[1]),
        )


def document_pairs(row: Row, random: random.Random) -> Iterator[Pair]:
    """Yield headings with their paragraphs, neighbours, and a sentence with the rest of its paragraph."""
    title = row["sections"][0][0]
    glue = "" if row["language"] in ("ja", "zh") else " "
    for heading, *paragraphs in row["sections"]:
        for at, paragraph in enumerate(paragraphs[:12]):
            passage = paragraph
            for following in paragraphs[at + 1 : at + 4]:
                if len(passage) > random.choice((60, 150, 300)):
                    break
                passage += " " + following
            asked = heading if heading == title or random.random() < 0.5 else f"{title} {heading}"
            yield "passages", asked, passage
            sentences = [each for each in _SENTENCE_END.split(passage) if len(each) > 8]
            if len(sentences) > 1:
                chosen = random.randrange(len(sentences))
                rest = glue.join(sentences[:chosen] + sentences[chosen + 1 :])
                yield "passages", sentences[chosen], rest
                yield "passages", sentences[chosen], f"{heading} {passage}"
