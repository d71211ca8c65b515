"""A question with one answer, to a model that reads: vectors, or a ranking. Says what is wrong in the user's words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import discovery
from .client import Client, ModelNotFound, NoSuchAddress, Refused, ServerError
from .faults import stated
from .servers import NAMES, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .credentials import Credentials
    from .discovery import Server

_WHAT = {"embedding": "makes no embeddings", "rerank": "does not rerank"}
_HOW = {
    Kind.MLX_BACKEND: "Start a newer one.",
    Kind.LLAMA_CPP: "Start it with --embeddings, or with --reranking.",
}
_MOST_NAMES = 12


def compute(
    credentials: Credentials, model: str, path: str, body: Mapping[str, Any], kind: str
) -> dict[str, Any]:
    """Send a request about `model` to a path and return the answer, an object. Raises a ServerError."""
    client = Client(credentials)
    server = discovery.server(credentials)
    served = [each.name for each in server.of_kind(kind)]
    name = model
    if model == "default" and server.kind is not Kind.MLX_BACKEND:
        first = server.model(model, kind)
        name = model if first is None else first.name
    try:
        answer = client.compute(path, {"model": name, **body})
    except NoSuchAddress as error:
        raise _not_offered(server, credentials, kind, path) or error from error
    except ModelNotFound as error:
        raise error.with_list(served[:_MOST_NAMES]) if served else error from error
    if isinstance(answer, dict) and (told := answer.get("error")):
        # LM Studio says so with status 200.
        missing = _not_offered(server, credentials, kind, path) if "endpoint" in str(told).lower() else None
        raise missing or stated(told)
    if isinstance(answer, dict):
        return answer
    raise Refused(f"what answers at {credentials.base_url}{path} is not an OpenAI-compatible server.")


def _not_offered(server: Server, credentials: Credentials, kind: str, path: str) -> ServerError | None:
    if not server.answered:
        return None
    how = _HOW.get(server.kind, "mlx-backend does: start it with a model for this.")
    return Refused(f"{NAMES[server.kind]} at {credentials.base_url} {_WHAT[kind]}: it has no {path}. {how}")
