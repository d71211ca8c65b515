"""A request on its way: to the model that is meant, in the server's own words, without what the server refuses.

What the client does with one request to one address, this does with what Dify wants of a server of any kind:

`chat`     a conversation; the answer comes in chunks
`compute`  vectors or a ranking; the answer is one object

Some servers refuse a request for a field they do not know. Where the field is one of those the plugin adds by
itself, the request is sent once more without it, and the server is not sent it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dify_mlx_provider.upstream import discovery
from dify_mlx_provider.upstream.cache import Noted
from dify_mlx_provider.upstream.client import Client
from dify_mlx_provider.upstream.errors import ModelNotFound, NoSuchAddress, Refused, ServerError, stated
from dify_mlx_provider.upstream.server_kinds import NAMES, Kind, adapted, refused_fields

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from dify_mlx_provider.upstream.credentials import Credentials
    from dify_mlx_provider.upstream.discovery import Server

KNOWING_DEFAULT = (Kind.MLX_BACKEND, Kind.MLX_LM)
"""Servers with a name for whatever model they were started with; of the others' models the first is meant."""

_WHAT = {"embedding": "makes no embeddings", "rerank": "does not rerank"}
_HOW = {
    Kind.MLX_BACKEND: "Start a newer one.",
    Kind.LLAMA_CPP: "Start it with --embeddings, or with --reranking.",
}

_refused: Noted[tuple[str, str], frozenset[str]] = Noted()
"""The fields that had to be left out, by address and model."""


def chat(credentials: Credentials, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
    """Send a request of `messages.chat_request`; return the answer's chunks, as `Client.chat` does.

    Raises what the client raises, and ValueError for a setting that this kind of server does not have.
    """
    server = discovery.server(credentials)
    client = Client(credentials)
    body = {**body, "model": _meant(str(body["model"]), server, "llm")}
    where = (credentials.base_url, body["model"])
    without = _refused.get(where, frozenset())
    while True:
        posted = adapted(body, server.kind, without=without, max_tokens=credentials.max_output_tokens)
        try:
            chunks = client.chat(posted)
        except ModelNotFound as error:
            served = _served(client)
            named = [name for name in served if name != "default"]
            if body["model"] != "default" or not named:
                raise error.with_list(served) from error
            # It does not know the word, and told nothing of itself before.
            body["model"] = named[0]
            continue
        except Refused as error:
            unwanted = refused_fields(str(error), posted) - without
            if not unwanted:
                raise
            without |= unwanted
            continue
        if without:  # and the request was taken without them
            _refused.note(where, without)
        return chunks


def compute(
    credentials: Credentials, model: str, path: str, body: Mapping[str, Any], kind: str
) -> dict[str, Any]:
    """Send a request about a model of a kind to a path and return the answer, an object. Raises a ServerError."""
    server = discovery.server(credentials)
    try:
        answer = Client(credentials).compute(path, {"model": _meant(model, server, kind), **body})
    except NoSuchAddress as error:
        raise _not_offered(server, credentials, kind, path) or error from error
    except ModelNotFound as error:
        raise error.with_list([each.name for each in server.of_kind(kind)]) from error
    if isinstance(answer, dict) and (told := answer.get("error")):
        # LM Studio says so with status 200.
        missing = _not_offered(server, credentials, kind, path) if "endpoint" in str(told).lower() else None
        raise missing or stated(told)
    if isinstance(answer, dict):
        return answer
    raise Refused(f"what answers at {credentials.base_url}{path} is not an OpenAI-compatible server.")


def _meant(name: str, server: Server, kind: str) -> str:
    """The name of the model to ask for: `default` is put into words for servers that do not know it."""
    if name != "default" or server.kind in KNOWING_DEFAULT:
        return name
    first = server.model(name, kind)
    return name if first is None else first.name


def _served(client: Client) -> list[str]:
    try:
        return client.models()
    except ServerError:
        return []


def _not_offered(server: Server, credentials: Credentials, kind: str, path: str) -> ServerError | None:
    if not server.answered:
        return None
    how = _HOW.get(server.kind, "mlx-backend does: start it with a model for this.")
    return Refused(f"{NAMES[server.kind]} at {credentials.base_url} {_WHAT[kind]}: it has no {path}. {how}")
