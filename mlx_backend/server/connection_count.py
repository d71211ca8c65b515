"""How many connections there are from where: from one address, or IPv6 network, only so many may come.

Belongs to the thread that receives. Knows addresses, no sockets.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from mlx_backend.server.client_address import network_of

if TYPE_CHECKING:
    from mlx_backend.server.client_address import TrustedProxies


class ConnectionCount:
    """Counts connections by where they come from. Those of a trusted proxy are many clients', and not limited."""

    def __init__(self, most: int, proxies: TrustedProxies) -> None:
        self._most = most
        self._proxies = proxies
        self._of_network: Counter[str] = Counter()

    def add(self, address: str) -> bool:
        """Count a connection; False if there are too many from there."""
        network = network_of(address)
        self._of_network[network] += 1
        return self._of_network[network] <= self._most or self._proxies.include(address)

    def of(self, address: str) -> int:
        """Return how many there are from there; from a trusted proxy each is a client of its own."""
        return 1 if self._proxies.include(address) else self._of_network[network_of(address)]

    def remove(self, address: str) -> None:
        """Count a connection no longer."""
        network = network_of(address)
        self._of_network[network] -= 1
        if not self._of_network[network]:
            del self._of_network[network]
