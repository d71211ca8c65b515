"""Which web pages may use the server: CORS, and the POSTs that browsers send without asking first.

Without --cors-origin only pages of the server's own origin may. Clients that are not browsers name no origin and are
not checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from werkzeug import Response
from werkzeug.datastructures import HeaderSet

from mlx_backend.api.errors import ApiError
from mlx_backend.server.limits import RATE_LIMIT_HEADERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from werkzeug import Request

_EXPOSED_HEADERS = HeaderSet(
    ["x-request-id", "x-mlx-backend-effort", "x-mlx-backend-ignored", "retry-after", *RATE_LIMIT_HEADERS]
)
_USUAL_HEADERS = HeaderSet(["authorization", "content-type"])
_PREFLIGHT_SECONDS = 600


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
