"""The schema of a customizable model: its features, its size and the settings in its panel.

What the form says counts; what it leaves open is asked of the server; where neither says anything, a cautious default
is taken. Never raises for a server that is down: Dify asks several times a call, and must be given a schema.
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

from dify_mlx_provider.settings.parameters import ParameterOptions, parameter_rules
from dify_mlx_provider.upstream import discovery
from dify_mlx_provider.upstream.effort_levels import LEVELS, SWITCH, in_order, nearest
from dify_mlx_provider.upstream.server_kinds import PROFILES, ServerKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dify_mlx_provider.upstream.credentials import Credentials
    from dify_mlx_provider.upstream.server_info import ModelInfo, ServerInfo

DEFAULT_CONTEXT_SIZE = 32_768
"""Tokens, where neither form nor server says: what nearly every model has. More might promise Dify too much."""

DEFAULT_EMBEDDING_CONTEXT = 512
"""Tokens of a text to be embedded, where neither form nor server says: the least of the usual models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAbilities:
    """What a model can do, by its form, its server and the defaults together. Sizes are tokens."""

    context_size: int
    max_output: int
    efforts: tuple[str, ...]
    default_effort: str
    reasons: bool
    tools: bool
    vision: bool
    structured_output: bool


def chat_model_schema(name: str, credentials: Credentials) -> AIModelEntity:
    """Return the schema of a chat model that a user added."""
    server = discovery.find_server(credentials)
    model = discovery.find_model(name, credentials)
    abilities = resolve_abilities(credentials, server, model)
    profile = PROFILES[server.kind]
    options = ParameterOptions(
        efforts=abilities.efforts,
        default_effort=abilities.default_effort,
        reasons=abilities.reasons,
        thinking_budget=bool(profile.thinking_budget_field),
        structured_output=abilities.structured_output,
        max_output=abilities.max_output,
        sampling=model.sampling if model is not None else {},
        ignored=profile.ignored_fields,
    )
    return AIModelEntity(
        model=name,
        label=I18nObject(en_US=credentials.display_name or name),
        model_type=ModelType.LLM,
        features=_features(abilities),
        fetch_from=FetchFrom.CUSTOMIZABLE_MODEL,
        model_properties={
            ModelPropertyKey.MODE: "chat",
            ModelPropertyKey.CONTEXT_SIZE: abilities.context_size,
        },
        parameter_rules=[ParameterRule(**rule) for rule in parameter_rules(options)],
    )


def embedding_model_schema(name: str, credentials: Credentials) -> AIModelEntity:
    """Return the schema of an embedding model."""
    properties = {
        ModelPropertyKey.CONTEXT_SIZE: _context_size(name, credentials, "embedding")
        or DEFAULT_EMBEDDING_CONTEXT,
        ModelPropertyKey.MAX_CHUNKS: credentials.max_chunks,
    }
    return _schema_without_panel(name, credentials, ModelType.TEXT_EMBEDDING, properties)


def rerank_model_schema(name: str, credentials: Credentials) -> AIModelEntity:
    """Return the schema of a rerank model."""
    context_size = _context_size(name, credentials, "rerank")
    properties = {} if context_size is None else {ModelPropertyKey.CONTEXT_SIZE: context_size}
    return _schema_without_panel(name, credentials, ModelType.RERANK, properties)


def _context_size(name: str, credentials: Credentials, kind: str) -> int | None:
    model = discovery.find_model(name, credentials, kind)
    return credentials.context_size or (model.context_size if model else None)


def _schema_without_panel(
    name: str, credentials: Credentials, model_type: ModelType, properties: dict[ModelPropertyKey, int]
) -> AIModelEntity:
    return AIModelEntity(
        model=name,
        label=I18nObject(en_US=credentials.display_name or name),
        model_type=model_type,
        fetch_from=FetchFrom.CUSTOMIZABLE_MODEL,
        model_properties=properties,
        parameter_rules=[],
    )


def resolve_abilities(
    credentials: Credentials, server: ServerInfo, model: ModelInfo | None
) -> ModelAbilities:
    """Decide what a model can do; `model` is what the server says of it."""
    context_size = credentials.context_size or (model.context_size if model else None) or DEFAULT_CONTEXT_SIZE
    max_output = credentials.max_output_tokens or (model.max_output_tokens if model else None) or context_size
    capabilities = model.capabilities if model is not None else None
    efforts, reasons = _efforts(credentials, model)

    def has(in_form: bool | None, capability: str, default: bool) -> bool:
        if in_form is not None:
            return in_form
        return default if capabilities is None else capability in capabilities

    server_constrains = (
        server.answered
        and PROFILES[server.kind].structured_output != "prompt"
        and server.kind is not ServerKind.OTHER
    )
    return ModelAbilities(
        context_size=context_size,
        max_output=min(max_output, context_size),
        efforts=efforts,
        default_effort=_default_effort(credentials.effort, model.default_effort if model else None, efforts),
        reasons=reasons,
        tools=has(credentials.tool_calling, "tools", default=True),
        vision=has(credentials.vision, "vision", default=False),
        structured_output=has(credentials.structured_output, "structured_output", default=server_constrains),
    )


def _efforts(credentials: Credentials, model: ModelInfo | None) -> tuple[tuple[str, ...], bool]:
    """The efforts to choose from, and whether the model reasons at all: one that always does has no choice."""
    known = model.efforts if model is not None else None
    match credentials.reasoning:
        case "none":
            return (), False
        case "switch":
            return (known if known and len(known) > 1 else SWITCH), True
        case "effort":
            return (known if known and len(known) > 2 else LEVELS), True
    if known is not None:
        return in_order(known), bool(known)
    if model is not None and model.type in ("embedding", "rerank"):
        return (), False
    return LEVELS, True


def _default_effort(in_form: str | None, of_server: str | None, efforts: Sequence[str]) -> str:
    """The effort the select starts with; "" where there is none to select."""
    return nearest(in_form or of_server or "medium", efforts) if in_order(efforts) else ""


def _features(abilities: ModelAbilities) -> list[ModelFeature]:
    features: list[ModelFeature] = []
    if abilities.reasons:
        features.append(ModelFeature.AGENT_THOUGHT)
    if abilities.tools:
        # Not multi-tool-call: gpt-oss makes one call and waits for its result. Dify's agents treat both alike, and
        # several calls in one answer are read either way.
        features += [ModelFeature.TOOL_CALL, ModelFeature.STREAM_TOOL_CALL]
    if abilities.vision:
        features.append(ModelFeature.VISION)
    if abilities.structured_output:
        features.append(ModelFeature.STRUCTURED_OUTPUT)
    return features
