"""An embedding or rerank model on MLX: loaded, run in stages, and its output turned into vectors or logits.

Implements the worker's `Network`. Every method runs on the worker's thread, which also loads the model: MLX's streams
belong to threads.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_backend.device.memory import format_bytes, room_for_weights, too_large
from mlx_backend.device.mlx import weight_bytes
from mlx_backend.embedding.mlx.causal import Causal
from mlx_backend.embedding.mlx.loading import load_embedding_model
from mlx_backend.embedding.text_encoder import TextEncoder
from mlx_backend.embedding.worker import NetworkInfo
from mlx_backend.errors import EngineError, EngineRefused
from mlx_backend.layers.many_rows import use_many_rows_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from mlx_backend.device import Device
    from mlx_backend.device.memory import MemoryReservation
    from mlx_backend.device.wired import WiredWeights
    from mlx_backend.embedding.embedding_config import EmbeddingOptions, Pooling
    from mlx_backend.embedding.mlx.loading import EmbeddingModel
    from mlx_backend.embedding.text_encoder import EncodedText
    from mlx_backend.layers.many_rows import ManyRows
    from mlx_backend.models.files import ModelType

RUNS_PER_CACHE_CLEAR = 64
WARM_UP_TOKENS = 8


class MLXNetwork:
    """Implements the worker's `Network`."""

    def __init__(
        self,
        source: str,
        model_type: ModelType,
        options: EmbeddingOptions,
        *,
        device: Device,
        model_id: str | None = None,
    ) -> None:
        self._source = source
        self._model_type = model_type
        self._options = options
        self._device = device
        self._model_id = model_id
        self._runs = 0
        self._reset()

    def _reset(self) -> None:
        self._model: EmbeddingModel | None = None
        self._yes_no_tokens = (0, 0)
        """A causal reranker's tokens for "yes" and "no"."""
        self._many_rows: ManyRows | None = None
        self._reservation: MemoryReservation | None = None
        self._wired: WiredWeights | None = None

    def load(self, on_progress: Callable[[float], None]) -> NetworkInfo:
        """Load the model on this thread and run it once."""
        rerank = self._model_type == "rerank"
        model = self._model = load_embedding_model(
            self._source, self._options, on_progress, rerank=rerank, check_size=self._check_size
        )
        causal = isinstance(model.network, Causal)
        encoder = TextEncoder(
            model.folder,
            model.name,
            model.vocabulary_size,
            append_end_token=model.config.pooling == "last" and not rerank,
            rerank_prompt=causal and rerank,
        )
        if causal and rerank:
            self._yes_no_tokens = encoder.yes_no_tokens()
        try:
            self._many_rows = use_many_rows_layers([model.weights], model.dtype, dequantize=True)
            text = encoder.encode("a b c", WARM_UP_TOKENS)
            [vector] = _run_to_end(self.run([text], None, WARM_UP_TOKENS))
        except Exception as error:
            raise EngineError(f"The model was loaded but cannot be run: {error}") from error
        self._wired = self._device.wired.add(weight_bytes(model.weights))
        on_progress(1.0)
        return NetworkInfo(
            model_id=self._model_id or model.name,
            model_type=self._model_type,
            context_length=model.context_length,
            encoder=encoder,
            config=model.config,
            dimensions=0 if rerank else len(vector),
            accepts_instructions=causal and rerank,
        )

    def run(
        self, texts: Sequence[EncodedText], dimensions: int | None, stage_tokens: int
    ) -> Generator[None, None, list[array[float]]]:
        """Return a vector for each text, or its logit. Each `next` runs about `stage_tokens` tokens' worth of work."""
        assert self._model is not None
        reservation = self._reservation
        assert reservation is not None
        longest = max(len(text.tokens) for text in texts)
        tokens = mx.array([[*text.tokens, *[0] * (longest - len(text.tokens))] for text in texts])
        lengths = mx.array([len(text.tokens) for text in texts])
        try:
            self._reserve_working(reservation, len(texts), longest, stage_tokens)
            if isinstance(self._model.network, Causal):
                output = yield from self._run_causal(tokens, lengths, stage_tokens)
            else:
                output = yield from self._run_encoder(texts, tokens, lengths, stage_tokens)
            return self._vectors(output, dimensions)
        finally:
            reservation.set_working(0)
            reservation.withdraw()
            self._runs += 1
            if self._runs % RUNS_PER_CACHE_CLEAR == 0:
                mx.clear_cache()

    def unload(self) -> None:
        if self._reservation is not None:
            self._reservation.close()
        wired = self._wired
        self._reset()
        mx.clear_cache()
        if wired is not None:
            wired.close()

    def close(self) -> None:
        """Clean up this thread's MLX streams; a thread that does not makes the process abort at exit."""
        mx.synchronize()
        mx.clear_streams()

    @property
    def _limit(self) -> int:
        return self._options.memory_bytes or self._device.memory.limit

    def _check_size(self, name: str, weights: int) -> None:
        if weights > room_for_weights(self._limit):
            is_given = self._options.memory_bytes is not None
            raise EngineError(too_large(name, weights, self._limit, is_given=is_given))
        self._reservation = self._device.memory.reserve(weights, limit=self._limit)

    def _reserve_working(
        self, reservation: MemoryReservation, batch: int, length: int, stage_tokens: int
    ) -> None:
        """Reserve memory for a run, with dequantised weights if those fit. Raises EngineRefused if a run never fits."""
        nbytes = self._working_bytes(batch, length, stage_tokens)
        room = reservation.limit - reservation.weights
        if nbytes > room:
            raise EngineRefused(
                f"That much text at once would need {format_bytes(nbytes)} of memory; the model leaves "
                f"{format_bytes(room)} of {format_bytes(reservation.limit)}. Send shorter texts."
            )
        many_rows = self._many_rows
        tokens = self._tokens_at_once(batch, length, stage_tokens)
        if many_rows is not None and (many_rows.has_experts or tokens >= many_rows.min_rows):
            many_rows.is_enabled = nbytes + many_rows.max_dequantized_bytes <= room
            nbytes += many_rows.max_dequantized_bytes if many_rows.is_enabled else 0
        reservation.set_working(nbytes)
        reservation.ask_for_excess()

    def _working_bytes(self, batch: int, length: int, stage_tokens: int) -> int:
        """Return the bytes that a run takes, dequantised weights aside."""
        assert self._model is not None
        at_once = self._tokens_at_once(batch, length, stage_tokens)
        return at_once * self._model.bytes_per_token + batch * length * self._model.cache_bytes_per_token

    def _tokens_at_once(self, batch: int, length: int, stage_tokens: int) -> int:
        """Return how many tokens are computed at once: all by an encoder, a chunk of them by a causal model."""
        assert self._model is not None
        tokens = batch * length
        return min(tokens, max(stage_tokens, batch)) if isinstance(self._model.network, Causal) else tokens

    # -- running ---------------------------------------------------------------------------------------------

    def _run_encoder(
        self, texts: Sequence[EncodedText], tokens: mx.array, lengths: mx.array, stage_tokens: int
    ) -> Generator[None, None, mx.array]:
        """Run an encoder, some layers in each stage."""
        assert self._model is not None
        network = self._model.network
        longest = tokens.shape[1]
        type_ids = mx.array(
            [
                [*(text.type_ids or [0] * len(text.tokens)), *[0] * (longest - len(text.tokens))]
                for text in texts
            ]
        )
        is_padded = any(len(text.tokens) < longest for text in texts)
        hidden = network.embed(tokens, type_ids)
        layers = network.layers
        layers_per_stage = max(1, len(layers) * stage_tokens // tokens.size)
        for number, layer in enumerate(layers, 1):
            hidden = layer(hidden, lengths if is_padded else None)
            if number % layers_per_stage == 0 and number < len(layers):
                mx.eval(hidden)
                yield
        hidden = network.normalise(hidden)
        if self._model_type == "rerank":
            return network.score(hidden, lengths)[:, None]
        pooling = self._model.config.pooling
        total = _sum_pooled(pooling, hidden, lengths, 0)
        return total / lengths[:, None] if pooling == "mean" else total

    def _run_causal(
        self, tokens: mx.array, lengths: mx.array, stage_tokens: int
    ) -> Generator[None, None, mx.array]:
        """Run a causal model, one chunk of tokens in each stage."""
        assert self._model is not None
        network = self._model.network
        pooling = "last" if self._model_type == "rerank" else self._model.config.pooling
        total: mx.array | None = None
        for start, hidden in network.hidden_states(tokens, stage_tokens):
            part = _sum_pooled(pooling, hidden, lengths, start)
            total = part if total is None else total + part
            if start + hidden.shape[1] < tokens.shape[1]:
                mx.eval(total)
                yield
        assert total is not None  # no text is empty
        if self._model_type == "rerank":
            yes, no = self._yes_no_tokens
            logits = network.logits(total.astype(self._model.dtype)).astype(mx.float32)
            return (logits[:, yes] - logits[:, no])[:, None]
        return total / lengths[:, None] if pooling == "mean" else total

    def _vectors(self, output: mx.array, dimensions: int | None) -> list[array[float]]:
        """Return the network's output as arrays; an embedding model's shortened and normalised."""
        assert self._model is not None
        if self._model_type != "rerank":
            for dense in self._model.dense:
                output = dense(output)
            output = output[:, :dimensions] if dimensions is not None else output
            output = output / mx.maximum(mx.linalg.norm(output, axis=1, keepdims=True), 1e-12)
        output = mx.contiguous(output.astype(mx.float32))
        mx.eval(output)
        if not mx.all(mx.isfinite(output)).item():
            raise EngineError(
                "The model's output contains infinity or NaN; its weights may need more than half precision."
            )
        vectors = []
        data, size = bytes(memoryview(output)), output.shape[1] * 4
        for start in range(0, len(data), size):
            vector = array("f")
            vector.frombytes(data[start : start + size])
            vectors.append(vector)
        return vectors


def _sum_pooled(pooling: Pooling, hidden: mx.array, lengths: mx.array, start: int) -> mx.array:
    """Return the sum of the states of a chunk that begins at `start` that are pooled: all, the first or the last."""
    positions = mx.arange(start, start + hidden.shape[1])[None]
    match pooling:
        case "mean":
            is_pooled = positions < lengths[:, None]
        case "cls":
            is_pooled = (positions == 0) & (lengths[:, None] > 0)
        case "last":
            is_pooled = positions == lengths[:, None] - 1
    return mx.where(is_pooled[..., None], hidden.astype(mx.float32), 0).sum(axis=1)


def _run_to_end(stages: Generator[None, None, list[array[float]]]) -> list[array[float]]:
    while True:
        try:
            next(stages)
        except StopIteration as end:
            vectors: list[array[float]] = end.value
            return vectors
