"""Which web pages may use the server: CORS, and what browsers do that do not ask first.

Without --cors-origin none but those it serves itself. What is no browser names no origin, and is not asked for one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from werkzeug import Response

from mlx_backend.api.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from werkzeug import Request

_OWN_HEADERS = "x-request-id, x-mlx-backend-effort, x-mlx-backend-ignored"


class Origins:
    """The origins that were allowed; `*` is all of them."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = allowed

    def check(self, request: Request) -> None:
        """Keep foreign web pages from using a local server: browsers send their POSTs and name their origin."""
        origin = request.headers.get("Origin")
        if origin is None or self._granted(request) or urlsplit(origin).netloc == request.host:
            return
        raise ApiError(
            403, "This web page may not use the server: start it with --cors-origin and the page's origin."
        )

    def mark(self, request: Request, response: Response) -> None:
        """Tell the browser that its page may read the response."""
        if origin := self._granted(request):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = _OWN_HEADERS
        if self._allowed:
            response.vary.add("Origin")

    def options(self, request: Request, methods: Iterable[str]) -> Response:
        """Answer a browser that asks first."""
        allow = ", ".join(sorted({*methods, "OPTIONS"}))
        response = Response(status=204, headers={"Allow": allow})
        if self._granted(request):
            response.headers["Access-Control-Allow-Methods"] = allow
            asked = request.headers.get("Access-Control-Request-Headers", "authorization, content-type")
            response.headers["Access-Control-Allow-Headers"] = asked
            response.headers["Access-Control-Max-Age"] = "600"
        return response

    def _granted(self, request: Request) -> str | None:
        """The origin that is allowed to this request's page."""
        origin = request.headers.get("Origin")
        if origin is None or not ("*" in self._allowed or origin in self._allowed):
            return None
        return "*" if "*" in self._allowed else origin
