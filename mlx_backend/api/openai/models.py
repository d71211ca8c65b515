"""What `/v1/models` says of each model: OpenAI's object, and what other servers have added to it.

What is not known is left out. Knows the models' own words for themselves; nothing of HTTP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_backend.models.description import ModelDescription
    from mlx_backend.registry.base import ModelStatus

OWNER = "mlx-backend"


def model_object(
    status: ModelStatus, description: ModelDescription, created: int, *, alias: str | None = None
) -> dict[str, Any]:
    """Describe a model by its name, or by another name it has; `root` is then its own."""
    told: dict[str, Any] = {
        "id": alias or status.name,
        "object": "model",
        "created": created,
        "owned_by": OWNER,
        "state": status.state,
        "type": description.kind,
    }
    if alias is not None:
        told["root"] = status.name
    if description.context_length is not None:
        told |= dict.fromkeys(("context_length", "max_model_len"), description.context_length)
    told["capabilities"] = list(description.capabilities)
    if description.efforts:
        told["reasoning"] = {"efforts": list(description.efforts), "default": description.default_effort}
    if description.kind == "llm":
        told["sampling_defaults"] = dict(description.sampling)
    if description.adapters:
        told["adapters"] = list(description.adapters)
    return told


def model_objects(status: ModelStatus, description: ModelDescription, created: int) -> list[dict[str, Any]]:
    """Describe a model once by each of its names."""
    names = [None, *status.aliases]
    return [model_object(status, description, created, alias=name) for name in names]
