"""The embedding networks again in plain numpy: one text, no padding, no stages, nothing clever."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

type Array = np.ndarray[Any, np.dtype[np.float64]]


class Reference:
    """A model folder's weights by name, and its configuration."""

    def __init__(self, folder: Path) -> None:
        import mlx.core as mx

        loaded: Any = mx.load(str(folder / "model.safetensors"))
        self.weights = {name: np.array(value, dtype=np.float64) for name, value in loaded.items()}
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())

    def linear(self, name: str, hidden: Array) -> Array:
        bias = self.weights.get(f"{name}.bias")
        found: Array = hidden @ self.weights[f"{name}.weight"].T
        return found if bias is None else found + bias

    def layer_norm(self, name: str, hidden: Array, eps: float) -> Array:
        centred = hidden - hidden.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
        found: Array = scaled * self.weights[f"{name}.weight"] + self.weights.get(f"{name}.bias", 0.0)
        return found

    def rms_norm(self, name: str, hidden: Array, eps: float, *, plus: float = 0.0) -> Array:
        scaled = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + eps)
        found: Array = scaled * (self.weights[f"{name}.weight"] + plus)
        return found


def gelu(x: Array) -> Array:
    return np.array([0.5 * each * (1 + math.erf(each / math.sqrt(2))) for each in x.flat]).reshape(x.shape)


def gelu_tanh(x: Array) -> Array:
    found: Array = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return found


def rotated(x: Array, base: float) -> Array:
    """Rotary positions of (heads, tokens, size), by halves."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] * base ** (-np.arange(half) / half)
    one, other = x[..., :half], x[..., half:]
    turned = [one * np.cos(angles) - other * np.sin(angles), other * np.cos(angles) + one * np.sin(angles)]
    return np.concatenate(turned, -1)


def attended(queries: Array, keys: Array, values: Array, scale: float, mask: Any = None) -> Array:
    """Attend with (heads, tokens, size); `mask` says which keys each query sees. Returns (tokens, heads * size)."""
    keys, values = (np.repeat(each, len(queries) // len(each), 0) for each in (keys, values))
    scores = queries @ keys.transpose(0, 2, 1) * scale
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    share = np.exp(scores - scores.max(-1, keepdims=True))
    found = share / share.sum(-1, keepdims=True) @ values
    merged: Array = found.transpose(1, 0, 2).reshape(found.shape[1], -1)
    return merged


def heads(x: Array, count: int) -> Array:
    return x.reshape(len(x), count, -1).transpose(1, 0, 2)


def near(count: int, window: int) -> Any:
    positions = np.arange(count)
    return np.abs(positions[:, None] - positions[None]) <= window


def bert(model: Reference, tokens: list[int], types: list[int] | None = None, prefix: str = "") -> Array:
    """Every token's last state; also of a RoBERTa, whose positions start after the padding token's id."""
    config, eps = model.config, model.config["layer_norm_eps"]
    first = 0 if config["model_type"] == "bert" else config["pad_token_id"] + 1
    at = f"{prefix}embeddings."
    hidden = (
        model.weights[f"{at}word_embeddings.weight"][tokens]
        + model.weights[f"{at}position_embeddings.weight"][first : first + len(tokens)]
        + model.weights[f"{at}token_type_embeddings.weight"][types or [0] * len(tokens)]
    )
    hidden = model.layer_norm(f"{at}LayerNorm", hidden, eps)
    count = config["num_attention_heads"]
    for number in range(config["num_hidden_layers"]):
        at = f"{prefix}encoder.layer.{number}."
        parts = [
            heads(model.linear(f"{at}attention.self.{name}", hidden), count)
            for name in ("query", "key", "value")
        ]
        found = attended(parts[0], parts[1], parts[2], parts[0].shape[-1] ** -0.5)
        found = model.linear(f"{at}attention.output.dense", found)
        hidden = model.layer_norm(f"{at}attention.output.LayerNorm", hidden + found, eps)
        found = model.linear(f"{at}output.dense", gelu(model.linear(f"{at}intermediate.dense", hidden)))
        hidden = model.layer_norm(f"{at}output.LayerNorm", hidden + found, eps)
    return hidden


def roberta_score(model: Reference, tokens: list[int]) -> float:
    first = bert(model, tokens, prefix="roberta.")[0]
    inner = np.tanh(model.linear("classifier.dense", first))
    return float(model.linear("classifier.out_proj", inner)[0])


def bert_score(model: Reference, tokens: list[int], types: list[int]) -> float:
    first = bert(model, tokens, types, prefix="bert.")[0]
    inner = np.tanh(model.linear("bert.pooler.dense", first))
    return float(model.linear("classifier", inner)[0])


def modernbert(model: Reference, tokens: list[int]) -> Array:
    """Every token's last state: rotary positions, sliding windows in all layers but every third."""
    config, eps = model.config, model.config["norm_eps"]
    count, half = config["num_attention_heads"], config["local_attention"] // 2
    hidden = model.weights["model.embeddings.tok_embeddings.weight"][tokens]
    hidden = model.layer_norm("model.embeddings.norm", hidden, eps)
    for number in range(config["num_hidden_layers"]):
        at = f"model.layers.{number}."
        normed = model.layer_norm(f"{at}attn_norm", hidden, eps) if number else hidden
        queries, keys, values = (
            heads(part, count) for part in np.split(model.linear(f"{at}attn.Wqkv", normed), 3, -1)
        )
        is_global = number % config["global_attn_every_n_layers"] == 0
        base = config["global_rope_theta" if is_global else "local_rope_theta"]
        found = attended(
            rotated(queries, base),
            rotated(keys, base),
            values,
            queries.shape[-1] ** -0.5,
            None if is_global else near(len(tokens), half),
        )
        hidden = hidden + model.linear(f"{at}attn.Wo", found)
        value, gate = np.split(
            model.linear(f"{at}mlp.Wi", model.layer_norm(f"{at}mlp_norm", hidden, eps)), 2, -1
        )
        hidden = hidden + model.linear(f"{at}mlp.Wo", gelu(value) * gate)
    return model.layer_norm("model.final_norm", hidden, eps)


