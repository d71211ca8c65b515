"""Which connection gives way to a new one when there are too many. Knows connections by address; closes none."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mlx_backend.server.received import Connection


def giving_way(
    connections: Iterable[Connection], of_address: Mapping[str, int], address: str
) -> Connection | None:
    """Return the connection that gives way to a new one of `address`; None if there is none that should.

    One that is idle, or that still sends its request and is of an address with more connections than the new one's; of
    these one of the address with the most. `connections` are in the order in which they came, `of_address` says how
    many each address has.
    """
    found: Connection | None = None
    best = (0, False)
    for connection in connections:
        received, count = connection.received, of_address[connection.received.address]
        if not received.is_registered or received.is_waiting:  # it is being answered, or about to be
            continue
        if (count, received.is_idle) > best and (received.is_idle or count > of_address[address]):
            found, best = connection, (count, received.is_idle)
    return found
