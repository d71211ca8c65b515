"""Which kind of server answers at an address, and what its models can do. Never raises.

Dify asks for a model's schema several times a call and makes a new object each time; so what was found is cached here
for a while, by address and key, whether good or bad. And it keeps the schema for an hour: so that a server that is off
for a moment does not lose its abilities in Dify for that long, a server that does not answer is described by what it
said last, even to an earlier process (`keep_descriptions`).

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

from dify_mlx_provider.upstream.cache import DEFAULT_TTL, TtlCache
from dify_mlx_provider.upstream.last_values import LastValues
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
    from collections.abc import Iterable
    from pathlib import Path

    from dify_mlx_provider.upstream.credentials import Credentials

FAILURE_TTL = 5.0
"""Seconds until a server that did not answer is asked again: it may be starting, and Dify keeps what it is told."""

_servers: TtlCache[ServerInfo] = TtlCache(
    lambda found: DEFAULT_TTL if found is not None and found.answered else FAILURE_TTL
)
_ollama_models: TtlCache[ModelInfo] = TtlCache(max_entries=256)
_last_servers = LastValues(ServerInfo)
_last_ollama_models = LastValues(ModelInfo, max_files=256, max_file_bytes=16 * 1024)


def keep_descriptions(folder: Path) -> None:
    """Keep what servers say of themselves in a folder, for processes to come."""
    _last_servers.keep_in(folder / "servers")
    _last_ollama_models.keep_in(folder / "ollama")


def find_server(credentials: Credentials) -> ServerInfo:
    """Return what is known of the server at an address. A kind set in the form is believed."""
    key = _cache_key(credentials)
    found = _servers.get(key, lambda: _describe(key, credentials)) or ServerInfo()
    kind = credentials.server_kind
    return found if kind is None else replace(found, kind=kind)


def find_model(name: str, credentials: Credentials, kind: str = "llm") -> ModelInfo | None:
    """Return what the server says of a model; None if it says nothing."""
    server = find_server(credentials)
    listed = server.model(name, kind)
    if listed is None or server.kind is not ServerKind.OLLAMA:
        return listed
    key = f"{_cache_key(credentials)} {listed.name}"
    if not server.answered:
        return _last_ollama_models.get(key)
    return _ollama_models.get(key, lambda: _describe_ollama_model(key, credentials, listed))


def forget_servers() -> None:
    """Ask every server again, as when a user saves a form: it may just have been started."""
    _servers.clear()
    _ollama_models.clear()


def _cache_key(credentials: Credentials) -> str:
    key_digest = hashlib.sha256(credentials.api_key.encode()).hexdigest()[:16]
    return f"{credentials.base_url} {key_digest}"


def _describe(key: str, credentials: Credentials) -> ServerInfo | None:
    """What the server says now, or what it said last; None if nobody ever answered."""
    found = _identify(credentials) if credentials.base_url else None
    if found is not None and found.answered and (found.models or found.kind is not ServerKind.OTHER):
        _last_servers.set(key, found)
        return found
    # Nobody, a refusal, or something that may only stand in for the server, such as a proxy before it.
    last = _last_servers.get(key)
    return found if last is None else replace(last, answered=False)


def _identify(credentials: Credentials) -> ServerInfo | None:
    """Ask the server; None if nothing answers. What answers but does not say what it is has no models."""
    probe = Probe(credentials)
    response = probe.get_models()
    if response is None:
        # mlx_lm.server drops the connection when it has no folder of downloads to list.
        return _server(ServerKind.MLX_LM) if _is_mlx_lm(probe) else None
    is_mlx_backend = response.server_header.startswith("mlx-backend")
    if response.status >= 400:
        return _server(ServerKind.MLX_BACKEND if is_mlx_backend else ServerKind.OTHER, answered=False)
    listed = parse_entries(response.json, ListedModel)
    owners = {entry.owned_by for entry in listed}
    if is_mlx_backend or "mlx-backend" in owners:
        version = _mlx_backend_version(response.server_header, probe)
        return _server(
            ServerKind.MLX_BACKEND, (entry.mlx_backend_info() for entry in listed), version=version
        )
    models = tuple(entry.info() for entry in listed)
    if "vllm" in owners:
        return _server(ServerKind.VLLM, models)
    if "llamacpp" in owners or response.server_header.startswith("llama.cpp"):
        return _server(ServerKind.LLAMA_CPP, models)
    # Others borrow LM Studio's word for the owner, but not its own list.
    if ("organization_owner" in owners or not listed) and (own_list := _lm_studio_models(probe)):
        return _server(ServerKind.LM_STUDIO, own_list)
    if owners <= {None} and _is_mlx_lm(probe):
        return _server(ServerKind.MLX_LM, models)
    if _is_ollama(probe):
        return _server(ServerKind.OLLAMA, models)
    return _server(ServerKind.OTHER, models, answered=isinstance(response.json, dict))


def _server(
    kind: ServerKind, models: Iterable[ModelInfo] = (), *, version: str = "", answered: bool = True
) -> ServerInfo:
    return ServerInfo(kind=kind, version=version, models=tuple(models), answered=answered, reached=True)


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


def _describe_ollama_model(key: str, credentials: Credentials, listed: ModelInfo) -> ModelInfo | None:
    response = Probe(credentials).post("/api/show", {"model": listed.name})
    model = response.parse_as(OllamaModel) if response is not None else None
    if model is None:
        return _last_ollama_models.get(key)
    described = model.info(listed)
    _last_ollama_models.set(key, described)
    return described
