"""Which host names the server answers to, so that no web page reaches it under a name of its own (DNS rebinding).

A browser lets a page read what comes from the page's own name. Anyone who owns a name can point it at 127.0.0.1 after
the page is loaded, and then the page's own name is this server. So a request must name the server by an address, by a
name that no stranger can register, or by one that the operator has allowed.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING

from mlx_backend.api.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from werkzeug import Request

_LOCAL_ENDINGS = (".localhost", ".local", ".internal", ".home.arpa")
"""Names that nobody can register: RFC 6761, 6762 and 8375, and `.internal` (ICANN, 2024), which Docker uses."""


class AllowedHosts:
    """The names in a request's Host header that are answered; `*` is all of them."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = {name.lower().rstrip(".") for name in allowed}
        self._own = socket.gethostname().lower()

    def check(self, request: Request) -> None:
        """Raise a 403 for a name that is not allowed. A request that names no host (HTTP/1.0) is no browser's."""
        host = request.environ.get("HTTP_HOST", "")
        name = _name_of(host)
        if not host or "*" in self._allowed or name in self._allowed or name == self._own or _is_local(name):
            return
        shown = name[:100]
        raise ApiError(
            403,
            f"This server does not answer to the name {shown!r}: start it with --allowed-host {shown}, or use its "
            "address.",
        )


def _name_of(host: str) -> str:
    """Return the host without its port, in lower case."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0].lower().rstrip(".") if ":" in host else host.lower().rstrip(".")


def _is_local(name: str) -> bool:
    if "." not in name or name.endswith(
        _LOCAL_ENDINGS
    ):  # a name of one part is a container's or a neighbour's
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
