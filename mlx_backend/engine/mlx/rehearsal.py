"""Requests run when a model is loaded onto a GPU: what they compile, load or plan is there for the first real ones.

One reply is alone first and grows beyond a block of its caches, another joins it, and both get drafts where there are
any: of every length up to `MAX_DRAFTS`, since MLX's CUDA backend plans each anew. There a long prompt arrives then,
too, in the chunks that a running reply waits for.

Knows a batch and no network.
"""

from __future__ import annotations

import logging
from time import perf_counter
from typing import TYPE_CHECKING

from mlx_backend.device.mlx import prepares_for_lengths
from mlx_backend.engine.base import GenerationRequest, Sampling
from mlx_backend.engine.mlx.draft_pacer import DraftPacer
from mlx_backend.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.engine.mlx.draft_record import DraftRecord
    from mlx_backend.engine.mlx.loaded_batch import LoadedBatch

log = logging.getLogger(__name__)

FIRST_PROMPT, SECOND_PROMPT = 250, 100  # tokens; caches grow by 256
LONG_PROMPT = 8192
STEPS = 12  # of the first reply alone, and of both
MAX_REPLY = 256  # tokens
MAX_DRAFTS = STEPS // 2 - 1  # so that all lengths come twice
FIRST, SECOND, LONG = -1, -2, -3  # keys


def rehearse(batch: LoadedBatch, context_length: int, seconds: float) -> None:
    """Answer prompts that mean nothing, the long one for about so many seconds at most, and forget them."""
    if context_length < FIRST_PROMPT + MAX_REPLY:
        return
    rate, draft_pacer = batch.prefill_queue.pacer.rate, batch.draft_pacer
    batch.draft_pacer = _EveryLength(min(draft_pacer.max_drafts, MAX_DRAFTS))
    try:
        with batch.runtime.cache_budget.asking_nobody():
            _answer(batch, context_length, seconds)
    except EngineError as error:  # little memory
        log.debug("Requests were not rehearsed: %s", error)
    finally:
        for key in list(batch.sequences):
            batch.remove(key)
        batch.draft_pacer = draft_pacer
    batch.runtime.prefixes.clear()
    batch.prefix_store.report_usage()
    batch.prefill_queue.pacer.rate = rate


def _answer(batch: LoadedBatch, context_length: int, seconds: float) -> None:
    sampled = Sampling(temperature=0.7, top_p=0.9, seed=1)
    requests = {
        FIRST: GenerationRequest(prompt=[0] * FIRST_PROMPT, max_tokens=MAX_REPLY),
        SECOND: GenerationRequest(prompt=[1] * SECOND_PROMPT, max_tokens=MAX_REPLY // 2, sampling=sampled),
    }
    for key, request in requests.items():
        if batch.admits(request):
            batch.insert(key, request)
            batch.sequences[key].end_tokens = ()  # whatever the model says
        for _ in range(STEPS):
            list(batch.step())
    if SECOND in batch.sequences:
        batch.remove(SECOND)
    list(batch.step())  # what follows when the other has left
    length = min(LONG_PROMPT, context_length // 2)
    prompt = GenerationRequest(prompt=[2] * length, max_tokens=2, sampling=sampled)
    # Time counts from here on: in the first process on a machine compiling takes longer than all else.
    deadline = perf_counter() + seconds
    if prepares_for_lengths() and FIRST in batch.sequences and batch.admits(prompt):
        batch.insert(LONG, prompt)
        while LONG in batch.sequences and perf_counter() < deadline:
            list(batch.step())


class _EveryLength(DraftPacer):
    """Has drafts of every length made in turn, whether they pay or not; nothing is measured, or learned from them."""

    def __init__(self, max_drafts: int) -> None:
        super().__init__(max_drafts, None)
        self._steps = 0

    def plan(
        self,
        replies: Sequence[DraftRecord],
        limits: Sequence[int],
        context: int,
        *,
        is_drafting: bool,
    ) -> list[int]:
        """Return how many tokens to draft for each reply in the next step."""
        self._steps += 1
        return [min(limit, self._steps % (self.max_drafts + 1)) for limit in limits]
