"""An `Engine` made of a batch and a scheduler, and the checks that nothing may pass without.

A token id outside the vocabulary reads past the embedding table and can kill the process, so everything about
a request that could harm others is looked at here, in the caller's thread, before the engine sees it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from .base import EngineRefused
from .scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .base import Generation, GenerationRequest, Sampling, Tokenizer
    from .scheduler import Batch


class ThreadedEngine:
    """Loads the batch on its own thread when constructed; raises EngineError if that fails."""

    def __init__(self, batch: Batch, *, max_concurrent: int = 32, max_waiting: int = 256) -> None:
        self._scheduler = Scheduler(batch, max_running=max_concurrent, max_waiting=max_waiting)
        self._facts = self._scheduler.start()

    @property
    def model_id(self) -> str:
        """The name clients use for the model."""
        return self._facts.model_id

    @property
    def context_length(self) -> int:
        """Prompt and completion together may hold this many tokens."""
        return self._facts.context_length

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._facts.tokenizer

    def generate(self, request: GenerationRequest) -> Generation:
        """Queue a request and return at once. Raises EngineRefused, EngineBusy or EngineStopped."""
        return self._scheduler.submit(self._checked(request))

    def healthy(self) -> bool:
        """False once the engine thread has died or been stopped."""
        return self._scheduler.healthy()

    def stop(self) -> None:
        """Cancel everything, stop the engine thread and join it. Idempotent."""
        self._scheduler.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _checked(self, request: GenerationRequest) -> GenerationRequest:
        """Refuse what cannot run; clip max_tokens to what the context has room for."""
        length, room = len(request.prompt), self.context_length - len(request.prompt)
        if not length:
            raise EngineRefused("The prompt is empty.")
        if room < 1:
            raise EngineRefused(
                f"The prompt has {length} tokens; the model's context holds {self.context_length}, "
                "and at least one must be left for the answer."
            )
        if request.max_tokens < 1:
            raise EngineRefused(f"max_tokens must be at least 1, not {request.max_tokens}.")
        self._check_ids("The prompt", request.prompt)
        self._check_ids("logit_bias", [token for token, _ in request.sampling.logit_bias])
        _check_sampling(request.sampling)
        return replace(request, max_tokens=min(request.max_tokens, room))

    def _check_ids(self, where: str, tokens: Sequence[int]) -> None:
        size = self.tokenizer.vocabulary_size
        if tokens and not (min(tokens) >= 0 and max(tokens) < size):
            bad = next(token for token in tokens if not 0 <= token < size)
            raise EngineRefused(f"{where} holds token id {bad}; the model's ids are 0 to {size - 1}.")


def _check_sampling(sampling: Sampling) -> None:
    def demand(name: str, value: float, holds: bool, what: str) -> None:
        if not (holds and math.isfinite(value)):
            raise EngineRefused(f"{name} must be {what}, not {value}.")

    demand("temperature", sampling.temperature, sampling.temperature >= 0, "a number from 0 up")
    demand("top_p", sampling.top_p, 0 <= sampling.top_p <= 1, "between 0 and 1")
    demand("min_p", sampling.min_p, 0 <= sampling.min_p <= 1, "between 0 and 1")
    demand("top_k", sampling.top_k, sampling.top_k >= 0, "0 (off) or more")
    penalty = sampling.repetition_penalty
    demand("repetition_penalty", penalty, penalty > 0, "a number above 0")
    demand("presence_penalty", sampling.presence_penalty, True, "a number")
    demand("frequency_penalty", sampling.frequency_penalty, True, "a number")
    for _, bias in sampling.logit_bias:
        demand("logit_bias", bias, -100 <= bias <= 100, "between -100 and 100")
