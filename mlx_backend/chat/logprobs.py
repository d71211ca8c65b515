"""Log probabilities beside the text they belong to: held until that text is shown, dropped if it is not content.

Knows tokens and events. How log probabilities look on the wire is api/'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_backend.conversation.events import ContentDelta

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from mlx_backend.conversation.events import Event
    from mlx_backend.engine.base import Logprobs, TokenDelta


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token of the answer and how likely it was."""

    token: int
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class ContentLogprobs:
    """The tokens of the content delta that comes next."""

    tokens: tuple[TokenLogprobs, ...]


class LogprobsAligner:
    """Assigns each token's log probabilities to the content delta that shows its text."""

    def __init__(self, special_tokens: Container[int]) -> None:
        self._special_tokens = special_tokens
        self._held: list[TokenLogprobs] = []

    def hold(self, delta: TokenDelta, events: Sequence[Event]) -> None:
        """Hold a token's log probabilities, or drop all that are held if it turned out not to be content."""
        if delta.logprobs is None:
            return
        # No event yet: part of a character, or of what may still become a marker.
        undecided = not events and delta.token not in self._special_tokens
        if undecided or any(isinstance(event, ContentDelta) for event in events):
            self._held.append(TokenLogprobs(delta.token, delta.logprobs))
        else:
            self._held.clear()

    def take(self) -> ContentLogprobs | None:
        """Return what belongs to the content delta that is about to be shown."""
        if not self._held:
            return None
        taken = ContentLogprobs(tuple(self._held))
        self._held.clear()
        return taken
