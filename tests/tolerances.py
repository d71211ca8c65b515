"""How closely tests compare figures, by device, with the reasons. On a CPU all is compared as strictly as before.

The figures for GPUs follow from how MLX works there; on Metal no one has measured them yet (tests/e2e/MAC.md).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest

from mlx_backend.engine.base import TokenDelta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.engine.base import GenerationRequest
    from mlx_backend.engine.threaded import Engine

ON_CPU = mx.default_device() == mx.Device(mx.cpu)

# Sums in float32 over a few hundred numbers, in another order and with a GPU's own exp and rsqrt.
VECTOR_ATOL = 2e-5 if ON_CPU else 2e-4

# Log probabilities that are nearer than this may be in the other order when replies share a run: the kernels for one
# row and for several add in different orders.
NEAR_TIE = 0.02

# Metal gives a buffer whole pages of 16 KB, and may reuse a freed one that is up to two pages larger.
BUFFER_SLACK = 2 * 16 * 1024


def held_memory(counted: int, buffers: int, *, on_cpu: bool = ON_CPU) -> Any:
    """Return what memory that is really held is compared with: the bytes as counted, in at most `buffers` buffers."""
    return pytest.approx(counted, rel=0.1, abs=0 if on_cpu else buffers * BUFFER_SLACK)


def check_replies(
    engine: Engine,
    requests: Sequence[GenerationRequest],
    found: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    *,
    on_cpu: bool = ON_CPU,
) -> None:
    """Check that greedy replies are the expected ones, on a GPU up to a near tie."""
    if on_cpu:
        assert found == expected
        return
    assert len(found) == len(expected)
    for request, one, other in zip(requests, found, expected, strict=True):
        pairs = enumerate(zip(one, other, strict=False))
        first = next((at for at, (left, right) in pairs if left != right), None)
        if first is None:
            assert len(one) == len(other)
            continue
        prompt = [*request.prompt, *other[:first]]
        items = engine.generate(replace(request, prompt=prompt, checkpoints=(), max_tokens=1, logprobs=5))
        (delta,) = [item for item in items if isinstance(item, TokenDelta)]
        assert delta.logprobs is not None
        likely = dict(delta.logprobs.top)
        assert {one[first], other[first]} <= likely.keys(), f"token {first} is neither of the likely ones"
        gap = abs(likely[one[first]] - likely[other[first]])
        assert gap < NEAR_TIE, f"token {first} differs, and the two were {gap:.4f} apart"
