"""Which kind of server answers at an address, and what its models can do. Never raises.

Dify asks for a model's schema several times a call and makes a new object each time; so what was found is cached here
for a while, by address and key, whether good or bad. A server that falls silent is described by its last answer.

    mlx-backend      owned_by, the header Server; /v1/models says everything
    vLLM, llama.cpp  owned_by; max_model_len, meta.n_ctx
    LM Studio        /api/v0/models: type, context, capabilities
    Ollama           /api/version; /api/show for one model: capabilities, num_ctx
    mlx_lm.server    Python's own HTTP server, whose /health says {"status": "ok"}
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from dify_mlx_provider.upstream.cache import TtlCache
from dify_mlx_provider.upstream.listings import (
    Health,
    ListedModel,
    LmStudioModel,
    OllamaModel,
    parse_entries,
)
from dify_mlx_provider.upstream.probe import Probe
from dify_mlx_provider.upstream.server_info import ModelInfo, ServerInfo
from dify_mlx_provider.upstream.server_kinds import ServerKind

if TYPE_CHECKING:
    from dify_mlx_provider.upstream.credentials import Credentials

_servers: TtlCache[ServerInfo] = TtlCache()
_ollama_models: TtlCache[ModelInfo] = TtlCache(max_entries=256)


def find_server(credentials: Credentials) -> ServerInfo:
    """Return what is known of the server at an address. A kind set in the form is believed."""
    found = _servers.get(_cache_key(credentials), lambda: _identify(credentials)) or ServerInfo()
    kind = credentials.server_kind
    return found if kind is None else replace(found, kind=kind)


def find_model(name: str, credentials: Credentials, kind: str = "llm") -> ModelInfo | None:
    """Return what the server says of a model; None if it says nothing."""
    server = find_server(credentials)
    listed = server.model(name, kind)
    if listed is None or server.kind is not ServerKind.OLLAMA:
        return listed
    key = f"{_cache_key(credentials)} {listed.name}"
    return _ollama_models.get(key, lambda: _show_ollama_model(credentials, listed))


def forget_servers() -> None:
    """Clear the cache, as when a user saves a form: the server may just have been started."""
    _servers.clear()
    _ollama_models.clear()


def _cache_key(credentials: Credentials) -> str:
    key_digest = hashlib.sha256(credentials.api_key.encode()).hexdigest()[:16]
    return f"{credentials.base_url} {key_digest} {credentials.server_kind}"


def _identify(credentials: Credentials) -> ServerInfo | None:
    probe = Probe(credentials)
    response = probe.get_models()
    if response is None:
        # mlx_lm.server drops the connection when it has no folder of downloads to list.
        return ServerInfo(kind=ServerKind.MLX_LM, answered=True) if _is_mlx_lm(probe) else None
    is_mlx_backend = response.server_header.startswith("mlx-backend")
    if response.status >= 400 and not is_mlx_backend:
        return None
    listed = parse_entries(response.json, ListedModel)
    owners = {entry.owned_by for entry in listed}
    if is_mlx_backend or "mlx-backend" in owners:
        return ServerInfo(
            kind=ServerKind.MLX_BACKEND,
            version=_mlx_backend_version(response.server_header, probe),
            models=tuple(entry.mlx_backend_info() for entry in listed),
            answered=response.status < 400,
        )
    models = tuple(entry.info() for entry in listed)
    if "vllm" in owners:
        return ServerInfo(kind=ServerKind.VLLM, models=models, answered=True)
    if "llamacpp" in owners or response.server_header.startswith("llama.cpp"):
        return ServerInfo(kind=ServerKind.LLAMA_CPP, models=models, answered=True)
    # Others borrow LM Studio's word for the owner, but not its own list.
    if ("organization_owner" in owners or not listed) and (own_list := _lm_studio_models(probe)):
        return ServerInfo(kind=ServerKind.LM_STUDIO, models=own_list, answered=True)
    if owners <= {None} and _is_mlx_lm(probe):
        return ServerInfo(kind=ServerKind.MLX_LM, models=models, answered=True)
    if _is_ollama(probe):
        return ServerInfo(kind=ServerKind.OLLAMA, models=models, answered=True)
    return ServerInfo(models=models, answered=isinstance(response.json, dict))


def _mlx_backend_version(server_header: str, probe: Probe) -> str:
    version = server_header.partition("/")[2].split(" ")[0]
    if version:
        return version
    response = probe.get("/health")  # a proxy may write a header of its own
    health = response.parse_as(Health) if response is not None else None
    return (health.version if health else None) or ""


def _is_mlx_lm(probe: Probe) -> bool:
    health = probe.get("/health")
    return (
        health is not None
        and health.server_header.startswith("BaseHTTP/")
        and health.json == {"status": "ok"}
    )


def _lm_studio_models(probe: Probe) -> tuple[ModelInfo, ...]:
    """Return LM Studio's own list; empty if this is another server."""
    response = probe.get("/api/v0/models")
    entries = parse_entries(response.json, LmStudioModel) if response is not None else []
    return tuple(entry.info() for entry in entries) if any(entry.type for entry in entries) else ()


def _is_ollama(probe: Probe) -> bool:
    version = probe.get("/api/version")
    return version is not None and isinstance(version.json, dict) and "version" in version.json


def _show_ollama_model(credentials: Credentials, listed: ModelInfo) -> ModelInfo | None:
    response = Probe(credentials).post("/api/show", {"model": listed.name})
    model = response.parse_as(OllamaModel) if response is not None else None
    return model.info(listed) if model is not None else None
