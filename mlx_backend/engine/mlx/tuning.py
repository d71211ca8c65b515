"""What makes a model faster that is served already: kernels compiled elsewhere, costs measured, lengths run.

A model is served as soon as it can answer. What would take minutes on a fresh NVIDIA machine, and seconds on any GPU,
is done here in slices, each about as long as a prompt's chunk: back to back while there are no requests, and one in
`BUSY_SECONDS` while there are.

    other processes compile ──▶ MLX's own functions again ──▶ layers for many rows: tried, measured, taken
                                                          ──▶ lengths of chunks run ──▶ made-up requests answered

Replies that run go on with other kernels then, whose outputs differ by rounding, as they do between chunks of other
lengths: on a GPU nothing is promised beyond that. On a CPU nothing changes once a model is served.

Runs on the engine thread. Knows requests only to make some up.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager, nullcontext
from itertools import cycle
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from mlx_backend.device.mlx import is_gpu, prepares_for_lengths
from mlx_backend.engine.base import GenerationRequest, Sampling
from mlx_backend.engine.batch import Batch
from mlx_backend.engine.mlx.draft_pacer import DraftPacer
from mlx_backend.engine.mlx.runtime import many_rows_layers
from mlx_backend.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from mlx_backend.device import Device
    from mlx_backend.engine.mlx.prefill_queue import PrefillQueue
    from mlx_backend.engine.mlx.runtime import Runtime
    from mlx_backend.engine.mlx.sequences import DecodingSequence

log = logging.getLogger(__name__)

WARMING_UP = "Prompts of common lengths are being run, to warm up."
BUSY_SECONDS = 5.0
"""Seconds between two slices while there are requests."""


class TunedBatch(Batch, Protocol):
    """What of MLX's batch is needed here."""

    sequences: dict[int, DecodingSequence]
    prefill_queue: PrefillQueue
    draft_pacer: DraftPacer
    pace: list[float]

    @property
    def runtime(self) -> Runtime:
        """The loaded model."""
        ...


class Tuning:
    """What is left to do for a model that is served. `doing` says what that is, for people; empty: nothing."""

    def __init__(self, batch: TunedBatch, device: Device, context_length: int) -> None:
        self._batch = batch
        self._device = device
        self._context_length = context_length
        self._answering: Iterator[None] | None = None
        self._work: Iterator[bool] | None = self._steps()
        self._began = self._last = perf_counter()
        self._kernels = batch.runtime.kernels
        self._doing = ""
        if self._kernels is not None:
            self._doing = "Kernels for long prompts are being compiled ({}); until then slower ones serve."
        elif self._warms_up:
            self._doing = WARMING_UP

    @property
    def doing(self) -> str:
        """What is being done, from any thread."""
        return self._doing.format(self._kernels.progress if self._kernels is not None else "")

    def advance(self, *, is_idle: bool) -> bool:
        """Do the next slice, if it is time to; return whether anything was done.

        `is_idle` is whether there is no request.
        """
        if self._work is None:
            return False
        if not is_idle:
            self._drop_requests()
            if perf_counter() - self._last < BUSY_SECONDS:
                return False
        try:
            # A step of made-up requests takes the lock itself.
            with self._device.lock if self._answering is None else nullcontext():
                did = next(self._work)
        except StopIteration:
            self.close()
            return False
        except Exception as error:  # requests are served as they were before
            log.warning("The model is served, but what makes it faster failed: %r", error)
            self.close()
            return False
        self._last = perf_counter()
        return did

    def close(self) -> None:
        """Do nothing more."""
        self._drop_requests()
        self._work, self._doing = None, ""

    def _drop_requests(self) -> None:
        """Drop the made-up requests: real ones do what is left of them."""
        if self._answering is not None:
            self._answering.close()  # type: ignore[attr-defined]  # a generator
            self._answering = None

    @property
    def _warms_up(self) -> bool:
        return is_gpu() and self._batch.runtime.options.warm_up_seconds > 0

    def _steps(self) -> Generator[bool]:
        runtime = self._batch.runtime
        if (kernels := runtime.kernels) is not None:
            while not kernels.is_done:
                yield False
            kernels.close()
            self._doing = "Long prompts are being measured."
            # Without dequantised weights, which are added to it.
            for _ in runtime.warm_up.measure_memory(runtime.chunk_cost):
                yield True
            many_rows = many_rows_layers(runtime.networks, kernels.find)
            if many_rows is not None:
                for _ in runtime.warm_up.measure_many_rows(many_rows, runtime.chunk_cost):
                    many_rows.is_enabled = False  # until it is known what it takes
                    yield True
                    many_rows.is_enabled = True
                runtime.many_rows = many_rows
            self._batch.prefill_queue.pacer.rate = runtime.chunk_cost.rate
        if self._warms_up:
            seconds = runtime.options.warm_up_seconds
            self._doing = WARMING_UP
            for _ in runtime.warm_up.run_lengths(seconds / 2):
                yield True
            self._answering = answer_requests(self._batch, self._context_length, seconds / 2)
            yield True
            while self._answering is not None and next(self._answering, self) is not self:
                yield True
        if self._doing:
            log.info("The model is ready and warm, %.0f s after it was loaded.", perf_counter() - self._began)


