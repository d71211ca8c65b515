"""The models as this API lists, describes and fetches them: /api/tags, /api/show, /api/ps, /api/version, /api/pull.

Models are neither made nor deleted here: those addresses say what to do instead. A client that looks for a text such as
`.Suffix` in a template does so to learn what a model can do, so a template is the names of what it takes.
"""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any

from mlx_backend.api.base import Operation
from mlx_backend.api.errors import ApiError, as_api_error, refuse
from mlx_backend.api.fields import Body
from mlx_backend.api.json_text import decode_json
from mlx_backend.api.ollama import objects
from mlx_backend.api.ollama.base import OllamaProtocol, as_time, tagged
from mlx_backend.api.ollama.registry_call import RegistryCall
from mlx_backend.api.openai.models import listed_models
from mlx_backend.registry.errors import UnknownModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mlx_backend.engine.base import QueueClient
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


class Show(OllamaProtocol):
    """Implements `JsonProtocol`: what a model is and can do."""

    operation = Operation(
        summary="Describe a model, as Ollama does", body=NamedBody, answer=objects.ShownModel
    )

    def __init__(self, created: int) -> None:
        self._created = created

    def parse(self, body: bytes) -> RegistryCall:
        """Parse a request. Raises ApiError naming the field that is wrong."""
        parsed = NamedBody.parse(decode_json(body))
        name = parsed.named
        return RegistryCall(parsed, lambda models, _wait: self._shown(models, name))

    def _shown(self, models: ModelRegistry, name: str) -> dict[str, Any]:
        description, files = models.describe(name), models.files(name)
        family = files.architecture or "mlx"
        info: dict[str, Any] = {"general.architecture": family, "general.basename": models.status(name).name}
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
            "modified_at": as_time(self._created),
        }


class ListTags(OllamaProtocol):
    """Implements `ResourceProtocol`: the models that can be served, under all names they are listed under."""

    operation = Operation(summary="List the models, as Ollama does", answer=objects.TagList)

    def __init__(self, created: int) -> None:
        self._created = created

    def answer(
        self, models: ModelRegistry, _arguments: Mapping[str, str], _client: QueueClient
    ) -> dict[str, Any]:
        """Return the list."""
        found = [entry for _, _, entry in _entries(models)]
        return {"models": [{**entry, "modified_at": as_time(self._created)} for entry in found]}


class ListRunning(OllamaProtocol):
    """Implements `ResourceProtocol`: the models in memory."""

    operation = Operation(summary="List the models in memory, as Ollama does", answer=objects.RunningList)

    def answer(
        self, models: ModelRegistry, _arguments: Mapping[str, str], _client: QueueClient
    ) -> dict[str, Any]:
        """Return those under their own names, each with when it will be unloaded if it is not used."""
        now = time.time()
        found = []
        for status, description, entry in _entries(models):
            if status.state in _IN_MEMORY and entry["name"] == tagged(status.name):
                left = _NEVER if status.unloads_in is None else status.unloads_in
                running = {"expires_at": as_time(now + left), "size_vram": entry["size"]}
                found.append({**entry, **running, "context_length": description.context_length or 0})
        return {"models": found}


class Version(OllamaProtocol):
    """Implements `ResourceProtocol`: whose API this is."""

    operation = Operation(summary="Say which version of Ollama's API this is", answer=objects.OllamaVersion)

    def answer(
        self, _models: ModelRegistry, _arguments: Mapping[str, str], _client: QueueClient
    ) -> dict[str, Any]:
        """Return the version."""
        return {"version": VERSION}


class Pull(OllamaProtocol):
    """Implements `JsonProtocol`: says that a model is here, and downloads it where that is allowed."""

    operation = Operation(
        summary="Have a model here, as Ollama does", body=NamedBody, answer=objects.PullStatus
    )

    def parse(self, body: bytes) -> RegistryCall:
        """Parse a request. Raises ApiError naming the field that is wrong."""
        parsed = NamedBody.parse(decode_json(body))
        name = parsed.named
        return RegistryCall(parsed, lambda models, wait: _pulled(models, name, wait))


def _pulled(models: ModelRegistry, name: str, wait: float) -> dict[str, Any]:
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


class NotSupported(OllamaProtocol):
    """Implements `ResourceProtocol` for what is not done here; `remedy` says what to do instead."""

    def __init__(self, summary: str, remedy: str) -> None:
        self.operation = Operation(summary=f"Not supported: {summary}", answer=objects.PullStatus)
        self._message = f"This server cannot {summary}: {remedy}."

    def answer(
        self, _models: ModelRegistry, _arguments: Mapping[str, str], _client: QueueClient
    ) -> dict[str, Any]:
        """Raise the ApiError that says so."""
        raise refuse(self._message, code="unsupported")


def refused() -> list[tuple[str, str, NotSupported]]:
    """Return what is not done here: method, address, and how that is said."""
    create = NotSupported(
        "create models", "set one up in the models file, or put its folder where --models-dir looks"
    )
    return [
        ("POST", "/api/create", create),
        ("POST", "/api/blobs/<digest>", create),
        ("POST", "/api/copy", NotSupported("copy models", "give one an alias in the models file")),
        ("DELETE", "/api/delete", NotSupported("delete models", "delete their folders")),
        ("POST", "/api/push", NotSupported("push models", "upload their folders to Hugging Face")),
    ]


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
