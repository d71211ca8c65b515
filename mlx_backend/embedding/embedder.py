"""What an embedding or rerank request means: from texts to tokens, and from the network's output to vectors or scores.

    texts ─prefix─▶ ─encode─▶ tokens ─worker─▶ vectors
    query, documents ─encode pairs─▶ tokens ─worker─▶ logits ─▶ scores from 0 to 1

Knows no HTTP and no MLX. Thread-safe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_backend.embedding.text_encoder import EncodedText
from mlx_backend.engine.base import ANYONE
from mlx_backend.errors import CONTEXT_LENGTH_EXCEEDED, EngineRefused, RequestError, overflow_sentence
from mlx_backend.models.description import ModelDescription

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from mlx_backend.embedding.embedding_config import Role
    from mlx_backend.embedding.worker import EmbeddingJob, Worker
    from mlx_backend.engine.base import QueueClient

MAX_TEXTS = 2048
"""Texts in a request; OpenAI's limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """Texts or lists of token ids to embed.

    Longer texts are truncated to `truncate_to` tokens (0: to the model's context length); None refuses them.
    """

    texts: Sequence[str | Sequence[int]]
    role: Role | None = None
    dimensions: int | None = None
    truncate_to: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankRequest:
    """Documents to score for their relevance to a query."""

    query: str
    documents: Sequence[str]
    instruction: str | None = None


@dataclass(frozen=True, slots=True)
class PendingResult:
    """A result that is being computed. Wait in one thread; `close` from any."""

    job: EmbeddingJob
    tokens: int
    """Of all texts."""
    truncated: int = 0
    """How many documents were."""

    def vectors(self) -> list[array[float]] | None:
        """Wait for the vectors, in the texts' order; None if it was closed. Raises EngineError."""
        return self.job.wait()

    def scores(self, *, raw: bool = False) -> list[float] | None:
        """Wait for the scores, in the documents' order, from 0 to 1; `raw`: the logits. None if it was closed."""
        vectors = self.job.wait()
        if vectors is None:
            return None
        logits = [vector[0] for vector in vectors]
        return logits if raw else [_sigmoid(logit) for logit in logits]

    def close(self) -> None:
        """Stop computing within one stage."""
        self.job.close()


class Embedder:
    """One embedding or rerank model, as its `info` says."""

    def __init__(self, engine: Worker) -> None:
        self.engine = engine

    def description(self) -> ModelDescription:
        """Return what it can do."""
        info = self.engine.info
        return ModelDescription(
            kind=info.model_type, context_length=info.context_length, capabilities=(info.model_type,)
        )

    def embed(self, request: EmbeddingRequest, client: QueueClient = ANYONE) -> PendingResult:
        """Start to embed texts. Raises RequestError for what is not possible, EngineBusy or EngineStopped."""
        dimensions = self._dimensions(request.dimensions)
        texts = [self._encode(index, text, request) for index, text in enumerate(request.texts)]
        return PendingResult(self.engine.submit(texts, dimensions, client=client.name), _count_tokens(texts))

    def rerank(self, request: RerankRequest, client: QueueClient = ANYONE) -> PendingResult:
        """Start to score documents. Raises RequestError for what is not possible, EngineBusy or EngineStopped."""
        info = self.engine.info
        if request.instruction is not None and not info.accepts_instructions:
            raise RequestError(
                f"instruction: {info.model_id!r} takes none; it was trained for one kind of question.",
                "instruction",
            )
        pairs, truncated = [], 0
        for document in request.documents:
            try:
                pair, was_truncated = info.encoder.encode_pair(
                    request.query, document, request.instruction, info.context_length
                )
            except EngineRefused as error:
                raise RequestError(str(error), "query", CONTEXT_LENGTH_EXCEEDED) from None
            pairs.append(pair)
            truncated += was_truncated
        return PendingResult(self.engine.submit(pairs, client=client.name), _count_tokens(pairs), truncated)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a text's tokens."""
        return list(self.engine.info.encoder.encode(text, add_special_tokens=add_special_tokens).tokens)

    def _encode(self, index: int, text: str | Sequence[int], request: EmbeddingRequest) -> EncodedText:
        info = self.engine.info
        limit = request.truncate_to
        if limit is not None:
            limit = min(limit or info.context_length, info.context_length)
        if isinstance(text, str):
            prefix = info.config.prefix(request.role)
            encoded = info.encoder.encode(text if text.startswith(prefix) else prefix + text, limit)
        else:
            size = info.encoder.vocabulary_size
            if invalid := [token for token in text if not 0 <= token < size]:
                raise RequestError(
                    f"input[{index}] holds token id {invalid[0]}; the model's ids are 0 to {size - 1}.",
                    "input",
                )
            encoded = EncodedText(text[:limit])
        length = len(encoded.tokens)
        if length > info.context_length:
            raise RequestError(
                f"input[{index}] has {length} tokens; the limit of {info.model_id!r} is {info.context_length}. "
                "Send shorter texts, or truncate = true to use only the beginning of each. "
                + overflow_sentence("input", str(length), info.context_length),
                "input",
                CONTEXT_LENGTH_EXCEEDED,
                numbers={"prompt_tokens": length, "max_model_len": info.context_length},
            )
        if not length:
            raise RequestError(f"input[{index}] is empty.", "input")
        return encoded

    def _dimensions(self, wanted: int | None) -> int | None:
        """Return how many dimensions to keep, None for all. Raises RequestError."""
        info = self.engine.info
        if wanted is None or wanted == info.dimensions:
            return None
        if wanted > info.dimensions:
            raise RequestError(
                f"dimensions = {wanted}: the vectors of {info.model_id!r} have {info.dimensions}.",
                "dimensions",
            )
        if not info.config.matryoshka:
            raise RequestError(
                f"dimensions = {wanted}: the vectors of {info.model_id!r} have {info.dimensions}, and its files do "
                "not say that it was trained to have them shortened. Leave the field out, or set matryoshka = true "
                "for the model.",
                "dimensions",
            )
        return wanted


def _count_tokens(texts: Sequence[EncodedText]) -> int:
    return sum(len(text.tokens) for text in texts)


def _sigmoid(logit: float) -> float:
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    exp = math.exp(logit)  # exp(-logit) could overflow
    return exp / (1 + exp)
