"""What Dify is told of a customizable model: its features, its size and its settings.

What the form says counts; what it leaves open the server is asked for; and where neither says anything, a careful
guess is made. Never raises for a server that is down: Dify asks several times a call, and must be given a schema.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dify_plugin.entities import I18nObject
from dify_plugin.entities.model import (
    AIModelEntity,
    FetchFrom,
    ModelFeature,
    ModelPropertyKey,
    ModelType,
    ParameterRule,
)

from dify_mlx_provider.settings.parameters import Settings, rules
from dify_mlx_provider.upstream import discovery
from dify_mlx_provider.upstream.effort_levels import LEVELS, SWITCH, in_order, nearest
from dify_mlx_provider.upstream.server_kinds import WAYS, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dify_mlx_provider.upstream.credentials import Credentials
    from dify_mlx_provider.upstream.discovery import Model, Server

UNKNOWN_CONTEXT = 32_768
"""Tokens, where nobody says: what nearly every model can do. More would be promised to Dify than may be there."""

UNKNOWN_LENGTH = 512
"""Tokens of a text to be embedded, where nobody says: what the smallest of the usual models read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """A model as the form, the server and the guesses together describe it."""

    context_size: int
    max_output: int
    efforts: tuple[str, ...]
    default_effort: str
    reasons: bool
    tools: bool
    vision: bool
    structured: bool


def customizable_model(name: str, credentials: Credentials) -> AIModelEntity:
    """Return the schema of a model that a user added."""
    server = discovery.server(credentials)
    told = discovery.model(name, credentials)
    traits = described(name, credentials, server, told)
    ways = WAYS[server.kind]
    settings = Settings(
        efforts=traits.efforts,
        default_effort=traits.default_effort,
        reasons=traits.reasons,
        thinking_budget=bool(ways.thinking_budget),
        structured=traits.structured,
        max_output=traits.max_output,
        sampling=told.sampling if told is not None else {},
        unread=ways.unread,
    )
    return AIModelEntity(
        model=name,
        label=I18nObject(en_US=credentials.display_name or name),
        model_type=ModelType.LLM,
        features=_features(traits),
        fetch_from=FetchFrom.CUSTOMIZABLE_MODEL,
        model_properties={
            ModelPropertyKey.MODE: "chat",
            ModelPropertyKey.CONTEXT_SIZE: traits.context_size,
        },
        parameter_rules=[ParameterRule(**rule) for rule in rules(settings)],
    )


def embedding_model(name: str, credentials: Credentials) -> AIModelEntity:
    """Return the schema of a model that makes vectors."""
    properties = {
        ModelPropertyKey.CONTEXT_SIZE: _length(name, credentials, "embedding") or UNKNOWN_LENGTH,
        ModelPropertyKey.MAX_CHUNKS: credentials.max_chunks,
    }
    return _reader(name, credentials, ModelType.TEXT_EMBEDDING, properties)


def rerank_model(name: str, credentials: Credentials) -> AIModelEntity:
    """Return the schema of a model that ranks."""
    length = _length(name, credentials, "rerank")
    properties = {} if length is None else {ModelPropertyKey.CONTEXT_SIZE: length}
    return _reader(name, credentials, ModelType.RERANK, properties)


def _length(name: str, credentials: Credentials, kind: str) -> int | None:
    told = discovery.model(name, credentials, kind)
    return credentials.context_size or (told.context_size if told else None)


def _reader(
    name: str, credentials: Credentials, kind: ModelType, properties: dict[ModelPropertyKey, int]
) -> AIModelEntity:
    return AIModelEntity(
        model=name,
        label=I18nObject(en_US=credentials.display_name or name),
        model_type=kind,
        fetch_from=FetchFrom.CUSTOMIZABLE_MODEL,
        model_properties=properties,
        parameter_rules=[],
    )


def described(name: str, credentials: Credentials, server: Server, told: Model | None) -> Traits:
    """Put together what is known of a model."""
    context = credentials.context_size or (told.context_size if told else None) or UNKNOWN_CONTEXT
    most = credentials.max_output_tokens or (told.max_output_tokens if told else None) or context
    capabilities = told.capabilities if told is not None else None
    efforts, reasons = _efforts(name, credentials, told)

    def can(form: bool | None, word: str, unknown: bool) -> bool:
        if form is not None:
            return form
        return unknown if capabilities is None else word in capabilities

    holds_formats = (
        server.answered and WAYS[server.kind].structure != "prompt" and server.kind is not Kind.OTHER
    )
    return Traits(
        context_size=context,
        max_output=min(most, context),
        efforts=efforts,
        default_effort=_default(credentials.effort, told.default_effort if told else None, efforts),
        reasons=reasons,
        tools=can(credentials.tool_calling, "tools", unknown=True),
        vision=can(credentials.vision, "vision", unknown=False),
        structured=can(credentials.structured_output, "structured_output", unknown=holds_formats),
    )


def _efforts(name: str, credentials: Credentials, told: Model | None) -> tuple[tuple[str, ...], bool]:
    """The efforts to choose from, and whether the model reasons at all: one that always does leaves no choice."""
    known = told.efforts if told is not None else None
    match credentials.reasoning:
        case "none":
            return (), False
        case "switch":
            return (known if known and len(known) > 1 else SWITCH), True
        case "effort":
            return (known if known and len(known) > 2 else LEVELS), True
    if known is not None:
        return in_order(known), bool(known)
    if told is not None and told.type in ("embedding", "rerank"):
        return (), False
    return LEVELS, True


def _default(wished: str | None, of_server: str | None, efforts: Sequence[str]) -> str:
    """The effort the select starts with: the wished one, or what comes nearest to it."""
    return nearest(wished or of_server or "medium", efforts) if in_order(efforts) else ""


def _features(traits: Traits) -> list[ModelFeature]:
    features: list[ModelFeature] = []
    if traits.reasons:
        features.append(ModelFeature.AGENT_THOUGHT)
    if traits.tools:
        # Not multi-tool-call: gpt-oss makes one call and waits for its result. Dify's agents treat both alike, and
        # what a model calls at once is read either way.
        features += [ModelFeature.TOOL_CALL, ModelFeature.STREAM_TOOL_CALL]
    if traits.vision:
        features.append(ModelFeature.VISION)
    if traits.structured:
        features.append(ModelFeature.STRUCTURED_OUTPUT)
    return features
