"""What the engine thread drives: several requests that are stepped together. A new engine implements `Batch`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from mlx_backend.engine.base import Progress, PromptLogprobs, TokenDelta
from mlx_backend.engine.images import ImageSupport
from mlx_backend.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from mlx_backend.engine.base import GenerationRequest, Tokenizer
    from mlx_backend.engine.images import ImageProcessor


class Tune(Protocol):
    """Called on the engine thread between steps; returns whether it did anything, which takes as long as a chunk."""

    def __call__(self, *, is_idle: bool) -> bool:
        """`is_idle` is whether there is no request."""
        ...


FEW_TOKENS = 32
"""Tokens of a prompt that are prefilled at once, whoever's turn it is: of one that was cached but for its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a loaded model reports about itself."""

    model_id: str
    context_length: int
    tokenizer: Tokenizer
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    adapters: Collection[str] = ()
    """The LoRA adapters a request may name."""
    image_processor: ImageProcessor | None = None
    """None: the model cannot see images here."""
    image_support: ImageSupport = ImageSupport.NONE
    unbatched: str = ""
    """Why replies are not decoded together; empty if they are."""
    drafts: str = ""
    """What the model's MTP head does, or why it does nothing; empty if it is not said to have one."""
    caches_prompts: bool = False
    """Whether a warm-up (a request without a reply) is of use to the requests after it."""
    available_context: Callable[[], int | None] = lambda: None
    """Returns how many tokens of prompt and reply fit into memory now. From any thread."""
    set_waker: Callable[[Callable[[], None]], None] = lambda wake: None
    """Gets a function that wakes the engine thread, to be called when other models need memory or have freed some."""
    on_wake: Callable[[], None] = lambda: None
    """Called on the engine thread when it has been woken."""
    tune: Tune = lambda is_idle: False
    """Does a little of what makes the model faster."""
    tuning: Callable[[], str] = str
    """Returns what of that is being done, for people; empty: nothing. From any thread."""
    tokens_to_prefill: Callable[[GenerationRequest], int] = lambda request: len(request.prompt)
    """Returns how many tokens of a prompt would have to be prefilled now. On the engine thread, as the next."""
    prefill_room: Callable[[int], float] = lambda priority: math.inf
    """Returns how many that may be of the next request of a priority, for it to be started now."""
    is_ready: Callable[[], bool] = lambda: True
    """Whether a step would advance anything. If not, the thread sleeps until a message comes. On the engine thread."""
    has_to_wait: Callable[[GenerationRequest], bool] = lambda request: False
    """Whether a request has to wait for one of its own kind, which holds up no others. On the engine thread."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A request has produced its last token. With speculative decoding, how many tokens were drafted and accepted."""

    reason: Literal["stop", "length"]
    drafted_tokens: int = 0
    accepted_tokens: int = 0


type Outcome = Progress | PromptLogprobs | TokenDelta | Ended | EngineError


class Batch(Protocol):
    """Several requests, stepped together. Every method is called on the engine thread."""

    def load(self, on_progress: Callable[[float], None]) -> ModelInfo:
        """Load the model; `on_progress` gets the share, from 0 to 1. Raises EngineError if that fails."""
        ...

    def admits(self, request: GenerationRequest) -> bool:
        """Whether there is room to start a request now.

        An empty batch has room, unless other models first have to give up cached memory; they wake the engine thread
        when they have. Raises EngineRefused if there never can be room, EngineBusy if other models leave too little
        even for this request alone.
        """
        ...

    def insert(self, key: int, request: GenerationRequest) -> None:
        """Start a request. An exception fails this request and no other."""
        ...

    def step(self) -> Iterable[tuple[int, Outcome]]:
        """Advance every request by a token or a chunk of prompt.

        After `Ended` or an `EngineError` a request has left the batch. An exception breaks the engine: it is unloaded
        and loaded again, unless it is EngineStopped, which is final.
        """
        ...

    def remove(self, key: int) -> None:
        """Drop a request that was cancelled."""
        ...

    def unload(self) -> None:
        """Free everything, also after a failed load; `load` may follow."""
        ...

    def close(self) -> None:
        """Called last, before the thread ends."""
        ...
