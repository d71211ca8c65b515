"""Runs of a loaded network on tokens that mean nothing: how long chunks take, in how much memory, and of what lengths.

Kernels are loaded when they are first used, and MLX's CUDA backend chooses algorithms for every new shape of a matrix.
In the first process on a fresh H200, the first prompt next to a running reply stopped it for 2.9 seconds, although
lengths had been run; in later processes for 0.25.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_backend.engine.mlx.chunk_cost import (
    CHUNK_SIZES,
    PADDED_SIZES,
    RUN_OVERHEAD,
    ChunkCost,
    WorkingMemory,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mlx_backend.engine.mlx.kv_cache import LayerCaches
    from mlx_backend.layers.many_rows import ManyRows

log = logging.getLogger(__name__)

MEASURED_TOKENS = CHUNK_SIZES[0]
MEMORY_TOKENS = (512, 256, 128)
"""Sizes of the chunks that memory is measured with on an NVIDIA GPU, longest first.

The few megabytes that it frees late would count for much in short ones.
"""
VARIOUS_TOKENS = 256
"""Number of different tokens that are drawn from, at most: enough for all of a mixture's experts."""
MAX_MEASURED_SECONDS = 0.25
"""Time of a chunk of many rows, beyond which no longer one is measured."""
MIN_DIFFERENCE = 0.001
"""Seconds that a longer chunk takes more than a shorter one, at least: it is never faster."""
GROWTH = 3.0
"""How many times as long as one length the next may take."""
MAX_RUN_SECONDS = 0.3
"""Time of the run of a length that a request may have to wait for, as far as can be known before."""


class WarmUp:
    """Runs a network on tokens that mean nothing, on caches of its own.

    `agree` gets a figure of this process and returns the largest of all processes that share the model: they have to
    do the same runs. No run is longer than `max_tokens`; memory is measured with chunks that need no more than `room`
    bytes. The model's token ids are below `num_tokens`. `prepares` says that the device takes time for a length that is
    new to it, which is then not measured.

    What takes long is a generator, and yields after each run.
    """

    def __init__(
        self,
        network: Any,
        make_caches: Callable[[], LayerCaches],
        *,
        max_tokens: int,
        room: int,
        num_tokens: int,
        agree: Callable[[float], float],
        prepares: bool = False,
    ) -> None:
        self._network = network
        self._make_caches = make_caches
        self._max_tokens = max_tokens
        self._measured_tokens = max(1, min(MEASURED_TOKENS, max_tokens // 2))
        self._room = room
        self._num_tokens = min(num_tokens, VARIOUS_TOKENS)
        self._agree = agree
        self.prepares = prepares

    def run_lengths(self, seconds: float) -> Iterator[None]:
        """Run the lengths that chunks have, short ones first, for about `seconds` at most."""
        started, last = perf_counter(), 0.0
        done: list[int] = []
        for size in PADDED_SIZES:
            elapsed = self._agree(perf_counter() - started)
            if size > self._max_tokens or elapsed + GROWTH * last > seconds or last > MAX_RUN_SECONDS:
                break
            [(taken, _)] = self._run([size])
            last = self._agree(taken)
            done.append(size)
            yield
        if done:
            log.info(
                "Prompts of up to %d tokens were run to warm up, in %.1f s.",
                done[-1],
                perf_counter() - started,
            )

    def measure(self, many_rows: ManyRows | None = None) -> ChunkCost:
        """Run two chunks, with the implementation for many rows if there is one, and return what they took."""
        size = self._measured_tokens
        dequantized = many_rows.largest_bytes if many_rows is not None else 0
        with nullcontext() if many_rows is None else many_rows.always():
            seconds, first, second = self._two_chunks(size)
        memory = WorkingMemory.from_two(size, first - dequantized, second - dequantized)
        return ChunkCost((size + RUN_OVERHEAD) / seconds, memory, many_rows_bytes=dequantized)

    def measure_memory(self, cost: ChunkCost) -> Iterator[None]:
        """Measure the memory of chunks on an NVIDIA GPU more exactly, and note it in `cost`."""
        fitting = (each for each in MEMORY_TOKENS if self.prepares and 2 * each <= self._max_tokens)
        size = next((each for each in fitting if cost.memory(each, 2 * each) <= self._room), None)
        if size is None:
            return
        taken: list[float] = []
        for _ in range(2):  # the first time kernels are prepared
            taken.clear()
            for _, nbytes in self._chunks([size] * 2):
                taken.append(self._agree(nbytes))
                yield
        cost.memory = WorkingMemory.from_two(size, *taken)

    def measure_many_rows(self, many_rows: ManyRows, cost: ChunkCost) -> Iterator[None]:
        """Measure chunks in which layers use their implementation for many rows, and note in `cost` what they take."""
        seconds: dict[int, float] = {}
        for size in (each for each in PADDED_SIZES if each <= self._max_tokens):
            if self.prepares:
                self._run([size])
                yield
            many_rows.was_used = False
            [(taken, _)] = self._run([size])
            yield
            if many_rows.was_used:
                seconds[size] = taken
                if taken > MAX_MEASURED_SECONDS:
                    break
        if not seconds:
            return
        shortest, longest = min(seconds), max(seconds)
        with many_rows.always():
            [(_, nbytes)] = self._run([longest])
        cost.many_rows_from = shortest
        cost.many_rows_bytes = max(0, nbytes - cost.memory(longest, longest)) + many_rows.max_pending_bytes
        cost.rate = (shortest + RUN_OVERHEAD) / seconds[shortest]
        if longest > shortest:
            cost.rate = (longest - shortest) / max(seconds[longest] - seconds[shortest], MIN_DIFFERENCE)
            cost.overhead = max(0.0, cost.rate * seconds[shortest] - shortest)

    def _two_chunks(self, size: int) -> tuple[float, float, float]:
        """Run two chunks, one after the other; return the seconds of the second one, and the bytes of both."""
        if self.prepares:
            self._run([size] * 2)
        (_, first), (seconds, second) = self._run([size] * 2)
        return self._agree(seconds), self._agree(first), self._agree(second)

    def _run(self, sizes: Sequence[int]) -> list[tuple[float, int]]:
        return list(self._chunks(sizes))

    def _chunks(self, sizes: Sequence[int]) -> Iterator[tuple[float, int]]:
        """Run consecutive chunks, and yield the seconds and working bytes of each."""
        layers = self._make_caches()
        for size in sizes:
            # Different ones: a mixture of experts would send equal tokens to the same few experts.
            tokens = mx.random.randint(0, self._num_tokens, (1, size), mx.uint32, key=mx.random.key(size))
            mx.eval(tokens)
            mx.reset_peak_memory()
            started = perf_counter()
            self._network(tokens, cache=layers)
            mx.eval([layer.state for layer in layers])
            seconds = perf_counter() - started
            nbytes = max(0, mx.get_peak_memory() - mx.get_active_memory())
            mx.clear_cache()
            yield seconds, nbytes
