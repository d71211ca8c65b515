"""Which kind of server answers at an address, and what its models can do. Never raises.

Dify asks for a model's schema several times a call and makes a new object each time; so what was found is cached here
for a while, by address and key, whether good or bad. And it keeps the schema for an hour: so that a server that is off
for a moment does not lose its abilities in Dify for that long, a server that does not answer is described by what it
said last, even to an earlier process (`keep_descriptions`).
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from dify_mlx_provider.servers import kinds, mlx_backend
from dify_mlx_provider.servers.base import (
    Listing,
    ServedModel,
    ServerInfo,
    ServerProfile,
    has_header,
)
from dify_mlx_provider.servers.probe import NO_RESPONSE, Probe
from dify_mlx_provider.upstream.cache import DEFAULT_TTL, LastValues, TtlCache
from dify_mlx_provider.upstream.credentials import ServerKind

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dify_mlx_provider.upstream.credentials import Credentials

KINDS = (
    mlx_backend.PROFILE,
    *(
        kinds.VLLM,
        kinds.LLAMA_CPP,
        kinds.MLX_VLM,
        kinds.RAPID_MLX,
        kinds.LM_STUDIO,
        kinds.MLX_LM,
        kinds.OLLAMA,
    ),
)
"""The kinds that can be told apart, in the order in which they are looked for."""

OTHER = ServerProfile(
    kind=ServerKind.OTHER,
    display_name="another OpenAI-compatible server",
    effort_fields=("reasoning_effort", "chat_template_kwargs"),
    structured_output="unknown",
    default_max_tokens=None,
)
"""What any other server is sent: what it does not know is left out when it refuses it (`requests`)."""

PROFILES: Mapping[ServerKind, ServerProfile] = {profile.kind: profile for profile in (*KINDS, OTHER)}

PRESUMED = mlx_backend.PROFILE
"""What a server is taken for where none has ever answered: the plugin comes with it."""

OWN_FIELDS = frozenset[str]().union(*(profile.own_fields for profile in KINDS))
"""Fields that only one kind of server reads."""

FAILURE_TTL = 5.0
"""Seconds until a server that did not answer is asked again: it may be starting, and Dify keeps what it is told."""

_servers: TtlCache[ServerInfo] = TtlCache(
    lambda found: DEFAULT_TTL if found is not None and found.answered else FAILURE_TTL
)
_models: TtlCache[ServedModel] = TtlCache(max_entries=256)
_refused_fields: TtlCache[set[str]] = TtlCache(max_entries=256)
_last_servers = LastValues(ServerInfo)
_last_models = LastValues(ServedModel, max_files=256, max_file_bytes=16 * 1024)


def keep_descriptions(folder: Path) -> None:
    """Keep what servers say of themselves in a folder, for processes to come."""
    _last_servers.keep_in(folder / "servers")
    _last_models.keep_in(folder / "models")


def find_server(credentials: Credentials) -> ServerInfo:
    """Return what is known of the server at an address. A kind set in the form is believed."""
    key = _cache_key(credentials)
    found = _servers.get(key, lambda: _describe(key, credentials)) or ServerInfo()
    kind = credentials.server_kind
    return found if kind is None else replace(found, kind=kind)


def find_server_after_refusal(credentials: Credentials, model: str) -> ServerInfo:
    """Return what is known of a server that has refused a model. If it listed that model, it is asked again."""
    server = find_server(credentials)
    if any(model == listed.name for listed in server.models):
        _servers.forget(_cache_key(credentials))
        server = find_server(credentials)
    return server


def find_profile(credentials: Credentials) -> ServerProfile:
    """Return what is known of the kind of server at an address."""
    return PROFILES[find_server(credentials).kind]


def find_model(name: str, credentials: Credentials, kind: str = "llm") -> ServedModel | None:
    """Return what the server says of a model; None if it says nothing."""
    server = find_server(credentials)
    listed = server.model(name, kind)
    describe = PROFILES[server.kind].describe_model
    if listed is None or describe is None:
        return listed
    key = f"{_cache_key(credentials)} {listed.name}"
    if not server.answered:
        return _last_models.get(key)

    def fetch() -> ServedModel | None:
        described = describe(Probe(credentials), listed)
        if described is None:
            return _last_models.get(key)
        _last_models.set(key, described)
        return described

    return _models.get(key, fetch)


def fields_refused_before(credentials: Credentials, model: str) -> set[str]:
    """Return the fields of a chat request that the server was seen to refuse for a model; the caller adds to them."""
    fields = _refused_fields.get(f"{_cache_key(credentials)} {model}", set)
    return set() if fields is None else fields


def forget_servers() -> None:
    """Ask every server again, as when a user saves a form: it may just have been started."""
    _servers.clear()
    _models.clear()
    _refused_fields.clear()


def _cache_key(credentials: Credentials) -> str:
    key_digest = hashlib.sha256(credentials.api_key.encode()).hexdigest()[:16]
    return f"{credentials.base_url} {key_digest}"


def _describe(key: str, credentials: Credentials) -> ServerInfo | None:
    """What the server says now, or what it said last; None if nothing ever answered."""
    found = _identify(credentials) if credentials.base_url else None
    if found is not None and found.answered and (found.models or found.kind is not ServerKind.OTHER):
        _last_servers.set(key, found)
        return found
    # Nothing, a refusal, or something that may only stand in for the server, such as a proxy before it.
    last = _last_servers.get(key)
    return found if last is None else replace(last, answered=False)


def _identify(credentials: Credentials) -> ServerInfo | None:
    """Ask the server; None if nothing answers. What answers but does not say what it is has no models."""
    probe = Probe(credentials)
    response = probe.get_models()
    if response is None:
        # Without a folder of downloads mlx_lm.server has no list, and drops the connection.
        return kinds.recognise_mlx_lm(Listing(NO_RESPONSE, probe))
    if response.status >= 400:
        named = next((profile for profile in KINDS if has_header(profile, response)), OTHER)
        return ServerInfo(kind=named.kind, reached=True)
    listing = Listing(response, probe)
    found = next(filter(None, (_recognise(profile, listing) for profile in KINDS)), None)
    return found or replace(listing.server(OTHER), answered=isinstance(response.json, dict))


def _recognise(profile: ServerProfile, listing: Listing) -> ServerInfo | None:
    if profile.recognise is not None:
        return profile.recognise(listing)
    return listing.server(profile) if listing.names(profile) else None
