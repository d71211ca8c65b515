"""How programs are set up for this server, with its address and one of its models filled in: for the page.

What they are told is in clients.toml; keys are left to a variable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from mlx_backend.api.errors import ApiError
from mlx_backend.clients import UNUSED, ServerAccess, known_clients
from mlx_backend.server.handlers import json_response, own_route

if TYPE_CHECKING:
    from werkzeug import Request, Response

    from mlx_backend.clients import ClientSetup
    from mlx_backend.server.handlers import Backend, Route


class FilledSnippet(TypedDict):
    """A piece of configuration or code, and the file it belongs into, if there is one."""

    language: str
    file: str
    text: str


class FilledClient(TypedDict):
    """How a program is set up for this server; `about` and `more` are Markdown."""

    name: str
    title: str
    kind: str
    about: str
    snippets: list[FilledSnippet]
    more: str


def clients_route() -> Route:
    """Return the address of all clients' set-ups."""
    return own_route(
        "/page/clients.json", "How clients are set up for a server", list[FilledClient], _clients
    )


def _clients(request: Request, backend: Backend, _arguments: object) -> Response:
    """Return every client, filled in with the `url` under which the server was reached and with a `model`.

    Raises UnknownModel, ModelNotAllowed, and ApiError for an address that is none.
    """
    usual, sent = ServerAccess(), request.args
    model = sent.get("model") or backend.models.statuses()[0].name
    described = backend.models.describe(model)
    access = ServerAccess(
        url=sent.get("url", usual.url),
        model=model,
        context=described.context_length or usual.context,
        sees="vision" in described.capabilities,
        secret=UNUSED if backend.client.key is None else None,
    )
    try:
        filled = [_filled(name, client, access) for name, client in known_clients().items()]
    except ValueError:
        raise ApiError(400, f"url is {access.url[:200]!r}: that is no address.", param="url") from None
    return json_response(filled)


def _filled(name: str, client: ClientSetup, access: ServerAccess) -> FilledClient:
    return {
        "name": name,
        "title": client.title,
        "kind": client.kind,
        "about": client.description(access),
        "snippets": [
            {"language": each.language, "file": each.file, "text": each.filled(access)}
            for each in client.snippets
        ],
        "more": client.remarks(access),
    }
