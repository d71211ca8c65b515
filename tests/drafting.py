"""Batches that draft in every step, so that tests do not depend on how fast a step happens to be."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any

from mlx_backend.device import Device
from mlx_backend.engine.base import GenerationRequest, Logprobs, Sampling, TokenDelta
from mlx_backend.engine.batch import Ended
from mlx_backend.engine.mlx.batch import MLXBatch
from mlx_backend.engine.mlx.draft_pacer import DraftPacer
from mlx_backend.engine.mlx.sampling import RequestSampler, SamplePosition, text_token_mask
from mlx_backend.engine.threaded import Engine
from mlx_backend.errors import EngineError
from mlx_backend.models.engine_options import EngineOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path


def every_step(max_drafts: int) -> DraftPacer:
    """Return what drafts as much as it may in every step, whether it pays or not."""
    return DraftPacer(max_drafts, None, lengths=repeat(max_drafts))


@dataclass
class FoundReply:
    """What a batch generated for one request. `ended` is None if it was removed."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs | None] = field(default_factory=list)
    ended: Ended | None = None
    error: EngineError | None = None


@contextmanager
def drafting_engine(model: Path, **options: Any) -> Iterator[Engine]:
    """Start an engine that drafts in every step."""
    batch = MLXBatch(model, EngineOptions(**{"cache_bytes": 0, **options}), device=Device(8 << 30))
    with Engine(batch) as engine:
        batch.draft_pacer = every_step(batch.draft_pacer.max_drafts)
        yield engine


@contextmanager
def loaded_batch(model: Path, **options: Any) -> Iterator[MLXBatch]:
    """Load a model; if it drafts, then in every step."""
    batch = MLXBatch(model, EngineOptions(**{"cache_bytes": 0, **options}), device=Device(8 << 30))
    batch.load(lambda _: None)
    batch.draft_pacer = every_step(batch.draft_pacer.max_drafts)
    try:
        yield batch
    finally:
        batch.unload()


def generate(
    batch: MLXBatch,
    requests: Sequence[GenerationRequest],
    *,
    arrivals: Mapping[int, int] | None = None,
    cancelled_after: Mapping[int, int] | None = None,
) -> list[FoundReply]:
    """Generate replies together. By a request's index: the step it arrives in, and after how many tokens it is left."""
    found = [FoundReply() for _ in requests]
    waiting = {index: (arrivals or {}).get(index, 0) for index in range(len(requests))}
    limits = dict(cancelled_after or {})
    step = 0
    while waiting or batch.sequences:
        for index in [index for index, arrival in waiting.items() if arrival <= step]:
            del waiting[index]
            batch.insert(index, requests[index])
        step += 1
        for key, outcome in list(batch.step()) if batch.sequences else ():
            match outcome:
                case TokenDelta(token, _, logprobs):
                    found[key].tokens.append(token)
                    found[key].logprobs.append(logprobs)
                case Ended():
                    found[key].ended = outcome
                case EngineError():
                    found[key].error = outcome
        for index in [index for index, limit in limits.items() if len(found[index].tokens) >= limit]:
            del limits[index]
            if index in batch.sequences:
                batch.remove(index)
    return found


def alone(batch: MLXBatch, asked: Sequence[GenerationRequest]) -> list[FoundReply]:
    """Run requests one after the other; return their replies."""
    return [generate(batch, [each])[0] for each in asked]


def tokens(replies: Sequence[FoundReply]) -> list[list[int]]:
    """Return the tokens of replies, which have all ended."""
    assert all(reply.ended is not None for reply in replies)
    return [reply.tokens for reply in replies]


def first_position(vocabulary_size: int, sampling: Sampling | None = None) -> SamplePosition:
    """Return the first position of a reply, greedy by default."""
    request = GenerationRequest(prompt=[0], max_tokens=1, sampling=sampling or Sampling())
    sampler = RequestSampler(request, text_token_mask(vocabulary_size, ()))
    return SamplePosition(sampler, 0, sampler.penalty_state(()))
