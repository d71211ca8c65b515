"""What this process holds in memory because of its clients: what they have sent, and what they have not read yet.

Each of the two may be `most` bytes; half of that for the clients of one network, which have one owner. The network of a
proxy, "", has many and is counted in the total alone. Knows numbers; no sockets and no requests.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Receiver(Protocol):
    """Who has answers to read, in bytes."""

    network: str
    total_outbufs_len: int


class HeldBytes:
    """The bytes of bodies that are not answered, and the rule for those that wait for readers. For any thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._of_one = most // 2
        self._guard = threading.Lock()
        self._bodies: Counter[str] = Counter()

    def hold(self, network: str, more: int) -> bool:
        """Count more bytes of bodies, or fewer; return whether all together or this network's are too much."""
        with self._guard:
            self._bodies[network] += more
            if not (of_network := self._bodies[network]):
                del self._bodies[network]
            return self._bodies.total() > self._most or (bool(network) and of_network > self._of_one)

    def has_room_for(self, count: int, network: str, readers: Iterable[Receiver]) -> bool:
        """Whether so many bytes more may wait for a reader in this network."""
        return count <= self._of_one and not (network and _unread(readers)[network] + count > self._of_one)

    def too_slow[R: Receiver](self, readers: Iterable[R]) -> Iterator[R]:
        """Yield those who have the most to read, of the network with the most, until the rest is not too much."""
        waiting = sorted(readers, key=lambda each: each.total_outbufs_len)
        unread = _unread(waiting)
        while unread.total() > self._most or any(
            network and count > self._of_one for network, count in unread.items()
        ):
            [(network, _)] = unread.most_common(1)
            largest = waiting.pop(max(at for at, each in enumerate(waiting) if each.network == network))
            unread[network] -= largest.total_outbufs_len
            yield largest


def _unread(readers: Iterable[Receiver]) -> Counter[str]:
    unread: Counter[str] = Counter()
    for reader in readers:
        unread[reader.network] += reader.total_outbufs_len
    return unread
