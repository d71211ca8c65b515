"""Which addresses images may be fetched from, so that nobody reaches through this server what only it can reach.

Public addresses, and those of hosts and networks that the server's operator names. A name is judged by the addresses
it has at that moment, and the connection is made to one that was judged (fetch.py). Opens no connection.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from ipaddress import IPv4Network

_NAT64 = IPv6Network("64:ff9b::/96")
_LOCAL_NAT64 = IPv6Network("64:ff9b:1::/48")  # of a network's own; what it leads to cannot be known


class AllowedAddresses:
    """Judges addresses. `named` are host names, addresses and networks (10.0.0.0/8) that may be private."""

    def __init__(self, named: Iterable[str] = ()) -> None:
        self._hosts: set[str] = set()
        self._networks: list[IPv4Network | IPv6Network] = []
        for each in named:
            try:
                self._networks.append(ip_network(each.strip("[]"), strict=False))
            except ValueError:
                self._hosts.add(_normal(each))

    def names(self, host: str, address: str) -> bool:
        """Whether the operator has named this host, or this address or a network that holds it."""
        return _normal(host) in self._hosts or any(
            _parse(address).version == network.version and _parse(address) in network
            for network in self._networks
        )

    def allows(self, host: str, address: str) -> bool:
        """Whether this address, which `host` has, may be connected to."""
        return self.names(host, address) or is_public(address)


def is_public(address: str) -> bool:
    """Whether an address belongs to the public internet, as IANA's registries of special addresses say.

    Addresses that carry an IPv4 address inside are public if that is.
    """
    parsed = _parse(address)
    if isinstance(parsed, IPv6Address):
        if parsed in _LOCAL_NAT64:
            return False
        inner = parsed.ipv4_mapped or parsed.sixtofour
        if parsed in _NAT64:
            inner = IPv4Address(parsed.packed[-4:])
        if inner is not None:
            return is_public(str(inner))
        if parsed.is_site_local or parsed.teredo is not None:
            return False
    return parsed.is_global and not (parsed.is_multicast or parsed.is_reserved or parsed.is_unspecified)


def _parse(address: str) -> IPv4Address | IPv6Address:
    return ip_address(address.partition("%")[0])  # without the interface of a link-local address


def _normal(host: str) -> str:
    return host.strip().rstrip(".").casefold()
