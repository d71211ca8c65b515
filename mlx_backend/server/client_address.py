"""The address a request comes from, and what counts as one client of those that send no key of their own.

Behind a reverse proxy every connection is the proxy's. Those that the operator trusts say in X-Forwarded-For for whom
they connect; anybody else could write there what they like, and is not asked. Knows addresses as texts, no sockets.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_backend.declaration import Network

_IPV6_PREFIX = 64
"""Bits that a network assigns; a client that has one such address has all of them."""


@dataclass(frozen=True, slots=True)
class TrustedProxies:
    """The reverse proxies whose X-Forwarded-For is believed."""

    networks: tuple[Network, ...] = ()

    def include(self, address: str) -> bool:
        """Whether an address is that of a trusted proxy."""
        parsed = _parsed(address) if self.networks else None
        return parsed is not None and any(parsed in network for network in self.networks)

    def client_address(self, peer: str, forwarded_for: str) -> str:
        """Return the address a request comes from: the connection's, or the nearest that no trusted proxy has.

        `forwarded_for` is the header's value. Each proxy appends whom it was called by, so it is read from its end.
        """
        address = peer
        for hop in reversed(forwarded_for.split(",")):
            named = _parsed(_without_port(hop.strip()))
            if named is None or not self.include(address):
                break
            address = str(named)
        return address


def network_of(address: str) -> str:
    """Return what an address shares with the client's other addresses: itself, or the network of an IPv6 address."""
    parsed = _parsed(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((parsed, _IPV6_PREFIX), strict=False))
    return address if parsed is None else str(parsed)


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return an address, IPv4 also where a socket for both shows it as IPv6; None for what is none."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return parsed if mapped is None else mapped


def _without_port(hop: str) -> str:
    """Return the address of `192.0.2.7:5000` or `[2001:db8::1]:5000`, as some proxies write it."""
    if hop.startswith("["):
        return hop[1:].partition("]")[0]
    return hop.partition(":")[0] if hop.count(":") == 1 else hop
