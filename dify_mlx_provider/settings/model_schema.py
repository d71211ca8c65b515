"""A model's schema: its label, its features, its size and the settings in its panel.

Four sources, the strongest first: what the form says · what the server says, or said last · for a predefined model what
its file in provider_assets/ declares · a cautious default. Dify sends the same question for a predefined model and for
one that a user added under the same name; only the form differs, so both are answered in the same way, and a form with
no more than an address is enough. Never raises for a server that is down: Dify asks several times a call, and must be
given a schema.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dify_plugin.entities import I18nObject
from dify_plugin.entities.model import (
    AIModelEntity,
    FetchFrom,
    ModelFeature,
    ModelPropertyKey,
    ModelType,
    ParameterRule,
)

from dify_mlx_provider.servers import discovery
from dify_mlx_provider.servers.base import ServedModel
from dify_mlx_provider.servers.efforts import LEVELS, SWITCH, in_order, nearest
from dify_mlx_provider.settings.parameters import ParameterOptions, parameter_rules
from dify_mlx_provider.upstream.credentials import Credentials

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


DEFAULT_CONTEXT_SIZE = 32_768
"""Tokens, where neither form nor server says: what nearly every model has. More might promise Dify too much."""

DEFAULT_EMBEDDING_CONTEXT = 512
"""Tokens of a text to be embedded, where neither form nor server says: the least of the usual models."""


def model_schema(
    model_type: ModelType, name: str, credentials: Credentials, declared: AIModelEntity | None = None
) -> AIModelEntity:
    """Return a model's schema; `declared` is a predefined model's declaration."""
    label = I18nObject(en_US=credentials.display_name or name)
    if declared is not None and not credentials.display_name:
        label = declared.label
    match model_type:
        case ModelType.TEXT_EMBEDDING:
            details = _embedding_details(name, credentials)
        case ModelType.RERANK:
            details = _rerank_details(name, credentials)
        case _:
            details = _chat_details(name, credentials, declared)
    return AIModelEntity(
        model=name,
        label=label,
        model_type=model_type,
        fetch_from=FetchFrom.CUSTOMIZABLE_MODEL if declared is None else FetchFrom.PREDEFINED_MODEL,
        pricing=None if declared is None else declared.pricing,
        **details,
    )


def _chat_details(name: str, credentials: Credentials, declared: AIModelEntity | None) -> dict[str, Any]:
    server, said = discovery.find_server(credentials), discovery.find_model(name, credentials)
    # If a server that has never answered turns out to be another one than presumed, what was promised is still kept:
    # an answer that fits a schema is asked for in the prompt then.
    is_known = server.reached or credentials.server_kind is not None
    profile = discovery.PROFILES[server.kind] if is_known else discovery.PRESUMED
    sources = [said] if said is not None else []
    sources += [_declared_model(declared)] if declared is not None else []
    context_size = _first(credentials.context_size, *(source.context_size for source in sources))
    context_size = context_size or DEFAULT_CONTEXT_SIZE
    max_output = _first(credentials.max_output_tokens, *(source.max_output_tokens for source in sources))
    known_efforts = _first(*(source.efforts for source in sources))
    if said is not None and said.type in ("embedding", "rerank"):
        known_efforts = known_efforts or ()
    efforts, reasons = _efforts(credentials, known_efforts)
    default_effort = _first(credentials.effort, *(source.default_effort for source in sources)) or "medium"
    tools = _first(credentials.tool_calling, *(source.has("tools") for source in sources))
    vision = _first(credentials.vision, *(source.has("vision") for source in sources))
    structured_output = _first(
        credentials.structured_output,
        *(source.has("structured_output") for source in sources),
        profile.structured_output in ("formats", "schemas"),
    )
    options = ParameterOptions(
        efforts=efforts,
        default_effort=nearest(default_effort, efforts) if in_order(efforts) else "",
        reasons=reasons,
        thinking_budget=bool(profile.thinking_budget_field),
        answer_reserve="answer_reserve" in profile.own_fields,
        structured_output=bool(structured_output),
        max_output=min(max_output or context_size, context_size),
        default_max_tokens=(said.default_max_tokens if said is not None else None)
        or profile.answer_limit(credentials.max_output_tokens),
        sampling=said.sampling if said is not None else {},
        ignored=profile.ignored_fields,
    )
    features = {
        ModelFeature.AGENT_THOUGHT: reasons,
        # Not multi-tool-call: gpt-oss makes one call and waits for its result. Dify's agents treat both alike, and
        # several calls in one answer are read either way.
        ModelFeature.TOOL_CALL: tools is not False,
        ModelFeature.STREAM_TOOL_CALL: tools is not False,
        ModelFeature.VISION: vision,
        ModelFeature.STRUCTURED_OUTPUT: structured_output,
    }
    return {
        "features": [feature for feature, has in features.items() if has],
        "model_properties": {
            ModelPropertyKey.MODE: "chat",
            ModelPropertyKey.CONTEXT_SIZE: context_size,
        },
        "parameter_rules": [ParameterRule(**rule) for rule in parameter_rules(options)],
    }


def _embedding_details(name: str, credentials: Credentials) -> dict[str, Any]:
    size = _context_size(name, credentials, "embedding") or DEFAULT_EMBEDDING_CONTEXT
    properties = {
        ModelPropertyKey.CONTEXT_SIZE: size,
        ModelPropertyKey.MAX_CHUNKS: credentials.max_chunks,
    }
    return {"model_properties": properties}


def _rerank_details(name: str, credentials: Credentials) -> dict[str, Any]:
    size = _context_size(name, credentials, "rerank")
    return {"model_properties": {} if size is None else {ModelPropertyKey.CONTEXT_SIZE: size}}


def _context_size(name: str, credentials: Credentials, kind: str) -> int | None:
    model = discovery.find_model(name, credentials, kind)
    return credentials.context_size or (model.context_size if model else None)


_DECLARED = {
    "tools": ModelFeature.TOOL_CALL,
    "vision": ModelFeature.VISION,
    "structured_output": ModelFeature.STRUCTURED_OUTPUT,
}
"""Capabilities, in the servers' words and in Dify's."""


def _declared_model(declared: AIModelEntity) -> ServedModel:
    """Return what a predefined model's file says, in the words of what a server says."""
    rules = {rule.name: rule for rule in declared.parameter_rules}
    features = declared.features or []
    capabilities = {capability for capability, feature in _DECLARED.items() if feature in features}
    effort = rules.get("reasoning_effort")
    always = ("medium",) if ModelFeature.AGENT_THOUGHT in features else ()
    return ServedModel(
        name=declared.model,
        context_size=declared.model_properties.get(ModelPropertyKey.CONTEXT_SIZE),
        capabilities=frozenset(capabilities),
        efforts=always if effort is None else tuple(effort.options),
        default_effort=None if effort is None else str(effort.default),
    )


