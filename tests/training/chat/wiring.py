"""The initial weights: a copy circuit (an induction head), wired into the random weights before training.

Copying from the prompt (a name, a value, a tool's result) is what this model needs most, and what a small model takes
longest to learn. So the circuit is set up by hand, and training only has to use it:

- the first, sliding layer has three heads that attend one, two and three tokens back (by position alone, through biases
  that the rotary embedding rotates) and write the tokens they see into slots of their own;
- each full layer has a head that compares the current token and the two before it with those slots: it attends to the
  token after an earlier occurrence of the same three tokens, and writes it where the output head looks for it.

Everything else stays random. Knows the model's shape, not its training.
"""

from typing import Any, Final

import mlx.core as mx

# Slots of the residual stream: the token itself, the three before it, what a full layer copied.
_TOKEN: Final = slice(0, 64)
_BEFORE: Final = (slice(64, 96), slice(96, 120), slice(120, 144))
_COPIED: Final = slice(144, 192)
_LOOK: Final = 8.0  # gain of the look-back heads: scores of neighbours differ by 6
_MATCH: Final = 2.2  # gain of the matching heads, for queries and keys
_CODES: Final = (14, 10, 8)  # slow rotary pairs, 32 dimensions in all, for matching token, one back, two back


def _spread(rows: int, columns: int) -> mx.array:
    """Return a random matrix [rows, columns], scaled to preserve the size of a vector of `columns` signs."""
    spread: mx.array = mx.random.normal((rows, columns)) / float(columns) ** 0.5
    return spread


def _look_back(block: Any, base: float, reads: list[mx.array]) -> None:
    dim = block.head_dim
    frequencies = base ** (-mx.arange(8) / (dim / 2))  # the fast pairs distinguish neighbours
    at = mx.arange(8)
    q_bias, q_weight = block.q_proj.bias, block.q_proj.weight
    k_bias, k_weight, v_weight = block.k_proj.bias, block.k_proj.weight, block.v_proj.weight
    o_weight = block.o_proj.weight
    for pair in range(2):
        start = pair * dim
        k_weight[start : start + dim] = 0.0
        k_bias[start : start + dim] = 0.0
        k_bias[start + at] = _LOOK
        v_weight[start : start + dim] = 0.0
        v_weight[start : start + dim, _TOKEN] = mx.eye(dim) / 3**0.5  # undo the scaling by the norm
    for head, read in enumerate(reads):
        start = head * dim
        q_weight[start : start + dim] = 0.0
        q_bias[start : start + dim] = 0.0
        q_bias[start + at] = _LOOK * mx.cos((head + 1) * frequencies)
        q_bias[start + dim // 2 + at] = -_LOOK * mx.sin((head + 1) * frequencies)
        o_weight[:, start : start + dim] = 0.0
        o_weight[_BEFORE[head], start : start + dim] = read
    block.q_proj.bias, block.q_proj.weight = q_bias, q_weight
    block.k_proj.bias, block.k_proj.weight, block.v_proj.weight = k_bias, k_weight, v_weight
    block.o_proj.weight = o_weight


def _match(block: Any, reads: list[mx.array], writes: mx.array) -> None:
    dim = block.head_dim
    half = dim // 2
    slow = mx.concatenate([mx.arange(half // 2, half), mx.arange(half + half // 2, dim)])
    width = block.q_proj.weight.shape[1]
    query, key = mx.zeros((dim, width)), mx.zeros((dim, width))
    done = 0
    for back, count in enumerate(_CODES):
        rows = slow[done : done + count]
        code = _spread(count, reads[back].shape[0])
        key[rows, _BEFORE[back]] = _MATCH * code
        if back == 0:
            query[rows, _TOKEN] = _MATCH * (code @ reads[0])
        else:  # the slot of the token `back` before was written with another matrix than the key's
            here = code @ reads[back] @ mx.linalg.pinv(reads[back - 1], stream=mx.cpu)
            query[rows, _BEFORE[back - 1]] = _MATCH * here
        done += count
    weight, bias = block.q_proj.weight, block.q_proj.bias
    weight[:dim], bias[:dim] = query, 0.0
    block.q_proj.weight, block.q_proj.bias = weight, bias
    weight, bias = block.k_proj.weight, block.k_proj.bias
    weight[:dim], bias[:dim] = key, 0.0
    block.k_proj.weight, block.k_proj.bias = weight, bias
    weight = block.v_proj.weight
    weight[:dim] = 0.0
    weight[:dim, _TOKEN] = mx.eye(dim)
    block.v_proj.weight = weight
    weight = block.o_proj.weight
    weight[:, :dim] = 0.0
    weight[_COPIED, :dim] = writes
    block.o_proj.weight = weight


def wire(model: Any, base: float) -> None:
    """Put the circuit into a newly created model whose rotary embedding has the given base."""
    vocabulary, width = model.lm_head.weight.shape
    if width != _COPIED.stop:
        raise ValueError(f"the circuit is made for a width of {_COPIED.stop}, not {width}")
    signs = mx.where(mx.random.bernoulli(0.5, (vocabulary, 64)), 1.0, -1.0)
    embedding = mx.random.normal((vocabulary, width)) * 0.02
    embedding[:, _TOKEN] = signs
    model.model.embed_tokens.weight = embedding
    reads = [_spread(part.stop - part.start, 64) for part in _BEFORE]
    writes = _spread(_COPIED.stop - _COPIED.start, 64)
    layers = model.model.layers
    _look_back(layers[0].self_attn, base, reads)
    for layer, kind in zip(layers, model.model.layer_types, strict=True):
        if kind == "full_attention":
            _match(layer.self_attn, reads, writes)
    head = mx.random.normal((vocabulary, width)) * 0.02
    head[:, _COPIED] = 0.15 * (signs @ writes.T)
    model.lm_head.weight = head
