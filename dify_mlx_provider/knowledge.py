"""One call of Dify for vectors or for a ranking: texts out, and numbers back.

Embedding: texts go out in batches, and vectors come back in the texts' order. mlx-backend is told what a text is for
(a query, or a passage of a document), and knows the prefix its model wants. For other servers the form has two fields
for prefixes. Of a text that is too long only the beginning is embedded, as is usual: a document must not fail for one
long line. mlx-backend and vLLM truncate it when asked; for the others it is cut here, by an estimate, and again if they
refuse.

Reranking: a query and documents go out, and their scores come back, best first. Dify compares scores with a threshold
from 0 to 1. mlx-backend, vLLM and Jina send such scores; the raw scores of llama.cpp go through a sigmoid.
"""

from __future__ import annotations

import base64
import math
import sys
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dify_mlx_provider.servers import discovery
from dify_mlx_provider.servers.requests import post_json
from dify_mlx_provider.servers.token_count import estimate_tokens
from dify_mlx_provider.upstream import sse
from dify_mlx_provider.upstream.errors import MIN_TRUNCATED_LENGTH, Refused, Unavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dify_mlx_provider.upstream.credentials import Credentials


# -- embedding -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EmbeddedTexts:
    """One vector a text. `tokens` is the server's count, or an estimate."""

    vectors: list[list[float]]
    tokens: int


def embed(model: str, credentials: Credentials, texts: Sequence[str], *, query: bool) -> EmbeddedTexts:
    """Embed each text. Raises a ServerError."""
    size = credentials.max_chunks
    call = _EmbeddingCall(model, credentials, query=query)
    vectors: list[list[float]] = []
    tokens = 0
    for start in range(0, len(texts), size):
        embedded = call.embed_batch([call.prepare(text) for text in texts[start : start + size]])
        vectors += embedded.vectors
        tokens += embedded.tokens
    return EmbeddedTexts(vectors, tokens)


class _EmbeddingCall:
    """Requests to one server for the vectors of one kind of text."""

    def __init__(self, model: str, credentials: Credentials, *, query: bool) -> None:
        self._model = model
        self._credentials = credentials
        self._prefix = credentials.query_prefix if query else credentials.document_prefix
        profile = discovery.find_profile(credentials)
        # In base64 they are a quarter of the bytes, and no numbers to parse.
        self._fields: dict[str, Any] = {"encoding_format": profile.vector_encoding}
        self._size = credentials.context_size
        self._truncates_here = not profile.truncates_texts
        if profile.truncates_texts:
            self._fields["truncate_prompt_tokens"] = self._size or -1
        elif self._size is None and (served := discovery.find_model(model, credentials, "embedding")):
            self._size = served.context_size
        has_prefixes = credentials.query_prefix or credentials.document_prefix
        if "input_type" in profile.own_fields and not has_prefixes:
            self._fields["input_type"] = "query" if query else "document"

    def prepare(self, text: str) -> str:
        """Return a text with its prefix, cut if the server would not do it."""
        text = self._prefix + text
        if not self._truncates_here or self._size is None:
            return text
        estimate = estimate_tokens(text) + 2
        return text if estimate <= self._size else text[: max(1, len(text) * self._size // estimate)]

    def embed_batch(self, texts: Sequence[str]) -> EmbeddedTexts:
        """Embed a batch; if it is refused as too long, each text alone, and then less and less of it."""
        try:
            return self._request(texts)
        except (Refused, Unavailable) as error:  # llama.cpp answers with status 500
            if not self._truncates_here or not error.is_length_error:
                raise
            if len(texts) > 1:
                parts = [self.embed_batch([text]) for text in texts]
                return EmbeddedTexts([part.vectors[0] for part in parts], sum(part.tokens for part in parts))
            if len(texts[0]) <= MIN_TRUNCATED_LENGTH:
                raise
            return self.embed_batch([texts[0][: len(texts[0]) * 2 // 3]])

    def _request(self, texts: Sequence[str]) -> EmbeddedTexts:
        body = {"input": list(texts), **self._fields}
        answer = post_json(self._credentials, self._model, "/embeddings", body, "embedding")
        vectors = _vectors(answer, len(texts))
        if vectors is None:
            raise Refused(
                f"the server at {self._credentials.base_url} answered with something other than {len(texts)} vectors. "
                f"Is {self._model!r} an embedding model?"
            )
        usage = answer.get("usage")
        counted = usage.get("total_tokens") if isinstance(usage, dict) else None
        if not isinstance(counted, int) or isinstance(counted, bool) or counted < 1:
            counted = sum(map(estimate_tokens, texts))
        return EmbeddedTexts(vectors, counted)


def _vectors(answer: Any, count: int) -> list[list[float]] | None:
    """Return an answer's vectors in the texts' order; None if they are not all there."""
    listed = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(listed, list) or len(listed) != count:
        return None
    by_index: dict[int, list[float]] = {}
    for position, entry in enumerate(listed):
        if not isinstance(entry, dict) or (vector := _vector(entry.get("embedding"))) is None:
            return None
        index = entry.get("index", position)
        by_index[index if isinstance(index, int) else position] = vector
    if sorted(by_index) != list(range(count)) or len({len(vector) for vector in by_index.values()}) > 1:
        return None
    return [by_index[position] for position in range(count)]


def _vector(value: Any) -> list[float] | None:
    if isinstance(value, str):  # some servers always send base64
        try:
            packed = array("f", base64.b64decode(value, validate=True))
        except ValueError:
            return None
        if sys.byteorder == "big":
            packed.byteswap()
        value = packed.tolist()
    if not isinstance(value, list) or not value:
        return None
    numbers = [number for entry in value if (number := sse.finite_number(entry)) is not None]
    return numbers if len(numbers) == len(value) else None


# -- reranking -----------------------------------------------------------------------------------------------


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
        if not isinstance(entry, dict):
            return None
        index, score = entry.get("index"), sse.finite_number(entry.get("relevance_score", entry.get("score")))
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count or score is None:
            return None
        scores[index] = score
    return scores if len(scores) == count else None


def _sigmoid(number: float) -> float:
    if number >= 0:
        return 1 / (1 + math.exp(-number))
    exponential = math.exp(number)
    return exponential / (1 + exponential)
