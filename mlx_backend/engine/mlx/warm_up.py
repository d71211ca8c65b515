"""Running a network when it is loaded: what a chunk takes, and on a GPU all that is slow the first time.

Kernels are compiled or loaded when they are first used, and MLX's CUDA backend chooses algorithms for every new shape
of a matrix. In the first process on a fresh H200, the first prompt beside a running reply stopped it for 2.9 seconds,
although lengths had been run; in later processes for 0.25. What is done here is not done while somebody waits.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_backend.engine.mlx.chunk_sizes import CHUNK_SIZES, PADDED_SIZES, RUN_OVERHEAD

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_backend.engine.mlx.kv_cache import LayerCaches

log = logging.getLogger(__name__)

MEASURED_TOKENS = CHUNK_SIZES[0]
GROWTH = 3.0  # how much longer the next length may take than the one before


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """What a chunk takes: tokens a second, and the bytes that its computation needs beside the caches.

    Those are `per_token` for each token, and `per_pair` for each token and each one that it attends to: attention that
    is computed in one kernel has none of these.
    """

    rate: float
    per_token: float
    per_pair: float

    def working_bytes(self, tokens: int, context: int) -> int:
        """Return the bytes for a chunk of so many tokens that ends at position `context`."""
        return int(tokens * (self.per_token + self.per_pair * context))


class WarmUp:
    """Runs a network on tokens that mean nothing, on caches of its own.

    `agree` gets a figure of this process and returns the largest of all processes that share the model: they have to
    do the same runs. No run is longer than `max_tokens`. `prepares` says that the device takes time for a length that
    is new to it, which is then not measured.
    """

    def __init__(
        self,
        network: Any,
        make_caches: Callable[[], LayerCaches],
        *,
        max_tokens: int,
        agree: Callable[[float], float],
        prepares: bool = False,
    ) -> None:
        self._network = network
        self._make_caches = make_caches
        self._max_tokens = max_tokens
        self._agree = agree
        self._prepares = prepares

    def run_lengths(self, seconds: float) -> None:
        """Run the lengths that chunks have, short ones first, for about so many seconds at most."""
        started, last = perf_counter(), 0.0
        done: list[int] = []
        for size in PADDED_SIZES:
            elapsed = self._agree(perf_counter() - started)
            if size > self._max_tokens or elapsed + GROWTH * last > seconds:
                break
            [(taken, _)] = self._run([size])
            last = self._agree(taken)
            done.append(size)
        if done:
            log.info(
                "Prompts of up to %d tokens were run to warm up, in %.1f s.",
                done[-1],
                perf_counter() - started,
            )

    def measure(self) -> ChunkCost:
        """Run two chunks, one after the other, and return what they took."""
        size = max(1, min(MEASURED_TOKENS, self._max_tokens // 2))
        if self._prepares:
            self._run([size, size])
        (_, first_bytes), (seconds, second_bytes) = self._run([size, size])
        first, second = self._agree(first_bytes), self._agree(second_bytes)
        per_pair = max(0.0, (second - first) / size**2)
        return ChunkCost((size + RUN_OVERHEAD) / seconds, max(0.0, first / size - per_pair * size), per_pair)

    def _run(self, sizes: Sequence[int]) -> list[tuple[float, int]]:
        """Run chunks that follow each other; return the seconds and the working bytes of each."""
        layers, taken = self._make_caches(), []
        for size in sizes:
            tokens = mx.zeros((1, size), mx.int32)
            mx.eval(tokens)
            mx.reset_peak_memory()
            started = perf_counter()
            self._network(tokens, cache=layers)
            mx.eval([layer.state for layer in layers])
            seconds = perf_counter() - started
            taken.append((seconds, max(0, mx.get_peak_memory() - mx.get_active_memory())))
            mx.clear_cache()
        return taken
