"""GET /v1/models: OpenAI's list, with the fields that other servers have added to its objects, and Codex's next to it.

What is not known is left out; `created`, in seconds since 1970, is when the server was started. Knows what the registry
says of a model; nothing of HTTP.

`info` is for Open WebUI, which takes it for the model's settings (undocumented there, and measured with 0.12.4); what
an administrator sets for the model comes before it. It says only what has to be turned off; other clients ignore it.

    capabilities.builtin_tools   the page adds its own 36 tools to every message of a new installation
    capabilities.vision          the page sends images to any model, unless it is told not to
    hidden                       the page offers every model for chatting, those for embeddings too
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from mlx_backend.api.openai.codex_models import codex_model, levels
from mlx_backend.models.description import ModelDescription
from mlx_backend.registry.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlx_backend.api.addresses import Query
    from mlx_backend.api.openai.objects import Loading
    from mlx_backend.registry.base import ModelRegistry, ModelStatus


BUILTIN_TOOLS_TOKENS = 6_000
"""About how many tokens describe those tools in a prompt: 26 KB of JSON, 4,100 tokens for gpt-oss, 7,700 for Qwen3."""

MIN_CONTEXT = 4 * BUILTIN_TOOLS_TOKENS
"""Tokens of context from which on the tools are worth their room: about a quarter of it at most."""


def page_info(description: ModelDescription) -> dict[str, Any] | None:
    """Return the value of `info`; None where the page's defaults are right, as far as is known."""
    if description.kind != "llm":
        return {"meta": {"hidden": True}}
    if not description.capabilities:  # the model has yet to be downloaded: nothing is known of it
        return None
    has_room = description.context_length is None or description.context_length >= MIN_CONTEXT
    suits = {
        "builtin_tools": has_room and "tools" in description.capabilities,
        "vision": "vision" in description.capabilities,
    }
    off = {name: False for name, is_suited in suits.items() if not is_suited}
    return {"meta": {"capabilities": off}} if off else None


OWNER = "mlx-backend"


class NamedModel(NamedTuple):
    """A model under one of its names."""

    name: str
    status: ModelStatus
    description: ModelDescription
    is_effort: bool = False
    """Whether it is the name of one of its efforts."""


def listed_models(models: ModelRegistry) -> Iterator[NamedModel]:
    """Yield each model that can be served for every name it has, and for its efforts where a setting says so."""
    for status in models.statuses():
        described = description_of(models, status.name)
        for name in (status.name, *status.aliases):
            yield NamedModel(name, status, described)
        for effort in described.efforts if described.lists_efforts else ():
            chosen = replace(described, default_effort=effort)
            yield NamedModel(f"{status.name}:{effort}", status, chosen, is_effort=True)


class OpenAIModels:
    """The addresses of models, on a server that was started when it was `created`."""

    def __init__(self, created: int) -> None:
        self._created = created

    def list(self, query: Query) -> dict[str, Any]:
        """List the models."""
        data: list[dict[str, Any]] = []
        codex: list[dict[str, Any]] = []
        for name, status, description, is_effort in listed_models(query.models):
            alias = name if name != status.name else None
            data.append(model_object(status, description, self._created, alias=alias))
            if description.kind == "llm":
                codex.append(codex_model(name, description, len(codex), is_listed=not is_effort))
        return {"object": "list", "data": data, "models": codex}

    def get(self, query: Query) -> dict[str, Any]:
        """Describe a model."""
        name = query.arguments["name"]
        status = query.models.status(name)
        described = description_of(query.models, name)
        alias = name if name in status.aliases or name.startswith(f"{status.name}:") else None
        return model_object(status, described, self._created, alias=alias)


def load(query: Query) -> Loading:
    """Load a model, and wait for it."""
    return {"model": query.arguments["name"], "message": "It is loaded."}


def unload(query: Query) -> Loading:
    """Unload a model once it is not in use."""
    name = query.arguments["name"]
    return {"model": name, "message": query.models.unload(name)}


def model_object(
    status: ModelStatus, description: ModelDescription, created: int, *, alias: str | None = None
) -> dict[str, Any]:
    """Describe a model under its name, or under an alias; `root` is then its name."""
    described: dict[str, Any] = {
        "id": alias or status.name,
        "object": "model",
        "created": created,
        "owned_by": OWNER,
        "state": status.state,
        "type": description.kind,
    }
    if alias is not None:
        described["root"] = status.name
    if status.shares:
        described["shares"] = status.shares
    if description.context_length is not None:
        described |= dict.fromkeys(("context_length", "max_model_len"), description.context_length)
    if description.dialect:
        described["dialect"] = {"name": description.dialect, "recognised_by": description.recognised_by}
    described["capabilities"] = list(description.capabilities)
    if description.efforts:
        described["reasoning"] = {
            "efforts": list(description.efforts),
            "default": description.default_effort,
            "preserved": description.preserves_reasoning,
        }
        if description.effort_budgets:
            described["reasoning"]["budgets"] = dict(description.effort_budgets)
        described["supported_reasoning_levels"] = levels(description)
        described["default_reasoning_level"] = description.default_effort
    if description.kind == "llm":
        described["sampling_defaults"] = dict(description.sampling)
    if description.default_max_tokens is not None:
        described["default_max_tokens"] = description.default_max_tokens
    if description.adapters:
        described["adapters"] = list(description.adapters)
    if description.available_context is not None:
        described["available_context"] = description.available_context
    if description.unbatched:
        described["unbatched"] = description.unbatched
    if (info := page_info(description)) is not None:
        described["info"] = info
    return described


def description_of(models: ModelRegistry, name: str) -> ModelDescription:
    """Return what a model can do, as far as it is known."""
    try:
        return models.describe(name)
    except ModelError:  # it has left the catalogue since it was listed
        return ModelDescription()
