"""The models as this API lists, describes and fetches them: /api/tags, /api/show, /api/ps, /api/version, /api/pull.

Models are neither made nor deleted here: those addresses say what to do instead. A client that looks for a text such as
`.Suffix` in a template does so to learn what a model can do, so a template is the names of what it takes.
"""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any, NoReturn

from mlx_backend.api.errors import ApiError, as_api_error, refuse
from mlx_backend.api.fields import Body
from mlx_backend.api.ollama.base import as_time, tagged
from mlx_backend.api.openai.models import listed_models
from mlx_backend.registry.errors import UnknownModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mlx_backend.api.addresses import Query
    from mlx_backend.api.ollama import objects
    from mlx_backend.models.description import ModelDescription
    from mlx_backend.models.files import ModelFiles
    from mlx_backend.registry.base import ModelRegistry, ModelStatus

VERSION = "0.13.5"
"""Of Ollama, whose API this is: clients ask for one that is new enough."""
_CAPABILITIES = ("completion", "vision", "tools", "thinking", "insert", "embedding")
_NEVER = 100 * 365 * 86_400.0
"""Seconds after which a model is unloaded that stays in memory."""
_IN_MEMORY = ("ready", "restarting")


class NamedBody(Body):
    """A body that names a model, in today's field or in the older one."""

    name: str | None = None
    stream: bool | None = None
    verbose: bool | None = None
    insecure: bool | None = None

    @property
    def named(self) -> str:
        """The model's name. Raises ApiError if there is none."""
        if found := self.model or self.name:
            return found
        raise refuse("model is missing.", "model")


class OllamaModels:
    """The addresses of models. Each is said to be as old as the server, which was started when it was `created`."""

    def __init__(self, created: int) -> None:
        self._modified = {"modified_at": as_time(created)}

    def show(self, body: NamedBody, models: ModelRegistry, _wait: float) -> dict[str, Any]:
        """Describe a model, as Ollama does."""
        name = body.named
        description, files = models.describe(name), models.files(name)
        family = files.architecture or "mlx"
        info: dict[str, Any] = {
            "general.architecture": family,
            "general.basename": models.status(name).name,
        }
        if description.context_length is not None:
            info[f"{family}.context_length"] = description.context_length
        capabilities = [each for each in _CAPABILITIES if each in description.capabilities]
        takes = {"Tools": "tools", "Suffix": "insert", "Thinking": "thinking"}
        names = ["System", "Prompt", *(name for name, what in takes.items() if what in capabilities)]
        return {
            "modelfile": f"FROM {models.status(name).name}\n",
            "parameters": "\n".join(f"{each} {value}" for each, value in description.sampling.items()),
            "template": "".join(f"{{{{ .{each} }}}}" for each in names),
            "details": _details(files),
            "model_info": info,
            "capabilities": capabilities,
            **self._modified,
        }

    def tags(self, query: Query) -> dict[str, Any]:
        """List the models, as Ollama does."""
        return {"models": [{**entry, **self._modified} for _, _, entry in _entries(query.models)]}


def running(query: Query) -> dict[str, Any]:
    """List the models in memory, as Ollama does."""
    now = time.time()
    found = []
    for status, description, entry in _entries(query.models):
        if status.state in _IN_MEMORY and entry["name"] == tagged(status.name):
            left = _NEVER if status.unloads_in is None else status.unloads_in
            in_memory = {"expires_at": as_time(now + left), "size_vram": entry["size"]}
            found.append({**entry, **in_memory, "context_length": description.context_length or 0})
    return {"models": found}


def version(_query: Query) -> objects.OllamaVersion:
    """Say which version of Ollama's API this is."""
    return {"version": VERSION}


def pull(body: NamedBody, models: ModelRegistry, wait: float) -> objects.PullStatus:
    """Have a model here, as Ollama does."""
    name = body.named
    try:
        description = models.describe(name)
    except UnknownModel as error:
        raise ApiError(
            404,
            f"{as_api_error(error).message} A model is not pulled while the server runs: download it, and restart the "
            "server with --model, or with --models-dir for a folder of models.",
            param="model",
            code="model_not_found",
        ) from None
    if not description.capabilities:  # it may be downloaded, and is not yet
        models.acquire_any(name, wait).release()
    return {"status": "success"}


def unsupported(what: str, remedy: str) -> Callable[[Query], NoReturn]:
    """Return what answers where models would be made or deleted: that this is not done here, and what to do instead."""

    def answer(_query: Query) -> NoReturn:
        raise refuse(f"This server cannot {what}: {remedy}.", code="unsupported")

    answer.__doc__ = f"Not supported: {what}."
    return answer


def _entries(models: ModelRegistry) -> Iterator[tuple[ModelStatus, ModelDescription, dict[str, Any]]]:
    """Yield each model that replies or embeds, with what every list says of it."""
    for name, status, description, _ in listed_models(models):
        if description.kind == "rerank":
            continue
        files = models.files(status.name)
        # By it, clients know what they have learnt of a model, and under which other names.
        known = (status.name, description.capabilities, description.default_effort, files)
        yield (
            status,
            description,
            {
                "name": tagged(name),
                "model": tagged(name),
                "size": files.weight_bytes,
                "digest": hashlib.sha256(repr(known).encode()).hexdigest(),
                "details": _details(files),
            },
        )


def _details(files: ModelFiles) -> objects.ModelDetails:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": files.architecture,
        "families": [files.architecture] if files.architecture else [],
        "parameter_size": "",
        "quantization_level": files.quantization,
    }