def modernbert_score(model: Reference, tokens: list[int]) -> float:
    first = modernbert(model, tokens)[:1]
    inner = model.layer_norm("head.norm", gelu(model.linear("head.dense", first)), model.config["norm_eps"])
    return float(model.linear("classifier", inner)[0, 0])


def qwen(model: Reference, tokens: list[int]) -> Array:
    """Every token's last state, with causal attention."""
    config, eps = model.config, model.config["rms_norm_eps"]
    count, kv_count = config["num_attention_heads"], config["num_key_value_heads"]
    base, causal = config["rope_theta"], np.tril(np.ones((len(tokens), len(tokens)), dtype=bool))
    hidden = model.weights["model.embed_tokens.weight"][tokens]
    for number in range(config["num_hidden_layers"]):
        at = f"model.layers.{number}."
        normed = model.rms_norm(f"{at}input_layernorm", hidden, eps)
        queries = heads(model.linear(f"{at}self_attn.q_proj", normed), count)
        keys = heads(model.linear(f"{at}self_attn.k_proj", normed), kv_count)
        values = heads(model.linear(f"{at}self_attn.v_proj", normed), kv_count)
        queries = rotated(model.rms_norm(f"{at}self_attn.q_norm", queries, eps), base)
        keys = rotated(model.rms_norm(f"{at}self_attn.k_norm", keys, eps), base)
        found = attended(queries, keys, values, config["head_dim"] ** -0.5, causal)
        hidden = hidden + model.linear(f"{at}self_attn.o_proj", found)
        normed = model.rms_norm(f"{at}post_attention_layernorm", hidden, eps)
        gate = model.linear(f"{at}mlp.gate_proj", normed)
        inner = gate / (1 + np.exp(-gate)) * model.linear(f"{at}mlp.up_proj", normed)
        hidden = hidden + model.linear(f"{at}mlp.down_proj", inner)
    return model.rms_norm("model.norm", hidden, eps)


def gemma(model: Reference, tokens: list[int]) -> Array:
    """Every token's last state of a Gemma 3 with bidirectional attention, in most layers within a window."""
    config, eps = model.config, model.config["rms_norm_eps"]
    count, kv_count = config["num_attention_heads"], config["num_key_value_heads"]

    def norm(name: str, hidden: Array) -> Array:
        return model.rms_norm(name, hidden, eps, plus=1.0)

    hidden = model.weights["model.embed_tokens.weight"][tokens] * math.sqrt(config["hidden_size"])
    for number in range(config["num_hidden_layers"]):
        at = f"model.layers.{number}."
        is_global = (number + 1) % config["sliding_window_pattern"] == 0
        base = config["rope_theta"] if is_global else config["rope_local_base_freq"]
        normed = norm(f"{at}input_layernorm", hidden)
        queries = norm(f"{at}self_attn.q_norm", heads(model.linear(f"{at}self_attn.q_proj", normed), count))
        keys = norm(f"{at}self_attn.k_norm", heads(model.linear(f"{at}self_attn.k_proj", normed), kv_count))
        values = heads(model.linear(f"{at}self_attn.v_proj", normed), kv_count)
        found = attended(
            rotated(queries, base),
            rotated(keys, base),
            values,
            config["query_pre_attn_scalar"] ** -0.5,
            None if is_global else near(len(tokens), config["sliding_window"] // 2),
        )
        found = model.linear(f"{at}self_attn.o_proj", found)
        hidden = hidden + norm(f"{at}post_attention_layernorm", found)
        normed = norm(f"{at}pre_feedforward_layernorm", hidden)
        inner = gelu_tanh(model.linear(f"{at}mlp.gate_proj", normed)) * model.linear(
            f"{at}mlp.up_proj", normed
        )
        found = model.linear(f"{at}mlp.down_proj", inner)
        hidden = hidden + norm(f"{at}post_feedforward_layernorm", found)
    return norm("model.norm", hidden)


def pooled(hidden: Array, pooling: str) -> Array:
    """The pooled vector, normalised."""
    vector = {"cls": hidden[0], "mean": hidden.mean(0), "last": hidden[-1]}[pooling]
    found: Array = vector / np.linalg.norm(vector)
    return found
