"""What a reply costs: its tokens, how many of them were reasoning, and the engine's times.

Counts engine items and the parser's events. Knows no stop strings, no wire format and no clock of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_backend.conversation.events import ReasoningDelta

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from mlx_backend.conversation.events import Event
    from mlx_backend.engine.base import Finished, GenerationTimes, Progress, TokenDelta


@dataclass(slots=True)
class Usage:
    """What a reply has cost so far. Times are the engine's, in seconds, and are filled in when the reply ends."""

    prompt_tokens: int
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of those that were drafted


class UsageMeter:
    """Keeps the `usage` of one reply up to date.

    A token counts as reasoning if its text became reasoning. Tokens without text of their own (part of a
    character, or of what may still become a marker) count with the event that follows them.
    """

    def __init__(self, prompt_tokens: int, special_tokens: Container[int]) -> None:
        self.usage = Usage(prompt_tokens)
        self._special_tokens = special_tokens
        self._pending = 0  # tokens since the last event or marker: they belong to whatever comes next
        self._incomplete = 0  # of these, the tokens of a character that is not complete yet

    def note_progress(self, progress: Progress) -> None:
        """Note what prefill found in the cache."""
        self.usage.cached_tokens = progress.cached

    def count(self, delta: TokenDelta, events: Sequence[Event], *, was_reasoning: bool) -> None:
        """Count one token and the events it caused; `was_reasoning` is the parser's state before it."""
        usage = self.usage
        usage.completion_tokens += 1
        if any(isinstance(event, ReasoningDelta) for event in events):
            usage.reasoning_tokens += 1 + self._pending
            self._pending = 0
        elif events or delta.token in self._special_tokens:
            # A marker cuts off an incomplete character, which would have been reasoning.
            usage.reasoning_tokens += self._incomplete if was_reasoning else 0
            self._pending = 0
        else:
            self._pending += 1
        self._incomplete = 0 if delta.text else self._incomplete + 1

    def finish(self, finished: Finished, *, was_reasoning: bool) -> None:
        """Take the engine's last figures, and count a character that the end has cut."""
        usage = self.usage
        usage.cached_tokens = finished.cached_tokens
        usage.queue_seconds = finished.queue_seconds
        usage.prefill_seconds = finished.prefill_seconds
        usage.decode_seconds = finished.decode_seconds
        usage.drafted_tokens = finished.drafted_tokens
        usage.accepted_tokens = finished.accepted_tokens
        usage.reasoning_tokens += self._incomplete if was_reasoning else 0

    def take_times(self, times: GenerationTimes) -> None:
        """Take the times of a generation that the engine did not finish: it was cut short, cancelled or failed."""
        self.usage.queue_seconds = times.queue
        self.usage.prefill_seconds = times.prefill
        self.usage.decode_seconds = times.decode
