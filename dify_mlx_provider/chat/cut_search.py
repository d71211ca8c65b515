"""Finds the smallest cut with which a history fits: the fewest of its oldest turns, at one of the cuts of `turns`.

What the server counted for one cut predicts the others, in proportion to their estimates; so two or three counts decide
it, and never more than MAX_GUESSES and one for each time that the number of cuts can be halved. A server that does not
count is sent the prompt, and its refusal is what it says of the cut. Knows no server: counts are handed in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_GUESSES = 4
"""Counts that follow the prediction; the others halve what is left."""


class CutSearch:
    """`sizes` are the estimated tokens of the whole prompt with each cut, the smallest cut first."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._too_long = -1  # the largest cut that is known not to suffice
        self._tokens: dict[int, int] = {}
        self._ratio = 1.0

    def tokens(self, cut: int) -> int:
        """Return the tokens of the prompt with a cut: as counted, or as predicted."""
        return self._tokens.get(cut, round(self._sizes[cut] * self._ratio))

    def learn(self, cut: int, tokens: int) -> None:
        """Take note of what the server counted."""
        self._tokens[cut] = tokens
        self.calibrate(self._sizes[cut], tokens)

    def calibrate(self, size: int, tokens: int) -> None:
        """Take note that a prompt of this estimated size had so many tokens."""
        self._ratio = tokens / max(1, size)

    def rule_out(self, cut: int) -> None:
        """Take note that a cut does not suffice, whatever its tokens."""
        self._too_long = max(self._too_long, cut)

    def predict(self, limit: int) -> int:
        """Return the smallest cut that is predicted to fit; the largest one if none is."""
        return self._predict(limit, len(self._sizes))

    def find(self, limit: int, count: Callable[[int], int | None]) -> int:
        """Return the smallest cut that fits by the server's count; the largest one if none does.

        `count` returns the prompt's tokens with a cut, or None if the server cannot say; then the prediction counts.
        """
        fits = len(self._sizes)
        guesses = 0
        while fits - self._too_long > 1:
            if guesses < MAX_GUESSES:
                # A prediction that agrees with what is known already is checked at its border.
                cut = self._predict(limit, fits)
            else:
                cut = (self._too_long + fits) // 2
            guesses += 1
            tokens = count(cut)
            if tokens is None:
                return min(fits, self.predict(limit))
            self.learn(cut, tokens)
            if tokens <= limit:
                fits = cut
            else:
                self.rule_out(cut)
        return min(fits, len(self._sizes) - 1)

    def _predict(self, limit: int, end: int) -> int:
        """The smallest cut before `end` that is predicted to fit; the one before `end` if none is."""
        cuts = range(self._too_long + 1, min(end, len(self._sizes)))
        return next(
            (cut for cut in cuts if self.tokens(cut) <= limit), cuts[-1] if cuts else len(self._sizes) - 1
        )
