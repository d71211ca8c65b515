"""One call of Dify for a ranking: a query and documents out, their scores back, best first.

Dify compares scores with a threshold from 0 to 1. mlx-backend, vLLM and Jina send such scores; the raw scores of
llama.cpp go through a sigmoid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dify_mlx_provider.servers.requests import post_json
from dify_mlx_provider.upstream import sse
from dify_mlx_provider.upstream.errors import MIN_TRUNCATED_LENGTH, Refused, Unavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dify_mlx_provider.upstream.credentials import Credentials


@dataclass(frozen=True, slots=True)
class DocumentScore:
    """A document's index among those sent, and its relevance from 0 to 1."""

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
) -> list[DocumentScore]:
    """Rank documents, best first; leave out those below the threshold. Raises a ServerError."""
    if not documents:
        return []
    answer = _request(model, credentials, query, list(documents))
    scores = _scores(answer, len(documents))
    if scores is None:
        raise Refused(
            f"the server at {credentials.base_url} answered with something other than {len(documents)} scores. "
            f"Is {model!r} a rerank model?"
        )
    if any(not 0 <= score <= 1 for score in scores.values()):
        scores = {index: _sigmoid(score) for index, score in scores.items()}
    ranked = sorted(
        (DocumentScore(index, score) for index, score in scores.items()), key=lambda each: -each.score
    )
    passing = [each for each in ranked if threshold is None or each.score >= threshold]
    return passing[:top_n] if top_n is not None and top_n > 0 else passing


def _request(model: str, credentials: Credentials, query: str, documents: list[str]) -> Any:
    """Request the scores; if the texts are too long, cut the longest, be it the query, and try again."""
    try:
        return post_json(credentials, model, "/rerank", {"query": query, "documents": documents}, "rerank")
    except (Refused, Unavailable) as error:
        longest = max(map(len, (query, *documents)))
        if not error.is_length_error or longest <= MIN_TRUNCATED_LENGTH:
            raise
        limit = longest * 2 // 3
        return _request(model, credentials, query[:limit], [document[:limit] for document in documents])


def _scores(answer: Any, count: int) -> dict[int, float] | None:
    """Return an answer's scores by document index; None if they are not all there."""
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
    exponential = math.exp(number)
    return exponential / (1 + exponential)
