"""How long a client may take, how much is held for clients, and how many connections there may be.

Numbers, and what the system allows of them; knows no sockets.
"""

from __future__ import annotations

import logging
import resource
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mlx_backend.server.auth import TrustedProxies

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

log = logging.getLogger(__name__)

OTHER_FILES = 192
"""Open files that are no connections: a model's shards, caches on disk, sockets between threads, standard streams."""
MIN_CONNECTIONS = 16


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How long a client may take, and how much may be held for clients. Times in seconds."""

    max_body_bytes: int
    max_head_bytes: int = 64 * 1024
    idle_seconds: float = 60.0
    """Between two requests of a connection, and before its first."""
    websocket_idle_seconds: float = 600.0
    """Between what comes over a WebSocket: an agent keeps it while it runs its tools."""
    head_seconds: float = 15.0
    """From the first byte of a request to the end of its head."""
    body_seconds: float = 300.0
    """For a whole body, however fast it comes."""
    stalled_seconds: float = 20.0
    min_bytes_per_second: int = 16 * 1024
    """A body may take `stalled_seconds`, and one second more for each time that this many bytes were received."""
    unread_seconds: float = 60.0
    min_bytes_read_per_second: int = 128
    """An answer may wait `unread_seconds` for its reader, who earns a second of them back by reading this many bytes.

    A stream has 200 bytes a token and more: who takes less than this is slower than the slowest of models.
    """
    discard_seconds: float = 5.0
    """How long to go on receiving what is refused."""
    max_connections: int = 2048
    max_connections_of_address: int = 1024
    """Or of an IPv6 network, which has one owner."""
    trusted_proxies: TrustedProxies = field(default_factory=TrustedProxies)
    """Their connections are those of many clients, and not limited by address."""
    max_held_bytes: int = 512 << 20
    """Bodies that have arrived and are not answered, altogether. One address may hold half of it.

    So much of answers may wait for their readers, too.
    """


def within_file_limit(limits: ConnectionLimits) -> ConnectionLimits:
    """Raise the soft limit on open files as far as needed and allowed; return limits with as many connections as fit.

    A Mac starts programs with a soft limit of 256. Logs a warning if that is fewer than wanted.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections
    needed = wanted + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with suppress(OSError, ValueError):  # a Mac has a limit of its own next to the hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return limits
    fitting = max(soft - OTHER_FILES, MIN_CONNECTIONS)
    log.warning(
        "The system allows this process %d open files, so at most %d connections are accepted at once; "
        "`ulimit -n %d` before the start allows %d.",
        soft,
        fitting,
        needed,
        wanted,
    )
    return replace(
        limits,
        max_connections=fitting,
        max_connections_of_address=min(limits.max_connections_of_address, (fitting + 1) // 2),
    )


class HeldBytes:
    """The bytes of bodies that are not answered, and the rule for those that wait for readers. For any thread.

    Of each kind there may be `most`; half of that for the clients of one network, which have one owner. The network of
    a proxy, "", has many and is counted in the total alone. A reader is a connection, with its `network` and the
    `total_outbufs_len` that it has yet to read.
    """

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

    def has_room_for(self, count: int, network: str, readers: Iterable[Any]) -> bool:
        """Whether so many bytes more may wait for a reader in this network."""
        return count <= self._of_one and not (network and _unread(readers)[network] + count > self._of_one)

    def too_slow(self, readers: Iterable[Any]) -> Iterator[Any]:
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


def _unread(readers: Iterable[Any]) -> Counter[str]:
    unread: Counter[str] = Counter()
    for reader in readers:
        unread[reader.network] += reader.total_outbufs_len
    return unread
