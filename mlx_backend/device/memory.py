"""The memory that the models of one device share: a limit, and what each model has reserved of it.

Everything is counted from shapes and lengths, never from what happens to be allocated, so the same requests are
admitted in the same order every time and on every machine of a group. Knows neither caches nor requests.

Other models may have the memory of what a model has only cached (`cached`), for possible use later. A model that lacks
memory asks for it, the models that have cached something are notified (`on_change`), and each evicts its own on its own
thread. The model that asked is notified when memory has been freed, and asks again if that was too little.

A model whose weights do not fit is refused in words (`too_large`): both sizes, and what can be done.
"""

from __future__ import annotations

import math
import threading
from functools import cached_property
from typing import TYPE_CHECKING

from mlx_backend.byte_cache import CacheBudget
from mlx_backend.device.machine import this_machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from mlx_backend.device.machine import Machine, Pressure

WORKING_SET_SHARE = 0.9
"""Share of what the device recommends, for models and caches together."""
RAM_SHARE = 0.7
"""Share of the machine's memory, where the device recommends nothing."""
MARGIN = 0.05
"""Share of the limit for what is neither weights nor KV caches: the host's caches, and a step's working memory."""
HOST_CACHE_SHARE, MAX_HOST_CACHE_BYTES = 0.01, 512 << 20
"""What of that margin the host's caches may take: a share of the limit, and bytes; more would save no more work."""
_UNITS = ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB"))


def room_for_weights(limit: int) -> int:
    """Return how much of a limit weights may take: more would not leave room for a single step."""
    return int(limit * (1 - MARGIN))


def leaves_room_for_caches(weights: int, room: int) -> bool:
    """Whether weights leave enough of the room for weights to talk with their model for some time."""
    caches = min(max(MIN_FOR_CACHES, int(weights * CACHES_SHARE)), MAX_FOR_CACHES)
    return weights + caches <= room


def host_cache_bytes(limit: int) -> int:
    """Return how much of a limit the caches outside of MLX's memory may take: of texts, grammars and tokens."""
    return min(int(limit * HOST_CACHE_SHARE), MAX_HOST_CACHE_BYTES)


def step_margin(limit: int) -> int:
    """Return how much of a limit is left for the intermediate results of a step, without being reserved for one."""
    return limit - room_for_weights(limit) - host_cache_bytes(limit)


class MemoryBudget:
    """The bytes that models, caches and intermediate results may take together. Safe to use from any thread.

    `pressure` says how short of memory the system is, for whatever reason, and `used` how many bytes are allocated.
    """

    def __init__(
        self,
        limit: int | Callable[[], int],
        pressure: Callable[[], Pressure] = lambda: "none",
        used: Callable[[], int] = lambda: 0,
    ) -> None:
        self._limit = limit
        self.pressure = pressure
        self.used = used
        self._reservations: list[MemoryReservation] = []
        self._guard = threading.Lock()

    @cached_property
    def limit(self) -> int:
        """The limit in bytes; a callable is called the first time."""
        return self._limit if isinstance(self._limit, int) else self._limit()

    @cached_property
    def host_caches(self) -> CacheBudget:
        """What the caches of all models outside of MLX's memory share. It is set aside, however much of it is used."""
        return CacheBudget(lambda: host_cache_bytes(self.limit))

    @property
    def reserved(self) -> int:
        """The bytes that all models have reserved."""
        return sum(each.total for each in self._open())

    def reserve(self, weights: int, *, limit: int | None = None) -> MemoryReservation:
        """Reserve memory for a model's weights, until the reservation is closed.

        `limit` replaces the budget's for this model, where it has been given one of its own.
        """
        reservation = MemoryReservation(self, weights, self.limit if limit is None else limit)
        with self._guard:
            self._reservations.append(reservation)
        reservation.ask_for_excess()
        return reservation

    def others(self, reservation: MemoryReservation) -> list[MemoryReservation]:
        """Return the other open reservations."""
        return [each for each in self._open() if each is not reservation]

    def release(self, reservation: MemoryReservation) -> None:
        """Forget a reservation. Idempotent."""
        with self._guard:
            if reservation not in self._reservations:
                return
            self._reservations.remove(reservation)
        self.on_freed(reservation, reservation.total)

    def on_freed(self, reservation: MemoryReservation, nbytes: int) -> None:
        """Notify the models that have asked for memory: this reservation takes `nbytes` less."""
        for other in self.others(reservation):
            with self._guard:
                has_asked = other.asked > 0
                other.asked = max(0, other.asked - nbytes)
            if has_asked:
                other.on_change()

    def set_asked(self, reservation: MemoryReservation, nbytes: int) -> None:
        """Note how many bytes a reservation needs of others."""
        with self._guard:  # or `on_freed`, on another thread, may write back what it was before
            reservation.asked = nbytes

    def _open(self) -> list[MemoryReservation]:
        with self._guard:
            return list(self._reservations)


