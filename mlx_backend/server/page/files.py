"""The page's files: read from the package, and sent with headers that let the page load nothing from elsewhere.

Knows which files there are and what browsers are told of them; what the page does is in its own JavaScript.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from werkzeug import Response
from werkzeug.utils import redirect

from mlx_backend.api.addresses import Operation
from mlx_backend.api.errors import ApiError
from mlx_backend.server.client_setups import ClientsHandler
from mlx_backend.server.handlers import Handler, Route

if TYPE_CHECKING:
    from collections.abc import Mapping

    from werkzeug import Request

    from mlx_backend.server.handlers import Backend

FOLDERS = tuple(Path(__file__).parent / name for name in ("static", "vendor"))
# Not the system's table of types, where .js may be anything.
TYPES: Final = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
HEADERS = {
    # Nothing from elsewhere, no inline scripts or styles, and no HTML but what the sanitiser has let through.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked for again each time, and answered by the ETag
}


def _response(request: Request, name: str) -> Response:
    found = next((file for folder in FOLDERS for file in folder.iterdir() if file.name == name), None)
    if found is None:
        raise ApiError(404, f"The page has no file {name[:200]!r}.")
    kind = TYPES.get(found.suffix, "text/plain")
    response = Response(found.read_bytes(), mimetype=kind, headers=HEADERS)
    response.add_etag()
    return response.make_conditional(request)


class PageFile(Handler):
    """One of the page's files: always the same, or the one that the address names."""

    def __init__(self, name: str | None = None, summary: str = "A file of the page") -> None:
        self._name = name
        media_type = "text/html" if name else "text/plain"
        self.operation = Operation(summary=summary, answer=str, media_type=media_type)

    def handle(self, request: Request, _backend: Backend, arguments: Mapping[str, str]) -> Response:
        """Return the file. Raises ApiError for one that is not there."""
        if self._name is not None and request.path.endswith("/"):
            return redirect(f"..{request.path.rstrip('/')}", 308)  # the page's own addresses are relative
        return _response(request, self._name or arguments["name"])


class PageOrAnswer(Handler):
    """One address for people and programs: the page for a browser, which asks for HTML, and else an answer."""

    def __init__(self, answer: Handler) -> None:
        self._answer = answer
        self.operation = answer.operation

    def handle(self, request: Request, backend: Backend, arguments: Mapping[str, str]) -> Response:
        """Return what the client prefers; one that accepts anything gets JSON."""
        if request.accept_mimetypes.best_match(("application/json", "text/html")) == "text/html":
            response = _response(request, "index.html")
        else:
            response = self._answer.handle(request, backend, arguments)
        response.vary.add("Accept")
        return response


def page_routes() -> list[Route]:
    """Return the addresses of the page's files. They tell no secrets: what needs a key is requested by the page."""
    document = PageFile("index.html", "This document, for reading in a browser")
    return [
        Route("GET", "/docs", document, needs_key=False),
        Route("GET", "/page/clients.json", ClientsHandler()),
        Route("GET", "/page/<path:name>", PageFile(), needs_key=False),
    ]
