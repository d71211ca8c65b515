"""Warm-up of a loaded network: measures how long chunks take and, on a GPU, does all that is slow the first time.

Kernels are compiled or loaded when they are first used, and MLX's CUDA backend chooses algorithms for every new shape
of a matrix. In the first process on a fresh H200, the first prompt beside a running reply stopped it for 2.9 seconds,
although lengths had been run; in later processes for 0.25. No request has to wait for what is done here.
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
    from mlx_backend.layers.many_rows import ManyRows

log = logging.getLogger(__name__)

MEASURED_TOKENS = CHUNK_SIZES[0]
VARIOUS_TOKENS = (
    256  # how many different tokens are drawn from, at most: enough for all of a mixture's experts
)
MAX_MEASURED_SECONDS = 0.25  # of a chunk of many rows, beyond which no longer one is measured
MEASUREMENTS = 3  # of memory where they are fast: what a CPU frees late hides some of it
GROWTH = 3.0  # how much longer the next length may take than the one before


@dataclass(frozen=True, slots=True)
class ManyRowsCost:
    """What chunks take in which some layers use their implementation for many rows (layers/many_rows.py).

    `seconds` maps sizes of such chunks, ascending, to the seconds measured; `nbytes` is their extra working memory.
    """

    seconds: Mapping[int, float]
    nbytes: int

    @property
    def min_tokens(self) -> int:
        """The tokens of the shortest such chunk."""
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
    many_rows: ManyRowsCost | None = None

    def work(self, tokens: int) -> float:
        """Return the cost of a chunk of so many tokens, in units of which `rate` are done in a second."""
        many_rows = self.many_rows
        if many_rows is None or tokens < many_rows.min_tokens:
            return tokens + RUN_OVERHEAD
        return self.rate * many_rows.seconds_of(tokens)

    def working_bytes(self, tokens: int, context: int) -> int:
        """Return the bytes for a chunk of so many tokens that ends at position `context`."""
        nbytes = int(tokens * (self.per_token + self.per_pair * context))
        if self.many_rows is not None and tokens >= self.many_rows.min_tokens:
            nbytes += self.many_rows.nbytes
        return nbytes


class WarmUp:
    """Runs a network on tokens that mean nothing, on caches of its own.

    `agree` gets a figure of this process and returns the largest of all processes that share the model: they have to
    do the same runs. No run is longer than `max_tokens`; the model's token ids are below `num_tokens`.
    `prepares` says that the device takes time for a length that is new to it, which is then not measured. `many_rows`
    belongs to the layers with an implementation for many rows, if there are any; then this process has the whole model.
    """

    def __init__(
        self,
        network: Any,
        make_caches: Callable[[], LayerCaches],
        *,
        max_tokens: int,
        num_tokens: int,
        agree: Callable[[float], float],
        prepares: bool = False,
        many_rows: ManyRows | None = None,
    ) -> None:
        self._network = network
        self._make_caches = make_caches
        self._max_tokens = max_tokens
        self._num_tokens = min(num_tokens, VARIOUS_TOKENS)
        self._agree = agree
        self._prepares = prepares
        self._many_rows = many_rows

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
        many_rows = self._many_rows
        if many_rows is None or not (sizes := self._many_rows_sizes(many_rows)):
            return self._measure_chunks()
        seconds: dict[int, float] = {}
        for size in sizes:
            if self._prepares:
                self._run([size])
            with many_rows.without_unread():  # as chunks are run
                [(seconds[size], _)] = self._run([size])
            if seconds[size] > MAX_MEASURED_SECONDS:
                break
        longest = max(seconds)
        with many_rows.always():
            [(_, nbytes)] = self._run([longest])
        # Without products: dequantised weights would hide the memory of the rest, and quantised kernels are slow.
        with many_rows.without_products():
            costs = [self._measure_chunks() for _ in range(MEASUREMENTS)]
        cost = max(costs, key=lambda each: each.per_pair)
        nbytes = max(0, nbytes - cost.working_bytes(longest, longest)) + many_rows.max_pending_bytes
        rate = (sizes[0] + RUN_OVERHEAD) / seconds[sizes[0]]
        return replace(cost, rate=rate, many_rows=ManyRowsCost(seconds, nbytes))

    def _measure_chunks(self) -> ChunkCost:
        """Run two chunks, one after the other."""
        size = max(1, min(MEASURED_TOKENS, self._max_tokens // 2))
        if self._prepares:
            self._run([size, size])
        (_, first_bytes), (seconds, second_bytes) = self._run([size, size])
        first, second = self._agree(first_bytes), self._agree(second_bytes)
        per_pair = max(0.0, (second - first) / size**2)
        return ChunkCost((size + RUN_OVERHEAD) / seconds, max(0.0, first / size - per_pair * size), per_pair)

    def _many_rows_sizes(self, many_rows: ManyRows) -> list[int]:
        """Return the sizes of chunks in which layers use their implementation for many rows, ascending."""
        sizes = [size for size in PADDED_SIZES if size <= self._max_tokens]
        while sizes and not self._has_many_rows(many_rows, sizes[0]):
            del sizes[0]
        return sizes

    def _has_many_rows(self, many_rows: ManyRows, tokens: int) -> bool:
        """Whether any layer uses its implementation for many rows in a chunk of so many tokens."""
        many_rows.was_used = False
        with many_rows.without_products():
            self._run([tokens])
        return many_rows.was_used

    def _run(self, sizes: Sequence[int]) -> list[tuple[float, int]]:
        """Run chunks that follow each other; return the seconds and the working bytes of each."""
        layers, taken = self._make_caches(), []
        for size in sizes:
            # Different ones: a mixture of experts would send equal tokens to the same few experts.
            tokens = mx.random.randint(0, self._num_tokens, (1, size), key=mx.random.key(size))
            mx.eval(tokens)
            mx.reset_peak_memory()
            started = perf_counter()
            self._network(tokens, cache=layers)
            mx.eval([layer.state for layer in layers])
            seconds = perf_counter() - started
            taken.append((seconds, max(0, mx.get_peak_memory() - mx.get_active_memory())))
            mx.clear_cache()
        return taken
