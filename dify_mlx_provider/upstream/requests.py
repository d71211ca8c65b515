"""One request to a server of any kind: for the right model, in fields this kind knows, without those it refused.

`chat`       a conversation; the answer comes in chunks
`post_json`  vectors or a ranking; the answer is one object

Some servers refuse a request for a field they do not know. If it is a field that the plugin added by itself, the
request is sent once more without it, and the server does not get the field again. The HTTP is `client`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dify_mlx_provider.upstream import discovery
from dify_mlx_provider.upstream.cache import BoundedMap
from dify_mlx_provider.upstream.client import Client
from dify_mlx_provider.upstream.errors import (
    ModelNotFound,
    NoSuchEndpoint,
    Refused,
    ServerError,
    from_error_object,
)
from dify_mlx_provider.upstream.server_kinds import DISPLAY_NAMES, ServerKind, adapt_request, refused_fields

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from dify_mlx_provider.upstream.credentials import Credentials
    from dify_mlx_provider.upstream.server_info import ServerInfo

KNOWS_DEFAULT = (ServerKind.MLX_BACKEND, ServerKind.MLX_LM)
"""Servers with a name for the model they were started with; of the others, `default` means the first model."""

_CANNOT = {"embedding": "makes no embeddings", "rerank": "does not rerank"}
_REMEDY = {
    ServerKind.MLX_BACKEND: "Start a newer one.",
    ServerKind.LLAMA_CPP: "Start it with --embeddings, or with --reranking.",
}

_refused_before: BoundedMap[tuple[str, str], frozenset[str]] = BoundedMap()
"""The fields that had to be left out, by address and model."""


def chat(credentials: Credentials, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
    """Send a request of `messages.chat_request`; return the answer's chunks, as `Client.chat` does.

    Raises what the client raises, and ValueError for a setting that this kind of server does not have.
    """
    server = discovery.find_server(credentials)
    client = Client(credentials)
    body = {**body, "model": _model_id(str(body["model"]), server, "llm")}
    key = (credentials.base_url, body["model"])
    omitted = _refused_before.get(key, frozenset())
    while True:
        request = adapt_request(body, server.kind, omit=omitted)
        try:
            chunks = client.chat(request)
        except ModelNotFound as error:
            served = server.names("llm") if server.models else _served_models(client)
            candidates = [name for name in served if name != "default"]
            if body["model"] != "default" or not candidates:
                raise _not_found(error, body["model"], credentials, server, served) from error
            # A server that discovery learnt nothing of, and that has no model named `default`.
            body["model"] = candidates[0]
            continue
        except Refused as error:
            unwanted = refused_fields(str(error), request) - omitted
            if not unwanted:
                raise
            omitted |= unwanted
            continue
        if omitted:  # remembered only now that the request was accepted without them
            _refused_before.set(key, omitted)
        return chunks


def post_json(
    credentials: Credentials, model: str, path: str, body: Mapping[str, Any], kind: str
) -> dict[str, Any]:
    """Send a request to a model of a kind and return the answer, an object. Raises a ServerError."""
    server = discovery.find_server(credentials)
    try:
        answer = Client(credentials).post_json(path, {"model": _model_id(model, server, kind), **body})
    except NoSuchEndpoint as error:
        raise _unsupported(server, credentials, kind, path) or error from error
    except ModelNotFound as error:
        raise _not_found(error, model, credentials, server, server.names(kind), kind) from error
    if isinstance(answer, dict) and (error_object := answer.get("error")):
        # LM Studio sends its errors with status 200.
        is_missing = "endpoint" in str(error_object).lower()
        unsupported = _unsupported(server, credentials, kind, path) if is_missing else None
        raise unsupported or from_error_object(error_object)
    if isinstance(answer, dict):
        return answer
    raise Refused(f"what answers at {credentials.base_url}{path} is not an OpenAI-compatible server.")


def _model_id(name: str, server: ServerInfo, kind: str) -> str:
    """The model's name for this server: `default` is replaced for servers that do not know it."""
    if name != "default" or server.kind in KNOWS_DEFAULT:
        return name
    first = server.model(name, kind)
    return name if first is None else first.name


def _not_found(
    error: ModelNotFound,
    name: str,
    credentials: Credentials,
    server: ServerInfo,
    served: list[str],
    kind: str = "llm",
) -> ModelNotFound:
    # Dify's model Default is a chat model. Of the servers that know the name, only mlx-backend is sure to have one.
    has_default = kind == "llm" and server.kind is ServerKind.MLX_BACKEND and bool(served)
    return (
        error
        if name == "default"
        else error.explained(name, credentials.base_url, served, has_default=has_default)
    )


def _served_models(client: Client) -> list[str]:
    try:
        return client.models()
    except ServerError:
        return []


def _unsupported(server: ServerInfo, credentials: Credentials, kind: str, path: str) -> ServerError | None:
    if not server.answered:
        return None
    remedy = _REMEDY.get(server.kind, "mlx-backend does: start it with a model for this.")
    name = DISPLAY_NAMES[server.kind]
    return Refused(f"{name} at {credentials.base_url} {_CANNOT[kind]}: it has no {path}. {remedy}")
