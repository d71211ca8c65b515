"""What a request for vectors means: from texts to rows, and from rows to vectors or to an order.

    texts ─prefix─▶ ─tokens─▶ rows ─worker─▶ vectors
    query, documents ─pairs─▶ rows ─worker─▶ logits ─▶ scores from 0 to 1, best first

Knows no HTTP and no MLX. Safe to use from several threads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_backend.embedding.base import Row
from mlx_backend.errors import EngineRefused, RequestError
from mlx_backend.models.description import ModelDescription

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from mlx_backend.embedding.recipe import Role
    from mlx_backend.embedding.worker import Job, Worker

MAX_TEXTS = 2048  # in a request, as OpenAI has it


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorsRequest:
    """Texts, or rows of token ids, to make vectors of. `most` cuts longer ones; None refuses those."""

    texts: Sequence[str | Sequence[int]]
    role: Role | None = None
    dimensions: int | None = None
    most: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingRequest:
    """Documents to put in the order of their worth for a query."""

    query: str
    documents: Sequence[str]
    instruction: str | None = None


@dataclass(frozen=True, slots=True)
class Running:
    """What is being computed. `wait` in one thread; `close` from any. `tokens` are those of its rows."""

    job: Job
    tokens: int
    cut: int = 0  # documents of which only the beginning was read

    def vectors(self) -> list[array[float]] | None:
        """Wait for the vectors, in order; None if it was closed. Raises EngineError."""
        return self.job.wait()

    def scores(self, *, raw: bool = False) -> list[float] | None:
        """Wait for the scores, in the documents' order: from 0 to 1, or the logits as they are."""
        found = self.job.wait()
        if found is None:
            return None
        logits = [vector[0] for vector in found]
        return logits if raw else [_sigmoid(logit) for logit in logits]

    def close(self) -> None:
        """Stop computing within one stage."""
        self.job.close()


class Embedder:
    """One model that makes vectors, or one that ranks: which of them, its facts say."""

    def __init__(self, engine: Worker) -> None:
        self.engine = engine

    def description(self) -> ModelDescription:
        """What it can do."""
        facts = self.engine.facts
        return ModelDescription(
            kind=facts.type, context_length=facts.context_length, capabilities=(facts.type,)
        )

    def embed(self, request: VectorsRequest) -> Running:
        """Begin to make vectors. Raises RequestError for what cannot be done, EngineBusy or EngineStopped."""
        dimensions = self._dimensions(request.dimensions)
        rows = [self._row(at, text, request) for at, text in enumerate(request.texts)]
        return Running(self.engine.submit(rows, dimensions), sum(len(row.tokens) for row in rows))

    def rank(self, request: RankingRequest) -> Running:
        """Begin to score documents. Raises RequestError for what cannot be done, EngineBusy or EngineStopped."""
        facts = self.engine.facts
        if request.instruction is not None and not facts.instructions:
            raise RequestError(
                f"instruction: {facts.model_id!r} takes none; it was trained for one kind of question.",
                "instruction",
            )
        rows, cut = [], 0
        for document in request.documents:
            try:
                row, shortened = facts.encoder.pair(
                    request.query, document, request.instruction, facts.context_length
                )
            except EngineRefused as error:
                raise RequestError(str(error), "query", "context_length_exceeded") from None
            rows.append(row)
            cut += shortened
        return Running(self.engine.submit(rows), sum(len(row.tokens) for row in rows), cut)

    def tokens(self, text: str, *, around: bool = True) -> list[int]:
        """Return a text's tokens; those that stand around every text only if `around`."""
        return list(self.engine.facts.encoder.text(text, around=around).tokens)

    def _row(self, at: int, text: str | Sequence[int], request: VectorsRequest) -> Row:
        facts = self.engine.facts
        most = (
            None if request.most is None else min(request.most or facts.context_length, facts.context_length)
        )
        if isinstance(text, str):
            prefix = facts.recipe.prefix(request.role)
            row = facts.encoder.text(text if text.startswith(prefix) else prefix + text, most)
        else:
            size = facts.encoder.vocabulary_size
            if bad := [token for token in text if not 0 <= token < size]:
                raise RequestError(
                    f"input[{at}] holds token id {bad[0]}; the model's ids are 0 to {size - 1}.", "input"
                )
            row = Row(text[:most])
        length = len(row.tokens)
        if length > facts.context_length:
            raise RequestError(
                f"input[{at}] has {length} tokens; {facts.model_id!r} reads {facts.context_length}. Send shorter "
                "texts, or truncate = true to have only their beginnings read.",
                "input",
                "context_length_exceeded",
                numbers={"prompt_tokens": length, "max_model_len": facts.context_length},
            )
        if not length:
            raise RequestError(f"input[{at}] is empty.", "input")
        return row

    def _dimensions(self, wanted: int | None) -> int | None:
        facts = self.engine.facts
        own = facts.dimensions
        if wanted is None or wanted == own:
            return None
        if wanted > own:
            raise RequestError(
                f"dimensions = {wanted}: the vectors of {facts.model_id!r} have {own}.", "dimensions"
            )
        if not facts.recipe.matryoshka:
            raise RequestError(
                f"dimensions = {wanted}: {facts.model_id!r} makes vectors of {own} and was not trained to have them "
                "shortened, as far as its files say. Leave the field out, or set matryoshka = true for the model.",
                "dimensions",
            )
        return wanted


def _sigmoid(logit: float) -> float:
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    grown = math.exp(logit)
    return grown / (1 + grown)
