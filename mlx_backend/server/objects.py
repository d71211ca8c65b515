"""The JSON objects that the server sends about itself, as types: for code that builds them, and for /openapi.json."""

from typing import Literal, NotRequired, TypedDict

from mlx_backend.registry.base import ModelState


class Home(TypedDict):
    """What / answers. Without its key a server says its name alone."""

    name: str
    version: NotRequired[str]
    models: NotRequired[list[str]]
    api: NotRequired[str]


class HealthOfModel(TypedDict):
    """How a model is; of one that is downloaded or loaded, how far that is."""

    model: str
    state: ModelState
    running: int
    waiting: int
    percent: NotRequired[int]
    bytes: NotRequired[int]
    total_bytes: NotRequired[int]
    detail: NotRequired[str]


class Ready(TypedDict):
    """What /ready answers."""

    status: ModelState | Literal["ready", "draining"]


class Health(TypedDict):
    """What /health answers. Without its key a server says nothing of its models."""

    status: ModelState | Literal["ok", "draining"]
    server: str
    version: NotRequired[str]
    models: NotRequired[list[HealthOfModel]]
