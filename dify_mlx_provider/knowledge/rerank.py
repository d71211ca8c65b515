"""One call of Dify for a ranking: a question and documents out, their scores back, best first.

Dify compares scores with a threshold from 0 to 1. mlx-backend, vLLM and Jina send such scores; a server that sends the
model's own numbers (llama.cpp) is understood too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dify_mlx_provider.upstream import sse
from dify_mlx_provider.upstream.errors import MIN_TRUNCATED_LENGTH, Refused, Unavailable
from dify_mlx_provider.upstream.requests import post_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dify_mlx_provider.upstream.credentials import Credentials


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document's place in what was sent, and its worth from 0 to 1."""

    index: int
    score: float


def rank(
    model: str,
    credentials: Credentials,
    query: str,
    documents: Sequence[str],
    *,
    threshold: float | None = None,
    top_n: int | None = None,
) -> list[RankedDocument]:
    """Rank documents, best first; leave out those below the threshold. Raises a ServerError."""
    if not documents:
        return []
    answer = _asked(model, credentials, query, list(documents))
    scores = _scores(answer, len(documents))
    if scores is None:
        raise Refused(
            f"the server at {credentials.base_url} answered with something other than {len(documents)} scores. "
            f"Is {model!r} a rerank model?"
        )
    if any(not 0 <= score <= 1 for score in scores.values()):
        scores = {at: _sigmoid(score) for at, score in scores.items()}
    ranked = sorted((RankedDocument(at, score) for at, score in scores.items()), key=lambda each: -each.score)
    kept = [each for each in ranked if threshold is None or each.score >= threshold]
    return kept[:top_n] if top_n is not None and top_n > 0 else kept


def _asked(model: str, credentials: Credentials, query: str, documents: list[str]) -> Any:
    """Ask for the scores; where the texts are too long, of less of the longest: a question may be a page, too."""
    try:
        return post_json(credentials, model, "/rerank", {"query": query, "documents": documents}, "rerank")
    except (Refused, Unavailable) as error:
        longest = max(map(len, (query, *documents)))
        if not error.is_length_error or longest <= MIN_TRUNCATED_LENGTH:
            raise
        most = longest * 2 // 3
        return _asked(model, credentials, query[:most], [document[:most] for document in documents])


def _scores(answer: Any, count: int) -> dict[int, float] | None:
    """Read the scores of an answer by the documents' places; None if they are not all there."""
    listed = answer.get("results", answer.get("data"))
    if not isinstance(listed, list):
        return None
    scores: dict[int, float] = {}
    for entry in listed:
        index = entry.get("index") if isinstance(entry, dict) else None
        score = (
            sse.finite_number(entry.get("relevance_score", entry.get("score")))
            if isinstance(entry, dict)
            else None
        )
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count:
            return None
        if score is None:
            return None
        scores[index] = score
    return scores if len(scores) == count else None


def _sigmoid(number: float) -> float:
    if number >= 0:
        return 1 / (1 + math.exp(-number))
    grown = math.exp(number)
    return grown / (1 + grown)
