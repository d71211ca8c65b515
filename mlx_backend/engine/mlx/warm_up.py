"""Running a network when it is loaded: what a chunk takes, and on a GPU all that is slow the first time.

Kernels are compiled or loaded when they are first used, and MLX's CUDA backend chooses algorithms for every new shape
of a matrix. In the first process on a fresh H200, the first prompt beside a running reply stopped it for 2.9 seconds,
although lengths had been run; in later processes for 0.25. What is done here is not done while somebody waits.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_backend.engine.mlx.chunk_sizes import CHUNK_SIZES, PADDED_SIZES, RUN_OVERHEAD

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mlx_backend.engine.mlx.kv_cache import LayerCaches
    from mlx_backend.engine.mlx.long_runs import LongRuns

log = logging.getLogger(__name__)

MEASURED_TOKENS = CHUNK_SIZES[0]
MAX_MEASURED_SECONDS = 0.25  # of a long run, for another of twice the length to be measured
GROWTH = 3.0  # how much longer the next length may take than the one before


@dataclass(frozen=True, slots=True)
class LongRunCost:
    """What chunks take that are long runs for some layers (long_runs.py).

    `seconds` are those of several numbers of tokens, ascending, from the least for which that is so. Each takes
    `nbytes` beside what a chunk takes otherwise.
    """

    seconds: Mapping[int, float]
    nbytes: int

    @property
    def min_tokens(self) -> int:
        """The tokens of the shortest chunk that is a long run."""
        return next(iter(self.seconds))

    def seconds_of(self, tokens: int) -> float:
        """Return how long a chunk of so many tokens takes, by those measured next to it."""
        known = list(self.seconds)
        if len(known) == 1:
            return self.seconds[known[0]] * tokens / known[0]
        at = min(max(1, bisect_left(known, tokens)), len(known) - 1)
        short, long = known[at - 1], known[at]
        slope = (self.seconds[long] - self.seconds[short]) / (long - short)
        return self.seconds[long] + max(0.0, slope) * (tokens - long)


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """What a chunk takes: tokens a second, and the bytes that its computation needs beside the caches.

    Those are `per_token` for each token, and `per_pair` for each token and each one that it attends to: attention that
    is computed in one kernel has none of these.
    """

    rate: float
    per_token: float
    per_pair: float
    long_runs: LongRunCost | None = None

    def work(self, tokens: int) -> float:
        """Return what a chunk of so many tokens takes, counted in tokens of a chunk of which `rate` is the speed."""
        long_runs = self.long_runs
        if long_runs is None or tokens < long_runs.min_tokens:
            return tokens + RUN_OVERHEAD
        return self.rate * long_runs.seconds_of(tokens)

    def working_bytes(self, tokens: int, context: int) -> int:
        """Return the bytes for a chunk of so many tokens that ends at position `context`."""
        nbytes = int(tokens * (self.per_token + self.per_pair * context))
        if self.long_runs is not None and tokens >= self.long_runs.min_tokens:
            nbytes += self.long_runs.nbytes
        return nbytes


class WarmUp:
    """Runs a network on tokens that mean nothing, on caches of its own.

    `agree` gets a figure of this process and returns the largest of all processes that share the model: they have to
    do the same runs. No run is longer than `max_tokens`. `prepares` says that the device takes time for a length that
    is new to it, which is then not measured. `long_runs` belongs to the layers that have another way for those, if
    there are any; then this process has the whole model.
    """

    def __init__(
        self,
        network: Any,
        make_caches: Callable[[], LayerCaches],
        *,
        max_tokens: int,
        agree: Callable[[float], float],
        prepares: bool = False,
        long_runs: LongRuns | None = None,
    ) -> None:
        self._network = network
        self._make_caches = make_caches
        self._max_tokens = max_tokens
        self._agree = agree
        self._prepares = prepares
        self._long_runs = long_runs

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
        """Run a few chunks, and return what they took."""
        long_runs = self._long_runs
        if long_runs is None or not (sizes := self._long_run_sizes(long_runs)):
            return self._measure_chunks()
        with long_runs.always():
            [(_, nbytes)] = self._run(sizes[:1])
        seconds: dict[int, float] = {}
        for size in sizes:
            if self._prepares:
                self._run([size])
            [(seconds[size], _)] = self._run([size])
            if seconds[size] > MAX_MEASURED_SECONDS:
                break
        # Weights would hide what the rest needs, and as they are they may take a minute on a CPU.
        with long_runs.without_products():
            cost = self._measure_chunks()
        nbytes = max(0, nbytes - cost.working_bytes(sizes[0], sizes[0])) + long_runs.max_pending_bytes
        rate = (sizes[0] + RUN_OVERHEAD) / seconds[sizes[0]]
        return replace(cost, rate=rate, long_runs=LongRunCost(seconds, nbytes))

    def _measure_chunks(self) -> ChunkCost:
        """Run two chunks, one after the other."""
        size = max(1, min(MEASURED_TOKENS, self._max_tokens // 2))
        if self._prepares:
            self._run([size, size])
        (_, first_bytes), (seconds, second_bytes) = self._run([size, size])
        first, second = self._agree(first_bytes), self._agree(second_bytes)
        per_pair = max(0.0, (second - first) / size**2)
        return ChunkCost((size + RUN_OVERHEAD) / seconds, max(0.0, first / size - per_pair * size), per_pair)

    def _long_run_sizes(self, long_runs: LongRuns) -> list[int]:
        """Return the sizes of chunks that are long runs, ascending."""
        sizes = [size for size in PADDED_SIZES if size <= self._max_tokens]
        while sizes and not self._is_long_run(long_runs, sizes[0]):
            del sizes[0]
        return sizes

    def _is_long_run(self, long_runs: LongRuns, tokens: int) -> bool:
        """Whether a chunk of so many tokens is a long run for any layer."""
        long_runs.was_used = False
        with long_runs.without_products():
            self._run([tokens])
        return long_runs.was_used

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
