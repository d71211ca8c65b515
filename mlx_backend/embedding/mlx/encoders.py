"""Encoders, with the weight names of their files, and attention that looks both ways, over padded batches.

BERT and RoBERTa (bge-m3, multilingual-e5, bge-reranker, MiniLM) differ in the first position and in the rerank head.
ModernBERT (ruri-v3, gte-modernbert, modernbert-embed) has rotary positions, and sliding windows in two layers of three.

The scores of a long text are computed for a few hundred queries at a time: where MLX has no fused kernel (on a CPU)
they would otherwise take gigabytes, and in a layer with a sliding window most keys need not be looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

BLOCK = 512
"""Queries whose scores are computed at a time."""
ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = {
    "gelu": nn.gelu,
    "gelu_new": nn.gelu_approx,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "gelu_fast": nn.gelu_approx,
    "relu": nn.relu,
    "silu": nn.silu,
    "swish": nn.silu,
    "tanh": mx.tanh,
}


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    lengths: mx.array | None,
    *,
    scale: float,
    window: int | None = None,
) -> mx.array:
    """Attend with arrays of (batch, heads, tokens, head size) to the first `lengths` keys of each text (None: to all).

    With a `window`, only to keys that are at most that many tokens away.
    """
    count = queries.shape[2]
    parts = []
    for start in range(0, count, BLOCK):
        stop = min(start + BLOCK, count)
        first, last = (0, count) if window is None else (max(0, start - window), min(count, stop + window))
        parts.append(
            mx.fast.scaled_dot_product_attention(
                queries[:, :, start:stop],
                keys[:, :, first:last],
                values[:, :, first:last],
                scale=scale,
                mask=attention_mask(start, stop, first, last, lengths, window),
            )
        )
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def attention_mask(
    start: int, stop: int, first: int, last: int, lengths: mx.array | None, window: int | None
) -> mx.array | None:
    """Return the mask for queries `start` to `stop` and keys `first` to `last`; None if nothing is masked."""
    keys = mx.arange(first, last)
    mask = None if lengths is None else (keys[None] < lengths[:, None])[:, None, None]
    if window is not None and (stop - first > window + 1 or last - start > window + 1):
        queries = mx.arange(start, stop)[:, None]
        nearby = mx.abs(queries - keys[None]) <= window
        mask = nearby if mask is None else mask & nearby
        # Padding attends to itself: with nothing to attend to it would become NaN, and NaN times zero is NaN.
        mask = mask | (queries == keys[None])
    return mask


# -- BERT and RoBERTa -------------------------------------------------------------------------------------------


class _BertEmbeddings(nn.Module):
    def __init__(self, config: Mapping[str, Any], first_position: int) -> None:
        super().__init__()
        size = config["hidden_size"]
        self.word_embeddings = nn.Embedding(config["vocab_size"], size)
        self.position_embeddings = nn.Embedding(config["max_position_embeddings"], size)
        self.token_type_embeddings = nn.Embedding(config.get("type_vocab_size", 2), size)
        self.LayerNorm = nn.LayerNorm(size, eps=config.get("layer_norm_eps", 1e-12))
        self._first_position = first_position
        self._type_count = config.get("type_vocab_size", 2)

    def __call__(self, tokens: mx.array, type_ids: mx.array) -> mx.array:
        positions = mx.arange(self._first_position, self._first_position + tokens.shape[1])
        type_ids = mx.minimum(type_ids, self._type_count - 1)
        hidden = self.word_embeddings(tokens) + self.token_type_embeddings(type_ids)
        return self.LayerNorm(hidden + self.position_embeddings(positions)[None])


class _SelfAttention(nn.Module):
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.query = nn.Linear(size, size)
        self.key = nn.Linear(size, size)
        self.value = nn.Linear(size, size)
        self._heads = heads

    def __call__(self, hidden: mx.array, lengths: mx.array | None) -> mx.array:
        batch, count, size = hidden.shape

        def split(part: mx.array) -> mx.array:
            return part.reshape(batch, count, self._heads, -1).transpose(0, 2, 1, 3)

        attended = attend(
            split(self.query(hidden)),
            split(self.key(hidden)),
            split(self.value(hidden)),
            lengths,
            scale=(size // self._heads) ** -0.5,
        )
        return attended.transpose(0, 2, 1, 3).reshape(batch, count, size)


class _Output(nn.Module):
    """A dense layer with a residual connection and layer norm."""

    def __init__(self, inner: int, size: int, eps: float) -> None:
        super().__init__()
        self.dense = nn.Linear(inner, size)
        self.LayerNorm = nn.LayerNorm(size, eps=eps)

    def __call__(self, inner: mx.array, hidden: mx.array) -> mx.array:
        return self.LayerNorm(self.dense(inner) + hidden)


class _BertAttention(nn.Module):
    def __init__(self, config: Mapping[str, Any], eps: float) -> None:
        super().__init__()
        size = config["hidden_size"]
        self.self = _SelfAttention(size, config["num_attention_heads"])
        self.output = _Output(size, size, eps)


class _Dense(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.dense = nn.Linear(size, inner)


class _BertLayer(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        eps = config.get("layer_norm_eps", 1e-12)
        size, inner = config["hidden_size"], config["intermediate_size"]
        self.attention = _BertAttention(config, eps)
        self.intermediate = _Dense(size, inner)
        self.output = _Output(inner, size, eps)
        self._activation = ACTIVATIONS[config.get("hidden_act", "gelu")]

    def __call__(self, hidden: mx.array, lengths: mx.array | None) -> mx.array:
        attended = self.attention.self(hidden, lengths)
        hidden = self.attention.output(attended, hidden)
        inner = self._activation(self.intermediate.dense(hidden))
        return self.output(inner, hidden)


class _Stack(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.layer = [_BertLayer(config) for _ in range(config["num_hidden_layers"])]


class _RobertaHead(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(size, size)
        self.out_proj = nn.Linear(size, 1)

    def __call__(self, hidden: mx.array) -> mx.array:
        return self.out_proj(mx.tanh(self.dense(hidden)))


class Bert(nn.Module):
    """An encoder that is run layer by layer; with `rerank`, it has a head that scores the first token's state."""

    prefixes = ("bert.", "roberta.", "model.")

    def __init__(self, config: Mapping[str, Any], *, rerank: bool) -> None:
        super().__init__()
        roberta = config["model_type"] != "bert"
        positions = config.get("position_embedding_type", "absolute")
        if positions != "absolute":
            raise ValueError(f"position embeddings of type {positions!r} are not supported")
        padding = config.get("pad_token_id")
        first = ((1 if padding is None else padding) + 1) if roberta else 0
        self.embeddings = _BertEmbeddings(config, first)
        self.encoder = _Stack(config)
        if rerank and roberta:
            self.classifier = _RobertaHead(config["hidden_size"])
        elif rerank:
            self.pooler = _Dense(config["hidden_size"], config["hidden_size"])
            self.classifier = nn.Linear(config["hidden_size"], 1)

    @property
    def layers(self) -> list[Any]:
        """The layers, in order: functions of hidden states and lengths to hidden states."""
        return list(self.encoder.layer)

    def embed(self, tokens: mx.array, type_ids: mx.array) -> mx.array:
        """Return the input of the first layer."""
        return self.embeddings(tokens, type_ids)

    def normalise(self, hidden: mx.array) -> mx.array:
        """Return the output of the last layer as it is: each layer ends in a norm."""
        return hidden

    def score(self, hidden: mx.array, _lengths: mx.array) -> mx.array:
        """Return the relevance logit of each text."""
        first = hidden[:, 0]
        if "pooler" in self:
            first = mx.tanh(self.pooler.dense(first))
        return self.classifier(first)[:, 0]


# -- ModernBERT -------------------------------------------------------------------------------------------------

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
