"""How much memory a model's caches take, and whether there is room for a request.

Everything is counted from shapes and lengths, nothing from what happens to be allocated, so the same requests
are admitted in the same order every time and on every machine of a group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_backend.errors import EngineBusy, EngineError, EngineRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CACHE_SHARE = 0.25  # of what the model leaves, for prefixes that are kept
MARGIN = 0.05  # of the limit, for what a step computes in between
BUSY_SECONDS = 10  # until somebody tries again for whom other models leave no memory


_HOLDINGS: dict[Any, int] = {}  # what the engines of this process take, in bytes, by their ledgers
_WEIGHTS: dict[Any, int] = {}  # what of that they take for as long as they are there


class Ledger:
    """Who has how much set aside. Rows that are decoded together are padded to the longest of them.

    Several engines of one process share the limit: what the others take is no room here.
    """

    def __init__(self, limit: int, weights: int, cost: Callable[[int], int], *, padded: bool) -> None:
        self._cost = cost
        self._padded = padded
        self._limit = limit
        self._weights = weights
        self._kept = 0
        self._rows: dict[int, tuple[str, int]] = {}
        _WEIGHTS[self] = weights
        self._declare()

    @property
    def room(self) -> int:
        """The bytes there are now for caches, prefixes that are kept among them."""
        return self._left_by(_HOLDINGS)

    @property
    def most_room(self) -> int:
        """The bytes there would be if the others, whose models are in memory too, had nothing to do."""
        return self._left_by(_WEIGHTS)

    def _left_by(self, takings: Mapping[Any, int]) -> int:
        others = sum(taken for holder, taken in list(takings.items()) if holder is not self)
        return int(self._limit * (1 - MARGIN)) - self._weights - others

    def keeps(self, nbytes: int) -> None:
        """Note how much the prefixes take that are kept."""
        if nbytes != self._kept:
            self._kept = nbytes
            self._declare()

    def close(self) -> None:
        """Take nothing any more."""
        _HOLDINGS.pop(self, None)
        _WEIGHTS.pop(self, None)

    def _declare(self) -> None:
        _HOLDINGS[self] = self._weights + self._kept + self.used

    @property
    def used(self) -> int:
        """The bytes that are set aside."""
        return self._total(self._rows.values())

    def check(self, tokens: int, what: str) -> None:
        """Refuse what could not be run even alone, or not while the others have so much to do."""
        needed, most, now = self._cost(tokens), self.most_room, self.room
        if needed > most:
            raise EngineRefused(
                f"{what} would need {size(needed)} of memory for its cache; the model leaves "
                f"{size(max(0, most))} of {size(self._limit)}. Ask for fewer tokens, or "
                "raise the memory limit."
            )
        if needed > now:
            raise EngineBusy(
                f"{what} would need {size(needed)} of memory for its cache; other models' work leaves "
                f"{size(max(0, now))} of {size(self._limit)} now. Try again in {BUSY_SECONDS} s.",
                BUSY_SECONDS,
            )

    def fits(self, tokens: int, space: str = "") -> bool:
        """Whether one more row of so many tokens has room."""
        return self._total([*self._rows.values(), (space, tokens)]) <= self.room

    def reserve(self, key: int, tokens: int, space: str = "") -> None:
        """Set memory aside, or change how much is."""
        self._rows[key] = (space, tokens)
        self._declare()

    def reserved(self, key: int) -> int:
        """Return for how many tokens memory has been set aside."""
        return self._rows[key][1]

    def release(self, key: int) -> None:
        """Give back what was set aside."""
        if self._rows.pop(key, None) is not None:
            self._declare()

    def _total(self, rows: Any) -> int:
        if not self._padded:
            return sum(self._cost(tokens) for _, tokens in rows)
        spaces: dict[str, list[int]] = {}
        for space, tokens in rows:
            spaces.setdefault(space, []).append(tokens)
        return sum(len(lengths) * self._cost(max(lengths)) for lengths in spaces.values())


class Holding:
    """What something beside the engines takes of the limit: its weights, and for a while what it computes."""

    def __init__(self, limit: int, weights: int, name: str) -> None:
        """Raise EngineError if the weights alone are too much."""
        self._limit = limit
        self._weights = weights
        if weights > limit:
            raise EngineError(f"{name!r} takes {size(weights)} of memory, and {size(limit)} is the limit.")
        _HOLDINGS[self] = _WEIGHTS[self] = weights

    def works(self, nbytes: int) -> None:
        """Note what is being computed (0: nothing). Raises EngineRefused for what could not be even alone."""
        if self._weights + nbytes > self._limit:
            raise EngineRefused(
                f"So much text at once would need {size(nbytes)} of memory; the model leaves "
                f"{size(self._limit - self._weights)} of {size(self._limit)}. Send shorter texts."
            )
        if self in _HOLDINGS:  # what was begun may end only after the model has left
            _HOLDINGS[self] = self._weights + nbytes

    def close(self) -> None:
        """Take nothing any more."""
        _HOLDINGS.pop(self, None)
        _WEIGHTS.pop(self, None)


def size(count: int) -> str:
    """Write a number of bytes for people."""
    for unit, name in ((1 << 30, "GB"), (1 << 20, "MB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count / 1024:.3g} KB"
