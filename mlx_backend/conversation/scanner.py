"""Cut text at markers, and tell which end of it may still become one.

Knows strings only: neither what a marker means nor that the text comes from a stream. It keeps nothing
between calls, so the caller puts what was held back in front of the next text. What is held is always
shorter than the longest marker, and it is looked at once per call: the work is linear in the text, however
it is chunked.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


CONTROL = "\ufdd1"
"""Stands before a control token that is only a part of a marker: a noncharacter, which no text may hold."""


class MarkerSet:
    """A set of markers to look for at once. Immutable; make one per state of a reader, not one per stream.

    `touches(text)` is the cheap question for the common case: False means that `text` neither holds nor
    begins a marker, nor holds any of the `watched` characters, which a reader may want to see for other
    reasons.
    """

    __slots__ = ("_longest", "_pattern", "_prefixes", "_start", "markers", "touches")

    def __init__(self, markers: Iterable[str] = (), *, watched: str = "") -> None:
        self.markers = frozenset(markers)
        self._prefixes = frozenset(marker[:size] for marker in self.markers for size in range(1, len(marker)))
        self._longest = max(map(len, self.markers), default=1)
        starts = {marker[0] for marker in self.markers}
        longest_first = sorted(self.markers, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._start = _any_of(starts)
        self.touches: Callable[[str], object]
        if starts or watched:
            self.touches = _any_of(starts | set(watched)).search
        else:
            self.touches = frozenset[str]().__contains__

    def cut(self, text: str, *, is_end: bool = False) -> tuple[str, str, str]:
        """Return the text before the first marker, the marker, and what follows it.

        Where there is no whole marker, it is "" and the third part is the end of the text that may still
        become one. So is a marker that may become a longer one, or that one may hold which began earlier, unless this
        is the end of the text.
        """
        begun = len(text) if is_end else self._begun(text)
        if (found := self._pattern.search(text)) and found.start() < begun:
            return text[: found.start()], found[0], text[found.end() :]
        return text[:begun], "", text[begun:]

    def _begun(self, text: str) -> int:
        """Return where the first marker begins that the end of a text may still become; its length if none does."""
        at = max(0, len(text) - self._longest + 1)
        while (found := self._start.search(text, at)) is not None:
            at = found.start()
            if text[at:] in self._prefixes:
                return at
            at += 1
        return len(text)

    def without(self, markers: Iterable[str]) -> MarkerSet:
        """Return the set less these."""
        return MarkerSet(self.markers.difference(markers))


def _any_of(characters: set[str]) -> re.Pattern[str]:
    return re.compile(f"[{re.escape(''.join(sorted(characters)))}]" if characters else r"(?!)")


NO_MARKERS = MarkerSet()
