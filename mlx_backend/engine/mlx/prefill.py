"""Prompts run through the network into caches: one by itself, piece by piece, or several short ones in one run.

Knows nothing of whose turn it is (reading.py), of the batch that decodes, or of what becomes of kept caches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .caches import rewound
from .reading import LAST_PIECE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .decoding import Layers
    from .reading import Reading

    type Keep = Callable[[Reading, int, Layers], None]


def read_alone(
    network: Any, reading: Reading, until: int, *, rewinds: bool, most_logits: int, keep: Keep | None
) -> mx.array | None:
    """Read a prompt up to a position; at its end return the last token's logits ([1, vocabulary])."""
    assert reading.layers is not None
    tokens = reading.row.tokens
    until = min(until, len(tokens))
    while reading.done < until:
        start = reading.done
        stop = reading.next_stop(until, rewinds=rewinds, most_logits=most_logits)
        logits = network(mx.array([tokens[start:stop]]), cache=reading.layers)
        reading.done = stop
        last: mx.array | None = None
        if stop == len(tokens) and reading.row.request.max_tokens:
            last = logits[:, -1]
            mx.async_eval(last)  # type: ignore[no-untyped-call]
        else:
            mx.eval([layer.state for layer in reading.layers])
        for mark in reading.marks:
            if keep is not None and start < mark <= stop and (mark < len(tokens) or last is None):
                keep(reading, mark, rewound(reading.layers, stop - mark) if mark < stop else reading.layers)
        if last is not None:
            return last
    mx.clear_cache()
    return None


def read_together(
    network: Any, readings: Sequence[Reading], *, most_logits: int, keep: Keep | None
) -> tuple[Layers, mx.array]:
    """Read what is left of several prompts; return their caches as a batch's, and [prompts, vocabulary] logits.

    Rows are padded on the right to the longest. One run of the network, or two where the logits of all tokens,
    of which only the last ones are needed, would be more than `most_logits`. The prompts' own caches are left as
    they were, so whatever goes wrong here can be done again one by one.
    """
    layers: Layers = [
        each[0].merge(list(each)) for each in zip(*(one.layers or () for one in readings), strict=True)
    ]
    starts, ends = [one.done for one in readings], [one.marks[-1] for one in readings]
    longest = max(end - start for start, end in zip(starts, ends, strict=True))
    whole = longest <= LAST_PIECE or len(readings) * longest <= most_logits
    for stops in [ends] if whole else [[end - LAST_PIECE for end in ends], ends]:
        pieces = [one.row.tokens[a:b] for one, a, b in zip(readings, starts, stops, strict=True)]
        logits = _padded(network, pieces, layers)
        if stops is ends:
            last = logits[mx.arange(len(pieces)), mx.array([len(piece) - 1 for piece in pieces])]
            mx.async_eval(last)  # type: ignore[no-untyped-call]
        else:
            mx.async_eval([layer.state for layer in layers])  # type: ignore[no-untyped-call]
        for at, one in enumerate(readings):
            if keep is None:
                break
            marks = [mark for mark in one.marks if starts[at] < mark <= stops[at] and mark < ends[at]]
            own = [layer.extract(at) for layer in layers] if marks else []
            for mark in marks:
                keep(one, mark, rewound(own, stops[at] - mark) if mark < stops[at] else own)
        starts = stops
    for one in readings:
        one.done, one.layers = one.marks[-1], None
    return layers, last


def _padded(network: Any, pieces: Sequence[Sequence[int]], layers: Layers) -> mx.array:
    lengths = [len(piece) for piece in pieces]
    padding = [max(lengths) - length for length in lengths]
    if any(padding):
        for layer in layers:
            layer.prepare(lengths=lengths, right_padding=padding)
    logits: mx.array = network(
        mx.array([[*piece, *[0] * more] for piece, more in zip(pieces, padding, strict=True)]), cache=layers
    )
    if any(padding):
        for layer in layers:
            layer.finalize()
    return logits
