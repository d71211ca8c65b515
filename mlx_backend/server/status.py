"""The server about itself: its name at /, /health, /ready, /metrics and /activity. None is part of an API.

All but the last two are open to everybody. On a server with a key, a client that does not send it learns that the
server is there and whether it serves, and nothing of its models.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Literal, NotRequired, TypedDict

from werkzeug import Response

from mlx_backend import __version__, commit
from mlx_backend.device.memory import room_for_weights
from mlx_backend.registry.base import ModelState  # noqa: TC001 (read at run time)
from mlx_backend.registry.errors import ModelError
from mlx_backend.server.handlers import json_response, own_route
from mlx_backend.server.metrics import CONTENT_TYPE
from mlx_backend.server.request_log import EndedRequest  # noqa: TC001 (read at run time)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from werkzeug import Request

    from mlx_backend.registry.base import ModelStatus
    from mlx_backend.server.handlers import Backend, Route

NAME = "mlx-backend"


class ServerVersion(TypedDict, total=False):
    """Which server this is, for those with a key; the commit where it is known."""

    version: str
    commit: str


def _version() -> ServerVersion:
    """Return what runs here: when the server is started, since a clone's files may change under it."""
    made_from = commit()
    return {"version": __version__, "commit": made_from} if made_from else {"version": __version__}


class Home(ServerVersion):
    """What / answers. Without its key a server says its name alone."""

    name: str
    models: NotRequired[list[str]]
    api: NotRequired[str]


class HealthOfModel(TypedDict):
    """How a model is; of one that is downloaded or loaded, how far that is; and which other one's weights it has."""

    model: str
    state: ModelState
    running: int
    waiting: int
    percent: NotRequired[int]
    bytes: NotRequired[int]
    total_bytes: NotRequired[int]
    detail: NotRequired[str]
    drafts: NotRequired[str]
    shares: NotRequired[str]


class Ready(TypedDict):
    """What /ready answers."""

    status: ModelState | Literal["ready", "draining"]


class Health(ServerVersion):
    """What /health answers. Without its key a server says nothing of its models."""

    status: ModelState | Literal["ok", "draining"]
    server: str
    models: NotRequired[list[HealthOfModel]]


class MemoryUse(TypedDict):
    """Memory for models and their caches, in bytes: all, reserved, allocated now; and how much weights may take."""

    limit: int
    reserved: int
    used: int
    max_weights: int


class ModelSize(TypedDict):
    """How large a model's weights are, and whether they fit into the memory that there is for models."""

    model: str
    weights: int
    fits: NotRequired[bool]


class Activity(TypedDict):
    """What /activity answers; the newest request is the first."""

    requests: list[EndedRequest]
    models: list[ModelSize]
    memory: NotRequired[MemoryUse]


def status_routes(addresses: Sequence[str]) -> list[Route]:
    """Return these addresses, / first, which names the `addresses` of APIs."""
    version = _version()
    home, health = partial(_home, version, addresses), partial(_health, version)
    also = [503]
    return [
        # These tell no secrets and start nothing.
        own_route("/", "Say what this server is", Home, home, needs_key=False),
        own_route(
            "/health", "Say whether requests are served", Health, health, needs_key=False, also_answers=also
        ),
        own_route(
            "/ready",
            "Say whether requests may be sent here",
            Ready,
            _ready,
            needs_key=False,
            also_answers=also,
        ),
        own_route(
            "/metrics",
            "Say what was counted and measured, for Prometheus",
            str,
            _metrics,
            media_type="text/plain",
        ),
        own_route("/activity", "Say what was requested last, and what fits into memory", Activity, _activity),
    ]


def _home(
    version: ServerVersion, addresses: Sequence[str], _request: Request, backend: Backend, _arguments: object
) -> Response:
    """Say what this server is, and where its APIs are."""
    if not backend.client.is_allowed:
        return json_response({"name": NAME})
    models = [status.name for status in backend.models.statuses()]
    return json_response({"name": NAME, **version, "models": models, "api": ", ".join(addresses)})


def _health(version: ServerVersion, _request: Request, backend: Backend, _arguments: object) -> Response:
    """Say how the server is, and every model in memory: 503 while no requests can be served, or it is being stopped.

    That depends on the first model, if it is pinned. Models that are loaded on demand may fail.
    """
    states = backend.models.statuses()
    status: ModelState | Literal["ok", "draining"] = "ok"
    if backend.in_flight.is_draining:
        status = "draining"
    elif states and states[0].pinned and states[0].state not in ("ready", "unloaded"):
        status = states[0].state
    health: Health = {"status": status, "server": NAME}
    if backend.client.is_allowed:
        health = {**health, **version}
        health["models"] = [_entry(state) for state in states if state.state != "unloaded"]
    return json_response(health, 200 if status == "ok" else 503)


def _ready(_request: Request, backend: Backend, _arguments: object) -> Response:
    """Say, to those without a key too, whether a request would be answered without waiting for its model.

    It is once the default model is loaded, or is one that is loaded on demand, and the server is not being stopped.
    """
    default = next(iter(backend.models.statuses()), None)
    ready: Ready = {"status": "ready"}
    if backend.in_flight.is_draining:
        ready = {"status": "draining"}
    elif default is not None and (default.pinned or default.state != "unloaded"):
        ready = {"status": default.state}
    return json_response(ready, 200 if ready["status"] == "ready" else 503)


def _metrics(_request: Request, backend: Backend, _arguments: object) -> Response:
    """Return Prometheus' page: to a key of several, what is of itself and of the models that it may use."""
    key = backend.client.key
    seen = (key.name, [each.name for each in backend.models.statuses()]) if key and not key.is_shared else ()
    return Response(backend.metrics.text(*seen), content_type=CONTENT_TYPE)


def _activity(_request: Request, backend: Backend, _arguments: object) -> Response:
    """Return the last requests, without their contents, and the memory. A client with a key sees what that has sent."""
    key, memory = backend.client.key, backend.metrics.memory
    last = backend.metrics.last_requests.of(key.name if key is not None else None)
    activity: Activity = {"requests": last, "models": list(_sizes(backend))}
    if memory is not None:
        activity["memory"] = {
            "limit": memory.limit,
            "reserved": memory.reserved,
            "used": memory.used(),
            "max_weights": room_for_weights(memory.limit),
        }
    return json_response(activity)


def _sizes(backend: Backend) -> Iterator[ModelSize]:
    memory = backend.metrics.memory
    for status in backend.models.statuses():
        with suppress(ModelError):  # it has left the catalogue since it was listed
            if weights := backend.models.files(status.name).weight_bytes:
                size: ModelSize = {"model": status.name, "weights": weights}
                if memory is not None:
                    size["fits"] = weights <= room_for_weights(memory.limit)
                yield size


def _entry(state: ModelStatus) -> HealthOfModel:
    entry: HealthOfModel = {
        "model": state.name,
        "state": state.state,
        "running": state.running,
        "waiting": state.waiting,
    }
    if state.state in ("downloading", "loading"):
        entry["percent"] = state.percent
        if state.total:
            entry["bytes"], entry["total_bytes"] = state.done, state.total
    if state.shares:
        entry["shares"] = state.shares
    if state.detail:
        entry["detail"] = state.detail
    if state.drafts:
        entry["drafts"] = state.drafts
    return entry
