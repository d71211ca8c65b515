"""Whether a reply repeats itself without end: the same run of tokens, again and again, up to its last token.

A reply does if its last `limit` tokens are one run of tokens, MIN_REPEATS times over or more often; with a smaller
limit than that, if they are one token.

Theory of operation
-------------------
Looked at every `_STEP` tokens, newest token first, as a string with one character for each: so Python's own search does
the work, in linear time. The run is as long as the distance at which the newest tokens, as many as the longest run has,
stand again: among its own repeats a run stands nowhere else.
"""

from __future__ import annotations

MIN_REPEATS = 4
_STEP = 64
_CHARACTERS = 0x110000


class RepetitionGuard:
    """Follows one reply, token by token. A limit of 0 finds nothing."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._newest = ""  # token first
        self._added: list[int] = []

    def add(self, token: int) -> int | None:
        """Take the next token; return how many tokens the reply has come to repeat, None if it does not."""
        self._added.append(token)
        if len(self._added) < _STEP:
            return None
        added = "".join([chr(token % _CHARACTERS) for token in reversed(self._added)])
        self._added.clear()
        text = self._newest = (added + self._newest)[: self._limit]
        if not self._limit or len(text) < self._limit:
            return None
        longest = max(1, self._limit // MIN_REPEATS)
        run = text.find(text[:longest], 1, 2 * longest)
        return run if run > 0 and text.startswith(text[run:]) else None