# -- requests that no client made -------------------------------------------------------------------------------
#
# What they load or plan is there for the first real ones. One reply is alone first and grows beyond a block of its
# caches, another joins it, and both get drafts where there are any: of every length up to `MAX_DRAFTS`, since MLX's
# CUDA backend plans each anew. There a long prompt arrives then, too, in the chunks that a running reply waits for.

FIRST, SECOND, LONG = -1, -2, -3
"""Keys of the requests."""
PROMPT_TOKENS = {FIRST: 250, SECOND: 100, LONG: 8192}
"""Caches grow by 256 tokens."""
MAX_REPLY_TOKENS = 256
STEPS = 12
"""Number of steps of the first reply alone, and of both."""
MAX_DRAFTS = STEPS // 2 - 1
"""Length of the longest drafts; all lengths come twice."""


def answer_requests(batch: TunedBatch, context_length: int, seconds: float) -> Iterator[None]:
    """Answer prompts that mean nothing, the long one for about `seconds` at most, and forget them.

    Yields after each step. Closed at any time, it leaves nothing behind; until then no other request may be stepped.
    """
    if context_length < PROMPT_TOKENS[FIRST] + MAX_REPLY_TOKENS:
        return
    pace, draft_pacer = batch.pace, batch.draft_pacer
    most = min(draft_pacer.max_drafts, MAX_DRAFTS)
    batch.draft_pacer = DraftPacer(most, None, lengths=cycle((*range(1, most + 1), 0)))
    steps = _answer(batch, context_length, seconds)
    try:
        while True:
            with _unnoticed(batch):
                next(steps)
            yield
    except (StopIteration, EngineError) as end:
        if isinstance(end, EngineError):  # little memory
            log.debug("No requests were answered to warm up: %s", end)
    finally:
        with _unnoticed(batch):
            for key in [key for key in batch.sequences if key < 0]:
                batch.remove(key)
        batch.draft_pacer = draft_pacer
        batch.pace = pace


@contextmanager
def _unnoticed(batch: TunedBatch) -> Iterator[None]:
    """Within the block nothing is cached of prompts, and other models are not asked for memory."""
    store = batch.runtime.prefix_store
    store.is_paused = True
    try:
        with batch.runtime.cache_budget.without_asking():
            yield
    finally:
        store.is_paused = False


def _answer(batch: TunedBatch, context_length: int, seconds: float) -> Iterator[None]:
    sampled = Sampling(temperature=0.7, top_p=0.9, seed=1)
    requests = {
        FIRST: GenerationRequest(prompt=[0] * PROMPT_TOKENS[FIRST], max_tokens=MAX_REPLY_TOKENS),
        SECOND: GenerationRequest(
            prompt=[1] * PROMPT_TOKENS[SECOND], max_tokens=MAX_REPLY_TOKENS // 2, sampling=sampled
        ),
    }
    for key, request in requests.items():
        if batch.admits(request):
            batch.insert(key, request)
            batch.sequences[key].end_tokens = ()  # whatever the model says
        for _ in range(STEPS):
            list(batch.step())
            yield
    if SECOND in batch.sequences:
        batch.remove(SECOND)
    list(batch.step())  # what follows when the other has left
    yield
    length = min(PROMPT_TOKENS[LONG], context_length // 2)
    prompt = GenerationRequest(prompt=[2] * length, max_tokens=2, sampling=sampled)
    # Time counts from here on: in the first process on a machine compiling takes longer than all else.
    deadline = perf_counter() + seconds
    if prepares_for_lengths() and FIRST in batch.sequences and batch.admits(prompt):
        batch.insert(LONG, prompt)
        while LONG in batch.sequences and perf_counter() < deadline:
            list(batch.step())
            yield