class MemoryReservation:
    """What one model takes: its weights for as long as it is loaded, and `working` bytes that vary.

    `cached` of these are given up when other models need them. `asked` is how many bytes this model still needs from
    others: each `ask` replaces it, and what others free is taken off it. `on_change` is called, on any thread, when
    others need memory, and when they have freed some that was asked for.
    """

    def __init__(self, budget: MemoryBudget, weights: int, limit: int) -> None:
        self._budget = budget
        self.weights = weights
        self.limit = limit
        self.working = self.cached = self.asked = 0
        self.on_change: Callable[[], None] = _ignore

    @property
    def total(self) -> int:
        """The bytes that are reserved now."""
        return self.weights + self.working

    @property
    def room(self) -> int:
        """The bytes that are left now by this model's weights and the other models, `working` included."""
        return self._left_by(each.total for each in self._budget.others(self))

    @property
    def reclaimable_room(self) -> int:
        """The bytes that would be left if the other models gave up what they have only cached."""
        return self._left_by(each.total - each.cached for each in self._budget.others(self))

    @property
    def max_room(self) -> int:
        """The bytes that would be left if the other models, which stay loaded, were idle."""
        return self._left_by(each.weights for each in self._budget.others(self))

    @property
    def needed_by_others(self) -> int:
        """How many of the cached bytes others have asked for."""
        return min(self.cached, sum(each.asked for each in self._budget.others(self)))

    def set_weights(self, nbytes: int) -> None:
        """Set how much the weights take, before they are read; others give up what they have cached meanwhile."""
        freed, self.weights = self.weights - nbytes, nbytes
        if freed > 0:
            self._budget.on_freed(self, freed)
        self.ask_for_excess()

    def set_working(self, nbytes: int, cached: int = 0) -> None:
        """Set how much is reserved in addition to the weights, and how much of that is only cached.

        Without effect once the reservation is closed.
        """
        freed, self.working, self.cached = self.working - nbytes, nbytes, cached
        if freed > 0:
            self._budget.on_freed(self, freed)

    def ask(self, nbytes: int) -> None:
        """Ask the other models to give up `nbytes` that they have cached; they do so soon, if they have them.

        It does not hear of what was freed just before: look at `room` again before waiting.
        """
        self._budget.set_asked(self, nbytes)
        for other in self._budget.others(self):
            if other.cached:
                other.on_change()

    def withdraw(self) -> None:
        """Need nothing of the others any more."""
        if self.asked:
            self._budget.set_asked(self, 0)

    def ask_for_excess(self) -> None:
        """Ask the others for as much as all models together take beyond the limit."""
        if (excess := self._budget.reserved - room_for_weights(self.limit)) > 0:
            self.ask(excess)

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self._budget.release(self)

    def _left_by(self, others: Iterable[int]) -> int:
        return room_for_weights(self.limit) - self.weights - sum(others)


def _ignore() -> None:
    pass


def format_bytes(count: int) -> str:
    """Write bytes of memory for people, in the units that memory is sold in: 16 GB are 16 · 1024³ bytes.

    What is no whole number has three digits, so that 15.0 GB stands next to 11.3 GB.
    """
    unit, name = next((each for each in _UNITS if count >= each[0]), _UNITS[-1])
    value = count / unit
    return f"{value:.0f} {name}" if count % unit == 0 or value >= 100 else f"{value:#.3g} {name}"


MIN_FOR_THE_REST = 2 << 30
"""Bytes that macOS and other programs cannot do without."""
MIN_FOR_CACHES, MAX_FOR_CACHES, CACHES_SHARE = 1 << 30, 2 << 30, 0.15
"""What a model that is recommended leaves for caches: a share of its weights, within bounds in bytes."""
_WIRED_STEP = 512
"""Megabytes to which a limit for macOS is rounded up."""


def too_large(
    name: str,
    weights: int,
    limit: int,
    *,
    is_given: bool,
    smaller: Sequence[tuple[str, int]] = (),
    machine: Machine | None = None,
) -> str:
    """Say that `weights` bytes do not fit within `limit`, which is for models and caches together.

    `is_given`: the limit is that of --memory-gb, not what the system recommends. `smaller` are models by name with
    the bytes of their weights, the best first; the first that fits is named.
    """
    machine = machine or this_machine()
    room = room_for_weights(limit)
    needed = math.ceil(weights / (1 - MARGIN) / (1 << 30))  # as --memory-gb
    parts = [f"The model {name!r} needs {format_bytes(weights)} of memory for its weights alone,"]
    if is_given:
        parts.append(f"and --memory-gb {limit / (1 << 30):.3g} leaves {format_bytes(room)} for weights.")
    else:
        # Elsewhere the limit may be a GPU's, and the machine's memory another.
        total = f" of the {format_bytes(machine.memory)}" if machine.is_mac else ""
        parts.append(f"and models may use {format_bytes(room)}{total} here.")
    if fitting := [each for each in smaller if leaves_room_for_caches(each[1], room)]:
        parts.append(f"A smaller one that fits: {fitting[0][0]} ({format_bytes(fitting[0][1])}).")
    if machine.is_mac and needed << 30 > machine.memory:
        return " ".join(parts)
    if machine.is_mac and not is_given:
        parts += _advice_for_macs(weights, needed, machine)
    else:
        parts.append(f"If there is more memory, --memory-gb {needed} raises the limit.")
    return " ".join(parts)


def _advice_for_macs(weights: int, needed: int, machine: Machine) -> Iterator[str]:
    """Yield the command that lets the GPU use enough, if enough is left for the rest, and how to insist."""
    megabytes = weights / (1 - MARGIN) / WORKING_SET_SHARE / (1 << 20)
    rounded = _WIRED_STEP * math.ceil(megabytes / _WIRED_STEP)
    rest = machine.memory - (rounded << 20)
    if rest >= MIN_FOR_THE_REST:
        yield (
            f"`sudo sysctl iogpu.wired_limit_mb={rounded}` lets models use enough until the next restart of the "
            f"Mac, and leaves {format_bytes(rest)} for everything else."
        )
    yield f"--memory-gb {needed} loads it regardless; the Mac may then swap, and answer very slowly."
