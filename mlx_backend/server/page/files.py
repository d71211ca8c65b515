"""The page's files: read from the package, and sent with headers that let the page load nothing from elsewhere.

Knows which files there are and what browsers are told of them; what the page does is in its own JavaScript.
"""

from __future__ import annotations

import hashlib
import mimetypes
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from werkzeug import Response
from werkzeug.utils import redirect

from mlx_backend.api.base import Operation
from mlx_backend.api.errors import ApiError
from mlx_backend.server.client_setups import ClientsHandler
from mlx_backend.server.errors import DefaultErrors
from mlx_backend.server.handlers import Route

if TYPE_CHECKING:
    from collections.abc import Mapping

    from werkzeug import Request

    from mlx_backend.server.handlers import Backend, Handler

FOLDERS = tuple(Path(__file__).parent / name for name in ("static", "vendor"))
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


@cache
def _files() -> Mapping[str, tuple[bytes, str, str]]:
    """Return the content, media type and ETag of every file, by name."""
    found = {}
    for path in (path for folder in FOLDERS for path in folder.iterdir()):
        content = path.read_bytes()
        # Not the system's table, where .js may be anything.
        kind = mimetypes.MimeTypes(()).guess_type(path.name)[0] or "text/plain"
        if kind.startswith("text/") or kind == "application/json":
            kind += "; charset=utf-8"
        found[path.name] = content, kind, hashlib.sha256(content).hexdigest()[:32]
    return found


def _response(request: Request, name: str) -> Response:
    try:
        content, kind, tag = _files()[name]
    except KeyError:
        raise ApiError(404, f"The page has no file {name[:200]!r}.") from None
    response = Response(content, content_type=kind, headers=HEADERS)
    response.set_etag(tag)
    return response.make_conditional(request)


class PageFile(DefaultErrors):
    """One of the page's files: always the same, or the one that the address names."""

    def __init__(self, name: str | None = None, summary: str = "A file of the page") -> None:
        self._name = name
        self.operation = Operation(
            summary=summary, answer=str, media_type="text/html" if name else "text/plain"
        )

    def handle(self, request: Request, _backend: Backend, arguments: Mapping[str, str]) -> Response:
        """Return the file. Raises ApiError for one that is not there."""
        if self._name is not None and request.path.endswith("/"):
            return redirect(f"..{request.path.rstrip('/')}", 308)  # the page's own addresses are relative
        return _response(request, self._name or arguments["name"])


class PageOrAnswer(DefaultErrors):
    """One address for people and programs: the page for a browser, which asks for HTML, and else an answer."""

    def __init__(self, answer: Handler) -> None:
        self._answer = answer
        self.operation = answer.operation

    def handle(self, request: Request, backend: Backend, arguments: Mapping[str, str]) -> Response:
        """Return what the client prefers; one that accepts anything gets JSON."""
        wanted = request.accept_mimetypes.best_match(("application/json", "text/html"))
        if wanted == "text/html":
            response = _response(request, "index.html")
        else:
            response = self._answer.handle(request, backend, arguments)
        response.vary.add("Accept")
        return response


def page_routes() -> list[Route]:
    """Return the addresses of the page's files. They tell no secrets: what needs a key is requested by the page."""
    return [
        Route(
            "GET", "/docs", PageFile("index.html", "This document, for reading in a browser"), needs_key=False
        ),
        Route("GET", "/page/clients.json", ClientsHandler()),
        Route("GET", "/page/<path:name>", PageFile(), needs_key=False),
    ]
