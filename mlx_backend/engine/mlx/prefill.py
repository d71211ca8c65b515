"""Pieces of prompts run through the network into their caches, and the checkpoints they leave on the way.

Knows nothing of whose turn it is (prompts.py), of the batch that decodes, or of what becomes of kept caches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_backend.engine.mlx.caches import rewound
from mlx_backend.engine.mlx.packing import Part, run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_backend.engine.mlx.decoding import Layers
    from mlx_backend.engine.mlx.reading import Reading

    type Keep = Callable[[Reading, int, Layers], None]


def read(network: Any, pieces: Sequence[tuple[Reading, int]], keep: Keep | None) -> list[mx.array]:
    """Read prompts up to positions in them, in one run; return what is then to be computed: no logits."""
    parts = []
    for reading, stop in pieces:
        assert reading.layers is not None
        parts.append(Part(mx.array([reading.row.tokens[reading.done : stop]]), reading.layers))
    run(network, parts)
    for reading, stop in pieces:
        passed(reading, stop, keep)
    return [layer.state for part in parts for layer in part.layers]


def passed(reading: Reading, stop: int, keep: Keep | None) -> None:
    """Note that a prompt has been read up to a position, and keep the checkpoints on the way.

    The prompt's own end is one only if no reply follows: that adds to the same caches.
    """
    start, reading.done = reading.done, stop
    layers, row = reading.layers, reading.row
    assert layers is not None
    for mark in reading.marks:
        ends = mark == len(row.tokens) and reading.replies
        if keep is not None and start < mark <= stop and not ends:
            keep(reading, mark, rewound(layers, stop - mark) if mark < stop else layers)
