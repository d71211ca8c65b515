"""Which connection gives way to a new one when there are too many. Knows connections by address; closes none."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mlx_backend.server.connection_count import ConnectionCount
    from mlx_backend.server.received import Connection


def giving_way(connections: Iterable[Connection], count: ConnectionCount, address: str) -> Connection | None:
    """Return the connection that gives way to a new one of `address`; None if there is none that should.

    One that is idle, or that still sends its request and is of an address with more connections than the new one's; of
    these one of the address with the most. `connections` are in the order in which they came.
    """
    of = cache(count.of)  # an address is taken apart once, not for each of thousands of connections
    found: Connection | None = None
    best = (0, False)
    for connection in connections:
        received = connection.received
        if not received.is_registered or received.is_waiting:  # it is being answered, or about to be
            continue
        rank = of(received.address), received.is_idle
        if rank > best and (received.is_idle or rank[0] > of(address)):
            found, best = connection, rank
    return found
