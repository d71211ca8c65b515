"""BERT and RoBERTa (bge-m3, multilingual-e5, bge-reranker, MiniLM), with the weight names of their files.

The two differ in the first position and in the rerank head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn

from mlx_backend.embedding.mlx.attention import attend

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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
