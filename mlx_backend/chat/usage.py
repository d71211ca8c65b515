"""What a reply costs: its tokens, how many of them were reasoning, and the engine's times.

Counts engine items and the parser's events. Knows no stop strings, no wire format and no clock of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_backend.constraints.reasoning_count import ReasoningCount

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from mlx_backend.conversation.events import Event
    from mlx_backend.engine.base import Finished, GenerationTimes, Progress, TokenDelta


@dataclass(slots=True)
class Usage:
    """What a reply has cost so far. Times are the engine's, in seconds, and are filled in when the reply ends."""

    prompt_tokens: int
    image_tokens: int = 0  # of those of the prompt
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of those that were drafted


class UsageMeter:
    """Keeps the `usage` of one reply up to date. Reasoning is counted as its budget counts it."""

    def __init__(self, prompt_tokens: int, special_tokens: Container[int], *, image_tokens: int = 0) -> None:
        self.usage = Usage(prompt_tokens, image_tokens)
        self._reasoning = ReasoningCount(special_tokens)

    def note_progress(self, progress: Progress) -> None:
        """Note what prefill found in the cache."""
        self.usage.cached_tokens = progress.cached

    def count(
        self, delta: TokenDelta, events: Sequence[Event], *, was_reasoning: bool, is_reasoning: bool
    ) -> None:
        """Count one token and the events it caused; the flags are the parser's, before and after it."""
        self.usage.completion_tokens += 1
        self._reasoning.add(
            delta.token, delta.text, events, was_reasoning=was_reasoning, is_reasoning=is_reasoning
        )
        self.usage.reasoning_tokens = self._reasoning.counted

    def finish(self, finished: Finished, *, is_reasoning: bool) -> None:
        """Take the engine's last figures, and count a character that the end has cut."""
        usage = self.usage
        usage.cached_tokens = finished.cached_tokens
        usage.queue_seconds = finished.queue_seconds
        usage.prefill_seconds = finished.prefill_seconds
        usage.decode_seconds = finished.decode_seconds
        usage.drafted_tokens = finished.drafted_tokens
        usage.accepted_tokens = finished.accepted_tokens
        self._reasoning.close(is_reasoning=is_reasoning)
        usage.reasoning_tokens = self._reasoning.counted

    def take_times(self, times: GenerationTimes) -> None:
        """Take the times of a generation that the engine did not finish: it was cut short, cancelled or failed."""
        self.usage.queue_seconds = times.queue
        self.usage.prefill_seconds = times.prefill
        self.usage.decode_seconds = times.decode
