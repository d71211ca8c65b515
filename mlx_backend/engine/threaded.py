"""An `Engine` made of a batch and a scheduler, with the checks that every request must pass.

A token id outside the vocabulary reads past the embedding table and can crash the process, so everything about a
request that could harm others is checked here, in the caller's thread, before the engine sees it.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from mlx_backend.engine.base import MAX_PRIORITY, GenerationRequest
from mlx_backend.engine.scheduler import Scheduler
from mlx_backend.errors import EngineRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mlx_backend.engine.base import EngineStatus, PromptStart, Sampling, Tokenizer
    from mlx_backend.engine.batch import Batch, ModelInfo
    from mlx_backend.engine.images import ImageProcessor, ImageSupport
    from mlx_backend.engine.jobs import Generation
    from mlx_backend.errors import EngineStopped

MAX_LOGPROBS = 20


class Engine:
    """Loads the batch on its own thread when constructed; raises EngineError if that fails."""

    def __init__(
        self,
        batch: Batch,
        *,
        max_concurrent: int = 32,
        max_waiting: int = 256,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        self._scheduler = Scheduler(
            batch, max_running=max_concurrent, max_waiting=max_waiting, on_progress=on_progress
        )
        self._scheduler.start()

    @property
    def _info(self) -> ModelInfo:
        return self._scheduler.info

    @property
    def model_id(self) -> str:
        """The name clients use for the model."""
        return self._info.model_id

    @property
    def context_length(self) -> int:
        """Prompt and completion together may hold this many tokens."""
        return self._info.context_length

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._info.tokenizer

    @property
    def image_processor(self) -> ImageProcessor | None:
        """What prepares images for the model; None if it cannot see them here."""
        return self._info.image_processor

    @property
    def image_support(self) -> ImageSupport:
        """Whether the model can be shown images here, or why not."""
        return self._info.image_support

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        """What the model's authors recommend, by the names of `Sampling`."""
        return self._info.sampling_defaults

    def generate(self, request: GenerationRequest) -> Generation:
        """Queue a request and return at once. Raises EngineRefused, EngineBusy, EngineFailed, EngineStopped."""
        return self._scheduler.submit(self._checked(request))

    def prewarm(self, make_start: Callable[[], PromptStart | None], adapter: str | None = None) -> None:
        """Prefill the beginning of a prompt that is likely to come, while nothing else is to be done.

        `make_start` is called then, on a thread of its own, and again if a request comes first; None: it is no longer
        likely. It is never called if no prompts are cached here.
        """
        if not self._info.caches_prompts:
            return

        def make_request() -> GenerationRequest | None:
            if (start := make_start()) is None:
                return None
            if not 0 < len(start.tokens) < self.context_length:
                raise EngineRefused(f"A prompt of {len(start.tokens)} tokens cannot be prefilled.")
            self._check_ids("The prompt", start.tokens)
            return GenerationRequest(prompt=start.tokens, images=start.images, max_tokens=0, adapter=adapter)

        self._scheduler.prewarm(make_request)

    def status(self) -> EngineStatus:
        """Return what it is doing."""
        return self._scheduler.status()

    def is_healthy(self) -> bool:
        """Whether requests are being served: False while it loads, restarts or is stopped."""
        return self._scheduler.is_healthy()

    def terminate(self, error: EngineStopped, *, timeout: float) -> bool:
        """End with an error for every request, now and from now on; False if the thread had to be abandoned."""
        return self._scheduler.terminate(error, timeout=timeout)

    def stop(self) -> None:
        """Cancel everything, stop the engine thread and join it. Idempotent."""
        self._scheduler.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _checked(self, request: GenerationRequest) -> GenerationRequest:
        """Refuse what cannot run, clip max_tokens to what the context has room for, choose a seed if none is set."""
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
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(request, name)) is not None and not 0 <= count <= MAX_LOGPROBS:
                raise EngineRefused(f"{name} must be between 0 and {MAX_LOGPROBS}, not {count}.")
        if request.images and request.prompt_logprobs is not None:
            raise EngineRefused("A prompt with images has no log probabilities.", "prompt_logprobs")
        if not -MAX_PRIORITY <= request.priority <= MAX_PRIORITY:
            raise EngineRefused(
                f"priority must be between {-MAX_PRIORITY} and {MAX_PRIORITY}, not {request.priority}."
            )
        if request.adapter is not None and request.adapter not in self._info.adapters:
            known = ", ".join(map(repr, self._info.adapters)) or "none"
            raise EngineRefused(
                f"There is no adapter {request.adapter!r} here; there are: {known}.", "adapter"
            )
        self._check_ids("The prompt", request.prompt)
        self._check_ids("logit_bias", [token for token, _ in request.sampling.logit_bias])
        _check_sampling(request.sampling)
        sampling = request.sampling
        if sampling.seed is None:  # every reply has a seed of its own
            sampling = replace(sampling, seed=int.from_bytes(os.urandom(8)))
        return replace(request, max_tokens=min(request.max_tokens, room), sampling=sampling)

    def _check_ids(self, where: str, tokens: Sequence[int]) -> None:
        size = self.tokenizer.vocabulary_size
        if tokens and not (min(tokens) >= 0 and max(tokens) < size):
            bad = next(token for token in tokens if not 0 <= token < size)
            raise EngineRefused(f"{where} holds token id {bad}; the model's ids are 0 to {size - 1}.")


def _check_sampling(sampling: Sampling) -> None:
    def require(name: str, value: float, is_valid: bool, expected: str) -> None:
        if not (is_valid and math.isfinite(value)):
            raise EngineRefused(f"{name} must be {expected}, not {value}.")

    require("temperature", sampling.temperature, sampling.temperature >= 0, "a number from 0 up")
    for name in ("top_p", "min_p", "xtc_probability", "xtc_threshold"):
        value = getattr(sampling, name)
        require(name, value, 0 <= value <= 1, "between 0 and 1")
    require("top_k", sampling.top_k, sampling.top_k >= 0, "0 (off) or more")
    penalty = sampling.repetition_penalty
    require("repetition_penalty", penalty, penalty > 0, "a number above 0")
    require("presence_penalty", sampling.presence_penalty, True, "a number")
    require("frequency_penalty", sampling.frequency_penalty, True, "a number")
    for _, bias in sampling.logit_bias:
        require("logit_bias", bias, -100 <= bias <= 100, "between -100 and 100")
