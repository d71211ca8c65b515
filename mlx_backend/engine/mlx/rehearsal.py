"""Two requests run when a model is loaded: what they compile or load is there for the first real ones.

Knows a batch and no network.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mlx_backend.engine.base import GenerationRequest, Sampling
from mlx_backend.errors import EngineError

if TYPE_CHECKING:
    from mlx_backend.engine.mlx.loaded_batch import LoadedBatch

log = logging.getLogger(__name__)

# Lengths of two prompts, the second of which arrives while the first is answered, and tokens of each reply.
REHEARSED_PROMPTS, REHEARSED_TOKENS = (40, 100), 8


def rehearse(batch: LoadedBatch) -> None:
    """Answer two prompts that mean nothing, one of which joins the other, and forget them."""
    rate, (first, second) = batch.prefill_queue.pacer.rate, REHEARSED_PROMPTS
    sampled = Sampling(temperature=0.7, top_p=0.9, seed=1)
    requests = {
        -1: GenerationRequest(prompt=[0] * first, max_tokens=2 * REHEARSED_TOKENS),
        -2: GenerationRequest(prompt=[0] * second, max_tokens=REHEARSED_TOKENS, sampling=sampled),
    }
    try:
        for key, request in requests.items():
            if batch.admits(request):
                batch.insert(key, request)
            for _ in range(REHEARSED_TOKENS):
                list(batch.step())
        while batch.sequences:
            list(batch.step())
    except EngineError as error:  # a small context, or little memory
        log.debug("Requests were not rehearsed: %s", error)
    for key in list(batch.sequences):
        batch.remove(key)
    batch.runtime.prefixes.clear()
    batch.prefix_store.report_usage()
    batch.prefill_queue.pacer.rate = rate
