"""Which web pages reach the server: under which names it answers, and what pages of other origins may do.

Names (DNS rebinding): a browser lets a page read what comes from the page's own name. Anyone who owns a name can point
it at 127.0.0.1 after the page is loaded, and then the page's own name is this server. So a request must name the server
by an address, by a name that no stranger can register, or by one that the operator has allowed. Names that any
neighbour in a network can take are for servers that neighbours reach anyway, not for one on this machine's own address.

Origins (CORS, and the POSTs that browsers send without asking first): without --cors-origin only pages of the server's
own origin may. Clients that are not browsers name no origin and are not checked.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING

from werkzeug import Response
from werkzeug.datastructures import HeaderSet

from mlx_backend.api.errors import ApiError
from mlx_backend.server.limits import RATE_LIMIT_HEADERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from werkzeug import Request

_OWN_ENDINGS = (".localhost", ".internal", ".home.arpa")
"""Names that no one can register: RFC 6761 and 8375, and `.internal` (ICANN, 2024), which Docker uses."""
_NEIGHBOURS_ENDING = ".local"
"""RFC 6762: any machine of a network answers for such a name, as for one of a single part that is not `localhost`."""

_EXPOSED_HEADERS = HeaderSet(
    [
        "x-request-id",
        "x-mlx-backend-effort",
        "x-mlx-backend-ignored",
        "x-mlx-backend-stopped-by",
        "retry-after",
        *RATE_LIMIT_HEADERS,
    ]
)
_USUAL_HEADERS = HeaderSet(["authorization", "content-type"])
_PREFLIGHT_SECONDS = 600


class AllowedHosts:
    """The names in a request's Host header that are answered; `*` is all of them."""

    def __init__(self, allowed: Sequence[str], *, is_loopback: bool) -> None:
        self._allowed = {name.lower().rstrip(".") for name in allowed}
        self._is_loopback = is_loopback
        self._own = socket.gethostname().lower()

    def check(self, request: Request) -> None:
        """Raise a 403 for a name that is not allowed. A request that names no host (HTTP/1.0) is no browser's."""
        host = request.environ.get("HTTP_HOST", "")
        name = _name_of(host)
        if not host or "*" in self._allowed or name in self._allowed or name == self._own or _is_own(name):
            return
        if not self._is_loopback and ("." not in name or name.endswith(_NEIGHBOURS_ENDING)):
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


def _is_own(name: str) -> bool:
    if name == "localhost" or name.endswith(_OWN_ENDINGS):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class CorsPolicy:
    """The origins that are allowed; `*` is all of them."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = allowed

    def refuse_foreign_page(self, request: Request) -> None:
        """Raise a 403 if a page of another origin sends the request: browsers send POSTs and name their origin."""
        origin = request.origin
        if origin is None or self._allowed_origin(request):
            return
        if (host := request.host) and origin.partition("://")[
            2
        ] == host:  # its own page; `null` names no host
            return
        raise ApiError(
            403, "This web page may not use the server: start it with --cors-origin and the page's origin."
        )

    def add_headers(self, request: Request, response: Response) -> None:
        """Tell the browser that its page may read the response."""
        if origin := self._allowed_origin(request):
            response.access_control_allow_origin = origin
            response.access_control_expose_headers = _EXPOSED_HEADERS
        if self._allowed:
            response.vary.add("Origin")

    def preflight(self, request: Request, methods: Iterable[str]) -> Response:
        """Answer a browser that asks first."""
        allowed_methods = HeaderSet(sorted({*methods, "OPTIONS"}))
        response = Response(status=204)
        response.allow.update(allowed_methods)
        if self._allowed_origin(request):
            response.access_control_allow_methods = allowed_methods
            response.access_control_allow_headers = request.access_control_request_headers or _USUAL_HEADERS
            response.access_control_max_age = _PREFLIGHT_SECONDS
        return response

    def _allowed_origin(self, request: Request) -> str | None:
        """Return what Access-Control-Allow-Origin says to this request's page; None if it may not."""
        origin = request.origin
        if origin is None or not ("*" in self._allowed or origin in self._allowed):
            return None
        return "*" if "*" in self._allowed else origin
