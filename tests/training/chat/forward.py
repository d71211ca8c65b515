"""The model's forward pass, for training on a CPU: four times as fast as mlx-lm's, with equal results (`check`).

It uses the weights of mlx-lm's own model. The differences: the experts are one flat matrix product, in which a weight
per token keeps the two chosen ones; sliding layers only compute the two blocks that the window can reach; exp is a
polynomial; and only labelled positions reach the output head. Knows nothing of text.
"""

from typing import Any, Final, cast

import mlx.core as mx

ROUNDS: Final = 7  # exp(x) = (Taylor of x / 2**ROUNDS) ** 2**ROUNDS
PART: Final = 2_048  # queries of a long sequence that are computed together
ENOUGH_LABELS: Final = 1_000  # labels in a batch
FLOOR: Final = -20.0  # stands for minus infinity: its exp is 2e-9


@mx.custom_function
def _exp(x: mx.array) -> mx.array:
    y = mx.maximum(x, FLOOR) * (1.0 / 2**ROUNDS)
    result = 1.0 + y * (1.0 + y * (0.5 + y * (1.0 / 6.0)))
    for _ in range(ROUNDS):
        result = mx.square(result)
    return result


@_exp.vjp
def _exp_vjp(_: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    return cotangent * output


def fast_exp(x: mx.array) -> mx.array:
    """Return exp(x) for x <= 0, on a CPU with a relative error of about 1e-4 where it is not negligible."""
    if mx.default_device() == mx.gpu:
        return mx.exp(x)
    return cast("mx.array", _exp(x))


def _attend(q: mx.array, k: mx.array, v: mx.array, sinks: mx.array, hidden: mx.array) -> mx.array:
    """Attend with sinks: q [..., G, S, D], k and v [..., 1, T, D], sinks [..., G, 1, 1], hidden [S, T]."""
    scores = q @ k.swapaxes(-1, -2) + mx.where(hidden, -1e9, 0.0)  # adding is 15 times cheaper than selecting
    top = mx.stop_gradient(mx.maximum(scores.max(axis=-1, keepdims=True), sinks))
    weights = fast_exp(scores - top)
    return (weights @ v) / (weights.sum(axis=-1, keepdims=True) + mx.exp(sinks - top))


def _attend_causally(q: mx.array, k: mx.array, v: mx.array, sinks: mx.array) -> mx.array:
    """Attend to everything before; of a long sequence a part at a time, computed again for the gradient."""
    length = q.shape[-2]
    at = mx.arange(length)
    if length <= PART:
        return _attend(q, k, v, sinks, at[:, None] < at[None])
    attend = mx.checkpoint(_attend)
    parts = []
    for start in range(0, length, PART):
        end = min(start + PART, length)
        hidden = at[start:end, None] < at[None, :end]
        parts.append(attend(q[..., start:end, :], k[..., :end, :], v[..., :end, :], sinks, hidden))
    return mx.concatenate(parts, axis=-2)


def _attention(block: Any, x: mx.array, window: int | None) -> mx.array:
    batch, length, _ = x.shape
    dim, heads, pairs = block.head_dim, block.num_attention_heads, block.num_key_value_heads

    def split(y: mx.array) -> mx.array:
        return y.reshape(batch, length, -1, dim).swapaxes(1, 2)

    q = block.rope(split(block.q_proj(x))) * block.sm_scale
    k, v = block.rope(split(block.k_proj(x))), split(block.v_proj(x))
    q = q.reshape(batch, pairs, heads // pairs, length, dim)
    sinks = block.sinks.reshape(pairs, heads // pairs, 1, 1)
    if window is None or length <= window:
        out = _attend_causally(q, k[:, :, None], v[:, :, None], sinks)
    else:
        blocks = length // window

        def with_previous(y: mx.array) -> mx.array:  # each block's keys: the block before it, then itself
            y = y.reshape(batch, pairs, blocks, window, dim)
            before = mx.concatenate([mx.zeros_like(y[:, :, :1]), y[:, :, :-1]], axis=2)
            return mx.concatenate([before, y], axis=3)[:, :, None]

        row, column = mx.arange(window)[:, None], mx.arange(2 * window)[None] - window
        outside = (column > row) | (column <= row - window)
        hidden = mx.broadcast_to(outside, (blocks, window, 2 * window))
        first = mx.arange(blocks)[:, None, None] == 0
        hidden = hidden | (first & (column < 0))
        q = q.reshape(batch, pairs, heads // pairs, blocks, window, dim)
        out = _attend(q, with_previous(k), with_previous(v), sinks[..., None], hidden)
    out = out.reshape(batch, heads, length, dim).swapaxes(1, 2).reshape(batch, length, -1)
    return cast("mx.array", block.o_proj(out))


def _experts(block: Any, x: mx.array) -> mx.array:
    scores = block.router(x)
    rank = (scores[..., None, :] > scores[..., :, None]).sum(axis=-1)
    share = mx.softmax(mx.where(rank < block.num_experts_per_tok, scores, -1e9), axis=-1)
    experts = block.experts
    count, inner, width = experts.gate_proj.weight.shape

    def up(part: Any) -> mx.array:
        flat: mx.array = x @ part.weight.reshape(count * inner, width).T + part.bias.reshape(-1)
        return flat

    gate = mx.minimum(up(experts.gate_proj), 7.0)
    value = mx.clip(up(experts.up_proj), -7.0, 7.0)
    mixed = (value + 1.0) * (gate * mx.sigmoid(1.702 * gate))
    mixed = (mixed.reshape(*x.shape[:-1], count, inner) * share[..., None]).reshape(
        *x.shape[:-1], count * inner
    )
    down = experts.down_proj.weight.transpose(0, 2, 1).reshape(count * inner, width)
    out: mx.array = mixed @ down + share @ experts.down_proj.bias
    return out


def hidden_states(model: Any, ids: mx.array) -> mx.array:
    """Return the output head's input, [batch, length, width]; the length must be a multiple of the window."""
    inner = model.model
    x = inner.embed_tokens(ids)
    for layer, kind in zip(inner.layers, inner.layer_types, strict=True):
        window = inner.window_size if kind == "sliding_attention" else None
        x = x + _attention(layer.self_attn, layer.input_layernorm(x), window)
        x = x + _experts(layer.mlp, layer.post_attention_layernorm(x))
    return cast("mx.array", inner.norm(x))


def loss(
    model: Any, ids: mx.array, positions: mx.array, labels: mx.array, barred: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Return the cross-entropy and the accuracy at flat `positions` of ids [batch, length].

    A label below 0 only fills the list up. `barred` has for each label a token that is no choice there, or -1.
    The cross-entropy is the mean, and less for a batch with few labels, whose gradient would be mostly noise.
    """
    states = hidden_states(model, ids)
    logits = model.lm_head(states.reshape(-1, states.shape[-1])[positions])
    if barred is not None:
        logits = mx.where(barred[:, None] == mx.arange(logits.shape[-1]), -1e9, logits)
    counts = labels >= 0
    right = mx.take_along_axis(logits, mx.maximum(labels, 0)[:, None], axis=-1).squeeze(-1)
    total = mx.maximum(counts.sum(), 1)
    share = mx.sqrt(mx.minimum(1.0, total / ENOUGH_LABELS))
    mean = (mx.where(counts, mx.logsumexp(logits, axis=-1) - right, 0.0)).sum() / total
    return share * mean, (mx.argmax(logits, axis=-1) == labels).sum() / total


def check(model: Any, ids: mx.array) -> float:
    """Return the largest difference from mlx-lm's logits. Raises AssertionError if it is more than rounding."""
    theirs, ours = model(ids), model.lm_head(hidden_states(model, ids))
    difference = float(mx.abs(theirs - ours).max())
    if difference > 2e-3 * max(1.0, float(mx.abs(theirs).max())):
        raise AssertionError(f"the training forward pass differs by {difference:.2e}")
    return difference
