"""The sentences for a model whose weights do not fit: both sizes, and what can be done.

Knows sizes and the machine; which smaller models there are is handed in.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mlx_backend.device.machine import this_machine
from mlx_backend.device.memory import MARGIN, WORKING_SET_SHARE, format_bytes, room_for_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mlx_backend.device.machine import Machine

MIN_FOR_THE_REST = 2 << 30  # bytes that macOS and other programs cannot do without
MIN_FOR_CACHES = 1 << 30  # bytes beside the weights of a model that is recommended
_WIRED_STEP = 512  # megabytes, to which a limit for macOS is rounded up


def too_large(
    name: str,
    weights: int,
    limit: int,
    *,
    is_given: bool,
    smaller: Sequence[tuple[str, int]] = (),
    machine: Machine | None = None,
) -> str:
    """Say that `weights` bytes do not fit within `limit`, which is for models and caches together.

    `is_given`: the limit is that of --memory-gb, not what the system recommends. `smaller` are models by name with
    the bytes of their weights, the best first; the first that fits is named.
    """
    machine = machine or this_machine()
    room = room_for_weights(limit)
    needed = math.ceil(weights / (1 - MARGIN) / (1 << 30))  # as --memory-gb
    parts = [f"The model {name!r} needs {format_bytes(weights)} of memory for its weights alone,"]
    if is_given:
        parts.append(f"and --memory-gb {limit / (1 << 30):.3g} leaves {format_bytes(room)} for weights.")
    else:
        # Elsewhere the limit may be a GPU's, and the machine's memory another.
        total = f" of the {format_bytes(machine.memory)}" if machine.is_mac else ""
        parts.append(f"and models may use {format_bytes(room)}{total} here.")
    if fitting := [each for each in smaller if each[1] + MIN_FOR_CACHES <= room]:
        parts.append(f"A smaller one that fits: {fitting[0][0]} ({format_bytes(fitting[0][1])}).")
    if machine.is_mac and needed << 30 > machine.memory:
        return " ".join(parts)
    if machine.is_mac and not is_given:
        parts += _advice_for_macs(weights, needed, machine)
    else:
        parts.append(f"If there is more memory, --memory-gb {needed} raises the limit.")
    return " ".join(parts)


def _advice_for_macs(weights: int, needed: int, machine: Machine) -> Iterator[str]:
    """Yield the command that lets the GPU use enough, if enough is left for the rest, and how to insist."""
    megabytes = weights / (1 - MARGIN) / WORKING_SET_SHARE / (1 << 20)
    rounded = _WIRED_STEP * math.ceil(megabytes / _WIRED_STEP)
    rest = machine.memory - (rounded << 20)
    if rest >= MIN_FOR_THE_REST:
        yield (
            f"`sudo sysctl iogpu.wired_limit_mb={rounded}` lets models use enough until the next restart of the "
            f"Mac, and leaves {format_bytes(rest)} for everything else."
        )
    yield f"--memory-gb {needed} loads it regardless; the Mac may then swap, and answer very slowly."
