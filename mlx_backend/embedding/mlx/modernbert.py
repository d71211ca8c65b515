"""ModernBERT (ruri-v3, gte-modernbert, modernbert-embed): rotary positions, sliding windows in two layers of three."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn

from mlx_backend.embedding.mlx.attention import attend
from mlx_backend.embedding.mlx.bert import ACTIVATIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

_DEFAULT_THETA = {"full_attention": 160_000.0, "sliding_attention": 10_000.0}
_THETA_KEYS = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}


class _ModernBertEmbeddings(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.norm = _norm(config)


class _ModernBertAttention(nn.Module):
    def __init__(self, config: Mapping[str, Any], layer_type: str) -> None:
        super().__init__()
        size, bias = config["hidden_size"], config.get("attention_bias", False)
        self.Wqkv = nn.Linear(size, 3 * size, bias=bias)
        self.Wo = nn.Linear(size, size, bias=bias)
        self._heads = config["num_attention_heads"]
        self._window = config.get("local_attention", 128) // 2 if layer_type == "sliding_attention" else None
        self._rope = nn.RoPE(size // self._heads, base=_theta(config, layer_type))

    def __call__(self, hidden: mx.array, lengths: mx.array | None) -> mx.array:
        batch, count, size = hidden.shape
        parts = self.Wqkv(hidden).reshape(batch, count, 3, self._heads, -1).transpose(2, 0, 3, 1, 4)
        attended = attend(
            self._rope(parts[0]),
            self._rope(parts[1]),
            parts[2],
            lengths,
            scale=(size // self._heads) ** -0.5,
            window=self._window,
        )
        return self.Wo(attended.transpose(0, 2, 1, 3).reshape(batch, count, size))


class _Mlp(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        size, inner, bias = config["hidden_size"], config["intermediate_size"], config.get("mlp_bias", False)
        self.Wi = nn.Linear(size, 2 * inner, bias=bias)
        self.Wo = nn.Linear(inner, size, bias=bias)
        self._activation = ACTIVATIONS[config.get("hidden_activation", "gelu")]

    def __call__(self, hidden: mx.array) -> mx.array:
        value, gate = mx.split(self.Wi(hidden), 2, axis=-1)
        return self.Wo(self._activation(value) * gate)


class _ModernBertLayer(nn.Module):
    def __init__(self, config: Mapping[str, Any], index: int, layer_type: str) -> None:
        super().__init__()
        self.attn_norm = _norm(config) if index else nn.Identity()
        self.attn = _ModernBertAttention(config, layer_type)
        self.mlp_norm = _norm(config)
        self.mlp = _Mlp(config)

    def __call__(self, hidden: mx.array, lengths: mx.array | None) -> mx.array:
        hidden = hidden + self.attn(self.attn_norm(hidden), lengths)
        return hidden + self.mlp(self.mlp_norm(hidden))


class _ModernBertHead(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        size = config["hidden_size"]
        self.dense = nn.Linear(size, size, bias=config.get("classifier_bias", False))
        self.norm = _norm(config)
        self._activation = ACTIVATIONS[config.get("classifier_activation", "gelu")]

    def __call__(self, hidden: mx.array) -> mx.array:
        return self.norm(self._activation(self.dense(hidden)))


class ModernBert(nn.Module):
    """An encoder that is run layer by layer; with `rerank`, it has a head that scores the pooled states."""

    prefixes = ("model.",)

    def __init__(self, config: Mapping[str, Any], *, rerank: bool) -> None:
        super().__init__()
        self.embeddings = _ModernBertEmbeddings(config)
        self.layers = [
            _ModernBertLayer(config, index, layer_type)
            for index, layer_type in enumerate(_layer_types(config))
        ]
        self.final_norm = _norm(config)
        if rerank:
            self.head = _ModernBertHead(config)
            self.classifier = nn.Linear(config["hidden_size"], 1)
            self._pooling = config.get("classifier_pooling", "cls")

    def embed(self, tokens: mx.array, _type_ids: mx.array) -> mx.array:
        """Return the input of the first layer."""
        return self.embeddings.norm(self.embeddings.tok_embeddings(tokens))

    def normalise(self, hidden: mx.array) -> mx.array:
        """Apply the final norm to the output of the last layer."""
        return self.final_norm(hidden)

    def score(self, hidden: mx.array, lengths: mx.array) -> mx.array:
        """Return the relevance logit of each text."""
        if self._pooling == "mean":
            is_text = (mx.arange(hidden.shape[1])[None] < lengths[:, None])[..., None]
            pooled = mx.where(is_text, hidden, 0).sum(axis=1) / lengths[:, None]
        else:
            pooled = hidden[:, 0]
        return self.classifier(self.head(pooled.astype(hidden.dtype)))[:, 0]


def _norm(config: Mapping[str, Any]) -> nn.LayerNorm:
    return nn.LayerNorm(
        config["hidden_size"], eps=config.get("norm_eps", 1e-5), bias=config.get("norm_bias", False)
    )


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    if listed := config.get("layer_types"):
        return [str(layer_type) for layer_type in listed]
    every = config.get("global_attn_every_n_layers", 3)
    return [
        "sliding_attention" if index % every else "full_attention"
        for index in range(config["num_hidden_layers"])
    ]


def _theta(config: Mapping[str, Any], layer_type: str) -> float:
    parameters = (config.get("rope_parameters") or {}).get(layer_type) or {}
    return float(
        parameters.get("rope_theta") or config.get(_THETA_KEYS[layer_type]) or _DEFAULT_THETA[layer_type]
    )
