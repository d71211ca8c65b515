"""The page's files: read from the package, and sent with headers that let the page load nothing from elsewhere.

Knows which files there are and what browsers are told of them; what the page does is in its own JavaScript.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from werkzeug import Response
from werkzeug.utils import redirect

from mlx_backend.api.errors import ApiError
from mlx_backend.server.client_setups import clients_route
from mlx_backend.server.handlers import own_route

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from werkzeug import Request

    from mlx_backend.server.handlers import Backend, Handler, Route

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


def with_page(routes: Sequence[Route]) -> list[Route]:
    """Return routes with the page's: / answers a browser, which asks for HTML, with the page.

    The files tell no secrets: what needs a key is requested by the page.
    """
    home, *others = routes
    summary = "This document, for reading in a browser"
    return [
        replace(home, handler=replace(home.handler, handle=partial(_page_or_answer, home.handler))),
        *others,
        own_route("/docs", summary, str, _docs, needs_key=False, media_type="text/html"),
        clients_route(),
        own_route(
            "/page/<path:name>", "A file of the page", str, _file, needs_key=False, media_type="text/plain"
        ),
    ]


def _page_or_answer(
    answer: Handler, request: Request, backend: Backend, arguments: Mapping[str, str]
) -> Response:
    """Return what the client prefers; one that accepts anything gets JSON."""
    if request.accept_mimetypes.best_match(("application/json", "text/html")) == "text/html":
        response = _response(request, "index.html")
    else:
        response = answer.handle(request, backend, arguments)
    response.vary.add("Accept")
    return response


def _docs(request: Request, _backend: Backend, _arguments: object) -> Response:
    if request.path.endswith("/"):
        return redirect(f"..{request.path.rstrip('/')}", 308)  # the page's own addresses are relative
    return _response(request, "index.html")


def _file(request: Request, _backend: Backend, arguments: Mapping[str, str]) -> Response:
    """Return a file. Raises ApiError for one that is not there."""
    return _response(request, arguments["name"])
