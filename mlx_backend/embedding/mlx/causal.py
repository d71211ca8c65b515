"""Models that mlx-lm knows, read instead of continued: Qwen3-Embedding, EmbeddingGemma, Qwen3-Reranker.

A causal model reads rows in chunks over a cache, so that a long text holds the device for no longer than a short
one. EmbeddingGemma is a Gemma 3 that looks in both directions: its layers are run with masks that let it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx_lm.utils
from mlx_lm.models.cache import make_prompt_cache

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_PREFIX = "model."


def load_causal(folder: Path, *, ranks: bool) -> tuple[Any, dict[str, Any]]:
    """Load with mlx-lm, lazily; also weights that were saved without their head and its prefix."""
    tied = {} if ranks else {"tie_word_embeddings": True}  # a network that makes vectors needs no head
    network, config = mlx_lm.utils.load_model(
        folder, lazy=True, model_config=tied, get_model_classes=lambda config: _classes(config, ranks=ranks)
    )
    return network, config


def _classes(config: dict[str, Any], *, ranks: bool) -> tuple[type[Any], type[Any]]:
    found = mlx_lm.utils._get_classes(config)
    model: Any = found[0]

    class Readable(model):
        def sanitize(self, weights: Mapping[str, mx.array]) -> Any:
            if not any(name.startswith(_PREFIX) for name in weights):
                weights = {_PREFIX + name: value for name, value in weights.items()}
            if not ranks:
                weights = {name: value for name, value in weights.items() if name.startswith(f"{_PREFIX}")}
            return super().sanitize(weights) if hasattr(model, "sanitize") else weights

    return Readable, found[1]


class Causal:
    """Reads padded rows from left to right: what a token becomes does not depend on what comes after it."""

    def __init__(self, network: Any) -> None:
        self.network = network

    def read(self, tokens: mx.array, most: int) -> Iterator[tuple[int, mx.array]]:
        """Give hidden states chunk by chunk, each with its first position, `most` tokens at a time."""
        rows, count = tokens.shape
        chunk = max(1, most // rows)
        cache = make_prompt_cache(self.network) if chunk < count else None
        for begin in range(0, count, chunk):
            hidden = self.network.model(tokens[:, begin : begin + chunk], cache)
            if cache is not None:
                mx.eval([layer.state for layer in cache], hidden)
            yield begin, hidden

    def logits(self, hidden: mx.array) -> mx.array:
        """Return how likely each token is to come after these states."""
        head = getattr(self.network, "lm_head", None)
        return head(hidden) if head is not None else self.network.model.embed_tokens.as_linear(hidden)


class Bidirectional:
    """A Gemma 3 that looks in both directions, layer by layer as the encoders are."""

    def __init__(self, network: Any, config: Mapping[str, Any]) -> None:
        self._model = network.model
        self._pattern = network.args.sliding_window_pattern
        self._window = config.get("sliding_window", 512) // 2

    @property
    def layers(self) -> list[Any]:
        """The layers, in order: hidden states and lengths in, hidden states out."""
        return [self._layer(at, layer) for at, layer in enumerate(self._model.layers)]

    def begin(self, tokens: mx.array, _types: mx.array) -> mx.array:
        """Return the hidden states that the first layer reads."""
        hidden = self._model.embed_tokens(tokens)
        # In the weights' own precision, as the model's makers have it; mlx-lm always rounds it to bfloat16.
        return hidden * mx.array(self._model.args.hidden_size**0.5, hidden.dtype)

    def finish(self, hidden: mx.array) -> mx.array:
        """Return what comes out of the last layer, as it is pooled."""
        return self._model.norm(hidden)

    def _layer(self, at: int, layer: Any) -> Any:
        slides = (at + 1) % self._pattern != 0

        def run(hidden: mx.array, lengths: mx.array | None) -> mx.array:
            return layer(hidden, self._mask(hidden.shape[1], lengths, slides=slides), None)

        return run

    def _mask(self, count: int, lengths: mx.array | None, *, slides: bool) -> mx.array | None:
        column = mx.arange(count)
        mask = None if lengths is None else (column[None] < lengths[:, None])[:, None, None]
        if slides and count > self._window + 1:
            near = mx.abs(column[:, None] - column[None]) <= self._window
            mask = near if mask is None else (mask & near) | mx.eye(count, dtype=mx.bool_)
        return mask
