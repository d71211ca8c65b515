"""Models that mlx-lm implements, used to encode and not to generate: Qwen3-Embedding, EmbeddingGemma, Qwen3-Reranker.

A causal model runs a batch in chunks over a KV cache, so that a long text occupies the device for no longer at a time
than a short one. EmbeddingGemma is a Gemma 3 with bidirectional attention: its layers run with masks that allow that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_backend.embedding.mlx.encoders import attention_mask
from mlx_backend.layers.architecture import load_network

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_PREFIX = "model."


def load_causal(folder: Path, *, rerank: bool) -> tuple[Any, dict[str, Any]]:
    """Load with mlx-lm, lazily; also weights that were saved without the output head and without their prefix."""
    overrides = {} if rerank else {"tie_word_embeddings": True}  # an embedding model needs no output head
    return load_network(
        folder,
        overrides=overrides,
        change=lambda base: _with_prefixed_weights(base, rerank=rerank),
    )


def _with_prefixed_weights(base: Any, *, rerank: bool) -> type[Any]:
    """Return mlx-lm's class of a network with weight names made complete."""

    class WithPrefixedWeights(base):
        def sanitize(self, weights: Mapping[str, mx.array]) -> Any:
            if not any(name.startswith(_PREFIX) for name in weights):
                weights = {_PREFIX + name: value for name, value in weights.items()}
            if not rerank:
                weights = {name: value for name, value in weights.items() if name.startswith(_PREFIX)}
            return super().sanitize(weights) if hasattr(base, "sanitize") else weights

    return WithPrefixedWeights


class Causal:
    """A causal model over padded batches: a token's state does not depend on what comes after it, so not on padding."""

    def __init__(self, network: Any) -> None:
        self.network = network

    def hidden_states(self, tokens: mx.array, stage_tokens: int) -> Iterator[tuple[int, mx.array]]:
        """Yield each chunk's first position and hidden states; a chunk has about `stage_tokens` tokens."""
        batch, count = tokens.shape
        chunk = max(1, stage_tokens // batch)
        cache = make_prompt_cache(self.network) if chunk < count else None
        for start in range(0, count, chunk):
            hidden = self.network.model(tokens[:, start : start + chunk], cache)
            if cache is not None:
                mx.eval([layer.state for layer in cache], hidden)
            yield start, hidden

    def logits(self, hidden: mx.array) -> mx.array:
        """Return the logits of the token that follows each state."""
        head = getattr(self.network, "lm_head", None)
        return head(hidden) if head is not None else self.network.model.embed_tokens.as_linear(hidden)


class Bidirectional:
    """A Gemma 3 with bidirectional attention, run layer by layer as the encoders are."""

    def __init__(self, network: Any, config: Mapping[str, Any]) -> None:
        self._model = network.model
        self._pattern = network.args.sliding_window_pattern
        self._window = config.get("sliding_window", 512) // 2

    @property
    def layers(self) -> list[Any]:
        """The layers, in order: functions of hidden states and lengths to hidden states."""
        return [self._layer(index, layer) for index, layer in enumerate(self._model.layers)]

    def embed(self, tokens: mx.array, _type_ids: mx.array) -> mx.array:
        """Return the input of the first layer."""
        hidden = self._model.embed_tokens(tokens)
        # In the weights' own precision, as in the original implementation; mlx-lm always rounds it to bfloat16.
        return hidden * mx.array(self._model.args.hidden_size**0.5, hidden.dtype)

    def normalise(self, hidden: mx.array) -> mx.array:
        """Apply the final norm to the output of the last layer."""
        return self._model.norm(hidden)

    def _layer(self, index: int, layer: Any) -> Any:
        window = self._window if (index + 1) % self._pattern else None

        def run(hidden: mx.array, lengths: mx.array | None) -> mx.array:
            count = hidden.shape[1]
            return layer(hidden, attention_mask(0, count, 0, count, lengths, window), None)

        return run
