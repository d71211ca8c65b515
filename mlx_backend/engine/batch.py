"""What the engine thread drives: several requests that are stepped together. MLX implements it, and the scripts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from mlx_backend.engine.base import Progress, TokenDelta
from mlx_backend.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from mlx_backend.engine.base import GenerationRequest, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the world may know of a loaded model."""

    model_id: str
    context_length: int
    tokenizer: Tokenizer
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    adapters: Collection[str] = ()  # the LoRA adapters a request may name


@dataclass(frozen=True, slots=True)
class Ended:
    """A request has produced its last token."""

    reason: Literal["stop", "length"]


type Outcome = Progress | TokenDelta | Ended | EngineError


class Batch(Protocol):
    """Several requests, stepped together. Every method is called on the engine thread."""

    def load(self, report: Callable[[float], None]) -> ModelFacts:
        """Load the model, reporting from 0 to 1; raise EngineError with a text for people if that fails."""
        ...

    def admits(self, request: GenerationRequest) -> bool:
        """Whether there is room to begin a request now. An empty batch never says no.

        Raises EngineError if there can never be, or not while others outside the batch take so much.
        """
        ...

    def insert(self, key: int, request: GenerationRequest) -> None:
        """Begin a request. What this raises is that request's failure alone."""
        ...

    def ready(self) -> bool:
        """Whether a step would move anything. If not, the thread sleeps until its inbox wakes it."""
        ...

    def step(self) -> Iterable[tuple[int, Outcome]]:
        """Advance every request by a token or a chunk of prompt.

        After `Ended` or an `EngineError` a request has left the batch. What this raises breaks the engine: it
        is unloaded and loaded again; EngineStopped is the end.
        """
        ...

    def remove(self, key: int) -> None:
        """Drop a request that nobody wants any more."""
        ...

    def unload(self) -> None:
        """Give everything back, also after a failed load; `load` may follow."""
        ...

    def close(self) -> None:
        """The last act of the thread."""
        ...
