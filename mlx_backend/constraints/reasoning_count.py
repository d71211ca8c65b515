"""How many tokens of a reply are reasoning: one rule, for what a budget allows and for what the usage reports.

It sees tokens and the events that a parser made of them. It knows no limits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.conversation.events import ReasoningDelta

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from mlx_backend.conversation.events import Event

_REPLACEMENT = "\ufffd"
"""The text of a character that never became complete."""


class ReasoningCount:
    """Counts the tokens of one reply.

    A token counts as reasoning if any of its text became reasoning. Tokens whose text the parser still holds, being
    part of a character or of what may become a marker, are pending. What opens and what closes reasoning does not
    count, in however many tokens it is written: not even a token that opens it and has some of its first words too.
    """

    __slots__ = ("_pending", "_rest", "_special_tokens", "counted")

    def __init__(self, special_tokens: Container[int]) -> None:
        self.counted = 0
        # Texts of tokens; empty for those of a character that is not complete yet.
        self._pending: list[str] = []
        self._rest = ""  # what the parser still holds of a token that was counted
        self._special_tokens = special_tokens

    @property
    def at_most(self) -> int:
        """The tokens that are reasoning if all that are pending turn out to be."""
        return self.counted + len(self._pending)

    def add(
        self, token: int, text: str, events: Sequence[Event], *, was_reasoning: bool, is_reasoning: bool
    ) -> None:
        """Count a token with its text and the events it caused; the flags are the parser's, before and after it."""
        if not was_reasoning:
            return
        shown = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
        if shown == text and text and not self._pending and not self._rest:
            self.counted += 1
            return
        if token in self._special_tokens:
            # The marker cuts a character off, which would have been reasoning.
            self.counted += self._incomplete()
        else:
            self._hold(text)
        if shown:
            self._settle(shown)
        if not is_reasoning:
            self._drop()

    def close(self, *, is_reasoning: bool) -> None:
        """Count a character that the end of the reply has cut."""
        self.counted += self._incomplete() if is_reasoning else 0
        self._drop()

    def _hold(self, text: str) -> None:
        """Hold a token's text. Where it begins with replacement characters, those are of the tokens before it."""
        own = text.lstrip(_REPLACEMENT) or text
        if cut := text[: -len(own)] if text else "":
            if self._pending:
                self._pending[-1] += cut
            else:
                self._rest += cut
        self._pending.append(own)

    def _settle(self, shown: str) -> None:
        """Count the pending tokens of whose text something was shown."""
        held = self._rest + "".join(self._pending)
        end = max(held.find(shown), 0) + len(shown)
        at, number = len(self._rest), 0
        while number < len(self._pending) and at < end:
            at += len(self._pending[number])
            number += 1
        self.counted += number
        self._rest = held[end : max(at, end)]
        del self._pending[:number]

    def _drop(self) -> None:
        self._rest = ""
        self._pending.clear()

    def _incomplete(self) -> int:
        """Return how many of the last pending tokens are of a character that is not complete yet."""
        number = 0
        while number < len(self._pending) and not self._pending[-1 - number]:
            number += 1
        return number
