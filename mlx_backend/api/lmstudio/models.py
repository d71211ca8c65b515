"""GET /api/v0/models and /api/v0/models/NAME: what LM Studio's own list says of models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict

from mlx_backend.api.addresses import Addresses
from mlx_backend.api.openai.base import OPENAI
from mlx_backend.api.openai.models import description_of, listed_models

if TYPE_CHECKING:
    from mlx_backend.api.addresses import Query
    from mlx_backend.models.description import ModelDescription
    from mlx_backend.registry.base import ModelRegistry, ModelStatus


class StudioModel(TypedDict):
    """A model under one of its names."""

    id: str
    object: Literal["model"]
    type: Literal["llm", "vlm", "embeddings"]
    publisher: str
    arch: str
    compatibility_type: Literal["mlx"]
    quantization: str
    state: Literal["loaded", "not-loaded"]
    max_context_length: NotRequired[int]
    loaded_context_length: NotRequired[int]
    capabilities: NotRequired[list[str]]


class StudioModelList(TypedDict):
    """The models that can be served."""

    object: Literal["list"]
    data: list[StudioModel]


def addresses() -> Addresses:
    """Return the addresses. Errors are OpenAI's."""
    api = Addresses(OPENAI)
    api.resource("GET", "/api/v0/models", list_models, StudioModelList)
    api.resource("GET", "/api/v0/models/<path:name>", get_model, StudioModel)
    return api


def list_models(query: Query) -> dict[str, Any]:
    """List the models, as LM Studio does."""
    found = [each for each in listed_models(query.models) if each.description.kind != "rerank"]
    data = [_model_object(query.models, each.name, each.status, each.description) for each in found]
    return {"object": "list", "data": data}


def get_model(query: Query) -> dict[str, Any]:
    """Describe a model, as LM Studio does."""
    models, name = query.models, query.arguments["name"]
    return _model_object(models, name, models.status(name), description_of(models, name))


def _model_object(
    models: ModelRegistry, name: str, status: ModelStatus, description: ModelDescription
) -> dict[str, Any]:
    files = models.files(status.name)
    is_loaded = status.state in ("ready", "restarting")
    sees = "vision" in description.capabilities
    found: dict[str, Any] = {
        "id": name,
        "object": "model",
        "type": "embeddings" if description.kind == "embedding" else "vlm" if sees else "llm",
        "publisher": status.name.rpartition("/")[0],
        "arch": files.architecture,
        "compatibility_type": "mlx",
        "quantization": files.quantization,
        "state": "loaded" if is_loaded else "not-loaded",
    }
    if description.context_length is not None:
        found["max_context_length"] = description.context_length
        if is_loaded:
            found["loaded_context_length"] = description.context_length
    if "tools" in description.capabilities:
        found["capabilities"] = ["tool_use"]
    return found
