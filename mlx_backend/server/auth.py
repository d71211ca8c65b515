"""Who sends a request: the API key it carries, which is never repeated to anybody, and the address it comes from.

Behind a reverse proxy every connection is the proxy's. Those that the operator trusts say in X-Forwarded-For for whom
they connect; anybody else could write there what they like, and is not asked.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_backend.api.errors import ApiError
from mlx_backend.engine.base import QueueClient

if TYPE_CHECKING:
    from werkzeug import Request

    from mlx_backend.declaration import Network
    from mlx_backend.server.api_keys import ApiKey, ApiKeys

_IPV6_PREFIX = 64
"""Bits that a network assigns; a client that has one such address has all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """The sender of a request. Without `is_allowed` a key is needed, and the right one was not sent."""

    address: str = ""
    key: ApiKey | None = None
    is_allowed: bool = True

    @property
    def key_name(self) -> str:
        """The key's name; empty without one."""
        return self.key.name if self.key is not None else ""

    @property
    def share(self) -> str:
        """What requests have in common that share one client's part of the server: a key of its own, or an address."""
        if self.key is None or self.key.is_shared:
            return f"address {network_of(self.address)}"
        return f"key {self.key.name}"

    @property
    def in_queue(self) -> QueueClient:
        """The client as engines know it."""
        has_own_key = self.key is not None and not self.key.is_shared
        return QueueClient(self.share, self.key.priority if self.key is not None and has_own_key else None)


def identify(request: Request, keys: ApiKeys, address: str) -> Client:
    """Return who sends a request, by its key: `Authorization: Bearer …` or `x-api-key`."""
    if not keys.are_required:
        return Client(address=address)
    # WSGI decodes header bytes as Latin-1; the key was typed, so its bytes are UTF-8.
    key = keys.find(_given_key(request).encode("latin-1", "replace"))
    return Client(address=address, key=key, is_allowed=key is not None)


def check(request: Request, client: Client) -> None:
    """Raise a 401 unless the client is allowed."""
    if client.is_allowed:
        return
    given = _given_key(request)
    raise ApiError(
        401,
        "The API key is wrong." if given else "An API key is needed: send it as 'Authorization: Bearer KEY'.",
        code="invalid_api_key",
        headers=(("WWW-Authenticate", "Bearer"),),
    )


def _given_key(request: Request) -> str:
    # Not request.authorization: of a key with "=" inside it makes parameters, and the key is lost.
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = request.headers.get("x-api-key", "")
    return given.strip()


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
