"""The shipped model for embeddings, on questions that no word of was trained on: as good as its README says."""

import json
import urllib.request
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from server_process import server_process
from training.embedding import evaluate


@pytest.fixture(scope="module")
def by_meaning() -> Iterator[evaluate.Scorer]:
    """Of a server, whose BLAS is faster than the one here."""
    with server_process("--model", "mlx-demo-embedding") as server:

        def vectors(texts: Sequence[str]) -> np.ndarray:
            request = urllib.request.Request(
                f"{server.url}/v1/embeddings", json.dumps({"input": list(texts)}).encode()
            )
            with urllib.request.urlopen(request, timeout=120) as answer:
                return np.array([each["embedding"] for each in json.load(answer)["data"]])

        def score(rows: Sequence[str], columns: Sequence[str]) -> np.ndarray:
            found: np.ndarray = vectors(rows) @ vectors(columns).T
            return found

        yield score


@pytest.mark.parametrize("language", ["en", "ja", "zh"])
def test_it_finds_more_passages_of_a_handbook_than_common_words_do(
    language: str, by_meaning: evaluate.Scorer
) -> None:
    handbook = evaluate.handbook(language)
    found = {
        scorer: evaluate.recall(scorer(handbook.questions, handbook.passages), handbook.right, 3)
        for scorer in (by_meaning, evaluate.bm25_scorer, evaluate.trigram_scorer)
    }
    assert found[by_meaning] > max(found[evaluate.bm25_scorer], found[evaluate.trigram_scorer]) + 0.1
    assert found[by_meaning] >= 0.6


def test_a_question_finds_the_passage_in_another_language(by_meaning: evaluate.Scorer) -> None:
    questions = ["Where can I park my car?", "駐車場はどこですか", "哪里可以停车？"]
    passages = [
        "Cars may be left in the car park behind the building.",
        "駐車場は建物の裏にあります。",
        "停车场在大楼后面。",
        "Lunch is served from noon.",
        "昼食は正午からです。",
        "午餐从中午开始供应。",
    ]
    scores = by_meaning(questions, passages)
    assert (scores[:, :3].min(axis=1) > scores[:, 3:].max(axis=1)).all()
