"""The address under which other machines reach a server that listens on every address of this one.

Asks the system which address it would send from. Sends nothing, and knows nothing of who listens.
"""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

_EVERY_ADDRESS = ("0.0.0.0", "::", "")
# Documentation's addresses (RFC 5737, 3849): no machine has them, so the way there is the default route.
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
_LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


def reachable_url(url: str, host: str) -> tuple[str, str]:
    """Return the address to show for a server at `url` that was told to listen on `host`, and a remark to follow it."""
    if host not in _EVERY_ADDRESS:
        return url, ""
    scheme, port = url.partition("://")[0], url.rpartition(":")[2]
    families = [socket.AF_INET6, socket.AF_INET] if host == "::" else [socket.AF_INET]
    for family in families:
        if address := own_address(family):
            shown = f"[{address}]" if family is socket.AF_INET6 else address
            return f"{scheme}://{shown}:{port}", " (and every other address of this machine)"
    loopback = f"[{_LOOPBACK[families[0]]}]" if host == "::" else _LOOPBACK[families[0]]
    return (
        f"{scheme}://{loopback}:{port}",
        " (no other address was found: this machine seems to be on no network)",
    )


def own_address(family: socket.AddressFamily) -> str | None:
    """Return this machine's address on its network; None if it has none that others can use."""
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((_ELSEWHERE[family], 9))  # a datagram's socket: nothing is sent
        if _is_usable(address := probe.getsockname()[0]):
            return str(address)
    with suppress(OSError):  # on a network without a way out of it
        for *_, found in socket.getaddrinfo(socket.gethostname(), None, family, socket.SOCK_DGRAM):
            if _is_usable(str(found[0])):
                return str(found[0])
    return None


def _is_usable(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # one with a zone, which is of a single link
        return False
    return not (parsed.is_loopback or parsed.is_unspecified or parsed.is_link_local)
