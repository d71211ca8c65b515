"""A model that reads, on MLX: loaded, run in stages, and turned into vectors or scores.

Implements the worker's `Network`. Runs on the worker's thread only, where the model is loaded too: MLX's streams
belong to threads.
"""

from __future__ import annotations

import logging
from array import array
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_backend.device.memory import format_bytes
from mlx_backend.device.mlx import weight_bytes
from mlx_backend.embedding.base import NetworkFacts
from mlx_backend.embedding.mlx.causal import Causal
from mlx_backend.embedding.mlx.loading import load_network
from mlx_backend.embedding.tokenizing import TextEncoder
from mlx_backend.errors import EngineError, EngineRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from mlx_backend.device.memory import MemoryBudget, MemoryReservation
    from mlx_backend.embedding.base import Row
    from mlx_backend.embedding.mlx.loading import Loaded
    from mlx_backend.embedding.recipe import EmbeddingOptions
    from mlx_backend.models.model_type import ModelType

log = logging.getLogger(__name__)

RUNS_BETWEEN_CLEANINGS = 64
WARM_UP = 8  # tokens


class MLXNetwork:
    """Implements the worker's `Network`."""

    def __init__(
        self,
        source: str,
        kind: ModelType,
        options: EmbeddingOptions,
        *,
        memory: MemoryBudget,
        model_id: str | None = None,
    ) -> None:
        self._source = source
        self._kind = kind
        self._options = options
        self._memory = memory
        self._model_id = model_id
        self._runs = 0
        self._reset()

    def _reset(self) -> None:
        self._model: Loaded | None = None
        self._answers = (0, 0)
        self._reservation: MemoryReservation | None = None

    def load(self, report: Callable[[float], None]) -> NetworkFacts:
        """Load the model on this thread and run it once."""
        options, ranks = self._options, self._kind == "rerank"
        model = self._model = load_network(self._source, options, report, ranks=ranks)
        causal = isinstance(model.network, Causal)
        encoder = TextEncoder(
            model.folder,
            model.name,
            model.vocabulary_size,
            ends=model.recipe.pooling == "last" and not ranks,
            asks=causal and ranks,
        )
        if causal and ranks:
            self._answers = encoder.answers()
        self._reservation = self._reserve(model)
        try:
            row = encoder.text("a b c", WARM_UP)
            [vector] = list(_to_the_end(self.run([row], None, WARM_UP)))
        except Exception as error:
            raise EngineError(f"The model was loaded but cannot be run: {error}") from error
        report(1.0)
        return NetworkFacts(
            model_id=self._model_id or model.name,
            type=self._kind,
            context_length=model.context_length,
            encoder=encoder,
            recipe=model.recipe,
            dimensions=0 if ranks else len(vector),
            instructions=causal and ranks,
        )

    def run(
        self, rows: Sequence[Row], dimensions: int | None, most: int
    ) -> Generator[None, None, list[array[float]]]:
        """Give a vector for each row, or its score. After each `next` about `most` tokens' worth is done."""
        assert self._model is not None
        reservation = self._reservation
        assert reservation is not None
        count = max(len(row.tokens) for row in rows)
        tokens = mx.array([[*row.tokens, *[0] * (count - len(row.tokens))] for row in rows])
        lengths = mx.array([len(row.tokens) for row in rows])
        try:
            _set_working(reservation, self._bytes(len(rows), count, most))
            if isinstance(self._model.network, Causal):
                found = yield from self._read(tokens, lengths, most)
            else:
                found = yield from self._climb(rows, tokens, lengths, most)
            return self._told(found, dimensions)
        finally:
            reservation.set_working(0)
            self._runs += 1
            if self._runs % RUNS_BETWEEN_CLEANINGS == 0:
                mx.clear_cache()

    def unload(self) -> None:
        """Give the memory back."""
        if self._reservation is not None:
            self._reservation.close()
        self._reset()
        mx.clear_cache()

    def close(self) -> None:
        """Leave MLX's streams of this thread in order; a thread that does not aborts the process in the end."""
        mx.synchronize()
        mx.clear_streams()

    def _reserve(self, model: Loaded) -> MemoryReservation:
        weights, limit = weight_bytes(model.weights), self._options.memory_bytes or self._memory.limit
        if weights > limit:
            raise EngineError(
                f"{model.name!r} takes {format_bytes(weights)} of memory, and {format_bytes(limit)} is the limit."
            )
        return self._memory.reserve(weights, limit=limit)

    def _bytes(self, rows: int, count: int, most: int) -> int:
        """Return what a run takes: an encoder sees all tokens at once, a causal model a chunk of them."""
        assert self._model is not None
        step = rows * count
        if isinstance(self._model.network, Causal):
            step = min(step, max(most, rows))
        return step * self._model.bytes_per_token + rows * count * self._model.kept_per_token

    # -- running ---------------------------------------------------------------------------------------------

    def _climb(
        self, rows: Sequence[Row], tokens: mx.array, lengths: mx.array, most: int
    ) -> Generator[None, None, mx.array]:
        """Run an encoder some layers at a time."""
        assert self._model is not None
        network = self._model.network
        count = tokens.shape[1]
        types = mx.array(
            [[*(row.types or [0] * len(row.tokens)), *[0] * (count - len(row.tokens))] for row in rows]
        )
        padded = any(len(row.tokens) < count for row in rows)
        hidden = network.begin(tokens, types)
        layers = network.layers
        at_once = max(1, len(layers) * most // tokens.size)
        for number, layer in enumerate(layers, 1):
            hidden = layer(hidden, lengths if padded else None)
            if number % at_once == 0 and number < len(layers):
                mx.eval(hidden)
                yield
        hidden = network.finish(hidden)
        if self._kind == "rerank":
            return network.score(hidden, lengths)[:, None]
        return _pooled(self._model.recipe.pooling, hidden, lengths)

    def _read(self, tokens: mx.array, lengths: mx.array, most: int) -> Generator[None, None, mx.array]:
        """Run a causal model chunk by chunk."""
        assert self._model is not None
        network, pooling = self._model.network, self._model.recipe.pooling
        found: mx.array | None = None
        for begin, hidden in network.read(tokens, most):
            part = self._of_chunk(pooling, hidden, lengths, begin)
            found = part if found is None else found + part
            if begin + hidden.shape[1] < tokens.shape[1]:
                mx.eval(found)
                yield
        assert found is not None  # no row is empty
        if self._kind == "rerank":
            yes, no = self._answers
            logits = network.logits(found.astype(self._model.dtype)).astype(mx.float32)
            return (logits[:, yes] - logits[:, no])[:, None]
        return found / lengths[:, None] if pooling == "mean" else found

    def _of_chunk(self, pooling: str, hidden: mx.array, lengths: mx.array, begin: int) -> mx.array:
        """Return the sum of those states of a chunk that count."""
        positions = mx.arange(begin, begin + hidden.shape[1])[None]
        if pooling == "mean" and self._kind != "rerank":
            counts = positions < lengths[:, None]
        elif pooling == "cls" and self._kind != "rerank":
            counts = (positions == 0) & (lengths[:, None] > 0)
        else:
            counts = positions == lengths[:, None] - 1
        return mx.where(counts[..., None], hidden.astype(mx.float32), 0).sum(axis=1)

    def _told(self, found: mx.array, dimensions: int | None) -> list[array[float]]:
        """Finish vectors, and take them out of MLX."""
        assert self._model is not None
        if self._kind != "rerank":
            for dense in self._model.dense:
                found = dense(found)
            found = found[:, :dimensions] if dimensions is not None else found
            found = found / mx.maximum(mx.linalg.norm(found, axis=1, keepdims=True), 1e-12)
        found = mx.contiguous(found.astype(mx.float32))
        mx.eval(found)
        if not mx.all(mx.isfinite(found)).item():
            raise EngineError(
                "The model computed something that is no number; its weights may need more than half precision."
            )
        told = []
        data, size = bytes(memoryview(found)), found.shape[1] * 4
        for begin in range(0, len(data), size):
            vector = array("f")
            vector.frombytes(data[begin : begin + size])
            told.append(vector)
        return told


def _set_working(reservation: MemoryReservation, nbytes: int) -> None:
    """Reserve what a run takes. Raises EngineRefused for what would not fit even alone."""
    room = reservation.limit - reservation.weights
    if nbytes > room:
        raise EngineRefused(
            f"So much text at once would need {format_bytes(nbytes)} of memory; the model leaves "
            f"{format_bytes(room)} of {format_bytes(reservation.limit)}. Send shorter texts."
        )
    reservation.set_working(nbytes)


def _pooled(pooling: str, hidden: mx.array, lengths: mx.array) -> mx.array:
    hidden = hidden.astype(mx.float32)
    match pooling:
        case "cls":
            return hidden[:, 0]
        case "last":
            return mx.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    there = (mx.arange(hidden.shape[1])[None] < lengths[:, None])[..., None]
    return mx.where(there, hidden, 0).sum(axis=1) / lengths[:, None]


def _to_the_end(running: Generator[None, None, list[array[float]]]) -> list[array[float]]:
    while True:
        try:
            next(running)
        except StopIteration as end:
            vectors: list[array[float]] = end.value
            return vectors
