"""How much memory the KV caches of an engine's sequences may take: what is set aside, and whether more fits.

Counts tokens by a cost function and reserves bytes on the device; knows no MLX and no caches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.device.memory import format_bytes
from mlx_backend.errors import EngineBusy, EngineRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mlx_backend.device.memory import MemoryReservation

RETRY_AFTER = 10  # seconds, where other models leave no memory for a request


class KVCacheBudget:
    """The memory set aside for each sequence of one engine, and for prefixes that are cached.

    `cost` gives the bytes of one sequence's caches for a number of tokens. With `padded`, sequences that are
    decoded together, those of one adapter, are padded to the longest of them.
    """

    def __init__(self, reservation: MemoryReservation, cost: Callable[[int], int], *, padded: bool) -> None:
        self._reservation = reservation
        self._cost = cost
        self._padded = padded
        self._prefix_bytes = 0
        self._sequences: dict[int, tuple[str, int]] = {}

    @property
    def room(self) -> int:
        """The bytes that caches may take now, cached prefixes included."""
        return self._reservation.room

    @property
    def max_room(self) -> int:
        """The bytes that caches could take if the other models, which stay loaded, were idle."""
        return self._reservation.max_room

    @property
    def limit(self) -> int:
        """The bytes that models and caches may take together."""
        return self._reservation.limit

    @property
    def used(self) -> int:
        """The bytes that are set aside for sequences."""
        return self._total(self._sequences.values())

    def set_prefix_bytes(self, nbytes: int) -> None:
        """Note how much the cached prefixes take."""
        if nbytes != self._prefix_bytes:
            self._prefix_bytes = nbytes
            self._update()

    def check(self, tokens: int, subject: str) -> None:
        """Raise EngineRefused for what could not run even alone, EngineBusy while other models need the memory."""
        needed, room = self._cost(tokens), self.room
        if needed <= room:
            return
        max_room, limit = self.max_room, format_bytes(self.limit)
        if needed > max_room:
            raise EngineRefused(
                f"{subject} would need {format_bytes(needed)} of memory for its cache; the model leaves "
                f"{format_bytes(max(0, max_room))} of {limit}. Ask for fewer tokens, or raise the memory limit."
            )
        raise EngineBusy(
            f"{subject} would need {format_bytes(needed)} of memory for its cache; other models' work leaves "
            f"{format_bytes(max(0, room))} of {limit} now. Try again in {RETRY_AFTER} s.",
            RETRY_AFTER,
        )

    def fits(self, tokens: int, adapter: str = "") -> bool:
        """Whether there is room for one more sequence of so many tokens."""
        return self._total([*self._sequences.values(), (adapter, tokens)]) <= self.room

    def reserve(self, key: int, tokens: int, adapter: str = "") -> None:
        """Set memory aside for a sequence, or change how much is."""
        self._sequences[key] = (adapter, tokens)
        self._update()

    def reserved_tokens(self, key: int) -> int:
        """Return for how many tokens of a sequence memory has been set aside."""
        return self._sequences[key][1]

    def release(self, key: int) -> None:
        """Give back what was set aside for a sequence."""
        if self._sequences.pop(key, None) is not None:
            self._update()

    def _update(self) -> None:
        self._reservation.set_working(self._prefix_bytes + self.used)

    def _total(self, sequences: Iterable[tuple[str, int]]) -> int:
        if not self._padded:
            return sum(self._cost(tokens) for _, tokens in sequences)
        groups: dict[str, list[int]] = {}
        for adapter, tokens in sequences:
            groups.setdefault(adapter, []).append(tokens)
        return sum(len(lengths) * self._cost(max(lengths)) for lengths in groups.values())