def _first[T](*values: T | None) -> T | None:
    """The first value that says something."""
    return next((value for value in values if value is not None), None)


def _efforts(credentials: Credentials, known: tuple[str, ...] | None) -> tuple[tuple[str, ...], bool]:
    """The efforts to choose from, and whether the model reasons at all: one that always does has no choice."""
    match credentials.reasoning:
        case "none":
            return (), False
        case "switch":
            return (known if known and len(known) > 1 else SWITCH), True
        case "effort":
            return (known if known and len(known) > 2 else LEVELS), True
    return (LEVELS, True) if known is None else (in_order(known), bool(known))


class ServerSchemas:
    """A model class's schemas; listed before the SDK's own class.

    The SDK looks a name up among the predefined models first, and takes what it finds there for the whole truth. This
    replaces the look-up from which everything else follows: parameter rules, features, the model's mode, prices.
    """

    model_type: ModelType
    predefined_models: Callable[[], list[AIModelEntity]]

    def get_model_schema(
        self, model: str, credentials: Mapping[str, Any] | None = None
    ) -> AIModelEntity | None:
        """Return the schema of a predefined or added model; None for an unknown one without a form."""
        declared = next((each for each in self.predefined_models() if each.model == model), None)
        if not credentials:
            return declared
        return model_schema(self.model_type, model, Credentials.from_form_leniently(credentials), declared)

    def get_customizable_model_schema(
        self, model: str, credentials: Mapping[str, Any]
    ) -> AIModelEntity | None:
        """Return the schema of an added model."""
        return self.get_model_schema(model, credentials)
