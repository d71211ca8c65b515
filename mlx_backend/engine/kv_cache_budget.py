"""How much memory the sequences of an engine may take: what is set aside for their caches, and whether more fits.

Beside its caches a prompt needs working memory while a chunk of it is computed. If that does not fit, cached prefixes
are dropped and chunks get shorter; a prompt is refused only if not even the shortest chunk has room. The same is done
while the system is short of memory, for whatever reason: it may then be about to stop this process, or itself.

Counts tokens by a cost function and reserves bytes on the device; knows no MLX and no caches.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from mlx_backend.device.memory import format_bytes, step_margin
from mlx_backend.errors import EngineBusy, EngineRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mlx_backend.device.memory import MemoryReservation
    from mlx_backend.device.pressure import Pressure

RETRY_AFTER = 10  # seconds, where other models leave no memory for a request
MIN_CHUNK = 8  # tokens, below which shorter chunks save little
MAX_PRESSED_CHUNK: dict[Pressure, int] = {"warning": 512, "critical": 128}  # tokens
MAX_TOKENS = 1 << 30  # of any sequence


class KVCacheBudget:
    """The memory set aside for each sequence of one engine, and for prefixes that are cached.

    `cost` gives the bytes of one sequence's caches for a number of tokens, and `chunk_bytes` the working memory of a
    chunk of so many tokens that ends at a position. Sequences that are decoded together, those of one adapter, are
    padded to the longest of them, but to no more than `max_padded` tokens. `pressure` says how short of memory the
    system is.
    """

    def __init__(
        self,
        reservation: MemoryReservation,
        cost: Callable[[int], int],
        *,
        max_padded: int,
        chunk_bytes: Callable[[int, int], int] = lambda _tokens, _end: 0,
        pressure: Callable[[], Pressure] = lambda: "none",
    ) -> None:
        self._reservation = reservation
        self._cost = cost
        self._chunk_bytes = chunk_bytes
        self._pressure = pressure
        self._max_padded = max_padded
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
        needed, room = self._needed(tokens), self.room
        if needed <= room:
            return
        max_room, limit = self.max_room, format_bytes(self.limit)
        if needed > max_room:
            raise EngineRefused(
                f"{subject} would need {format_bytes(needed)} of memory for its cache; the model leaves "
                f"{format_bytes(max(0, max_room))} of {limit}, enough for {self._fitting_tokens(max_room)} tokens of "
                "prompt and reply together. Ask for fewer tokens, or raise the memory limit."
            )
        raise EngineBusy(
            f"{subject} would need {format_bytes(needed)} of memory for its cache; other models' work leaves "
            f"{format_bytes(max(0, room))} of {limit} now, enough for {self._fitting_tokens(room)} tokens of prompt "
            f"and reply together. Try again in {RETRY_AFTER} s.",
            RETRY_AFTER,
        )

    def fitting_tokens(self) -> int:
        """Return how many tokens, of prompt and reply together, a request can have now. Callable from any thread."""
        return self._fitting_tokens(self.room)

    def fitting_chunk(self, start: int, tokens: int) -> int:
        """Return `tokens`, or how many fewer a chunk from position `start` has to have to fit into working memory."""
        room = self.room - self.used + self._margin
        tokens = min(tokens, MAX_PRESSED_CHUNK.get(self._pressure(), tokens))
        while tokens > MIN_CHUNK and self._chunk_bytes(tokens, start + tokens) > room:
            tokens = max(MIN_CHUNK, tokens // 2)
        return tokens

    def prefix_room(self, start: int = 0, tokens: int = 0) -> int:
        """Return the bytes that cached prefixes may take, beside a chunk of so many tokens from position `start`."""
        if self._pressure() == "critical":
            return 0
        return max(0, self.room - self.used - self._beyond_margin(tokens, start + tokens))

    def fits(self, tokens: int, adapter: str = "") -> bool:
        """Whether there is room for one more sequence of so many tokens."""
        every = [*self._sequences.values(), (adapter, tokens)]
        longest = max(each for _, each in every)
        return self._total(every) + self._beyond_margin(MIN_CHUNK, longest) <= self.room

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

    @property
    def _margin(self) -> int:
        return step_margin(self.limit)

    def _beyond_margin(self, tokens: int, end: int) -> int:
        """Return the bytes of a chunk's working memory for which the limit's margin is not enough."""
        return max(0, self._chunk_bytes(tokens, end) - self._margin)

    def _needed(self, tokens: int) -> int:
        return self._cost(tokens) + self._beyond_margin(MIN_CHUNK, tokens)

    def _fitting_tokens(self, room: int) -> int:
        """Return how many tokens of one sequence fit into so many bytes."""
        if self._needed(MAX_TOKENS) <= room:
            return MAX_TOKENS
        return max(0, bisect_right(range(MAX_TOKENS), room, key=self._needed) - 1)

    def _update(self) -> None:
        self._reservation.set_working(self._prefix_bytes + self.used)

    def _total(self, sequences: Iterable[tuple[str, int]]) -> int:
        groups: dict[str, list[int]] = {}
        for adapter, tokens in sequences:
            groups.setdefault(adapter, []).append(tokens)
        return sum(map(self._group_bytes, groups.values()))

    def _group_bytes(self, lengths: Sequence[int]) -> int:
        padded = min(max(lengths), self._max_padded)
        return sum(self._cost(max(tokens, padded)) for tokens in lengths)
