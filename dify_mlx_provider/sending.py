"""A chat request on its way: put into the server's own words, and sent again without what the server refuses.

Some servers refuse a request for a field they do not know. Where the field is one of those the plugin adds by
itself, the request is sent once more without it, and the server is not sent it again.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from . import discovery
from .client import Client, ModelNotFound, Refused
from .servers import Kind, adapted, refused_fields

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from .credentials import Credentials

_lock = threading.Lock()
_refused: dict[tuple[str, str], frozenset[str]] = {}
MOST_KEPT = 256

KNOWING_DEFAULT = (Kind.MLX_BACKEND, Kind.MLX_LM)
"""Servers with a name for whatever model they were started with; of the others' models the first is meant."""


def send(credentials: Credentials, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
    """Send a request of `messages.chat_request`; return the answer's chunks, as `Client.chat` does.

    Raises what the client raises, and ValueError for a setting that this kind of server does not have.
    """
    server = discovery.server(credentials)
    if body.get("model") == "default" and server.kind not in KNOWING_DEFAULT:
        first = server.model("default")
        body = body if first is None else {**body, "model": first.name}
    where = (credentials.base_url, str(body.get("model")))
    without = _refused.get(where, frozenset())
    client = Client(credentials)
    while True:
        posted = adapted(body, server.kind, without=without, max_tokens=credentials.max_output_tokens)
        try:
            chunks = client.chat(posted)
        except ModelNotFound:
            raise
        except Refused as error:
            named = refused_fields(str(error), posted) - without
            if not named:
                raise
            without |= named
            continue
        _remember(where, without)
        return chunks


def _remember(where: tuple[str, str], without: frozenset[str]) -> None:
    """Keep what had to be left out, now that the request was taken without it."""
    with _lock:
        if without and _refused.get(where) != without:
            _refused[where] = without
            while len(_refused) > MOST_KEPT:
                del _refused[next(iter(_refused))]
