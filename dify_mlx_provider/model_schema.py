"""What Dify is told of a customizable model: its features, its size and its settings.

Made from the credential form alone, so it is there at once and never fails because a server is down. The settings
are those of the predefined `default` model, less what the form says the model does not have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dify_plugin.entities import I18nObject
from dify_plugin.entities.model import (
    AIModelEntity,
    FetchFrom,
    ModelFeature,
    ModelPropertyKey,
    ModelType,
    ParameterRule,
    ParameterType,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .credentials import Credentials

EFFORT = "reasoning_effort"


def customizable_model(
    model: str, credentials: Credentials, predefined: Iterable[AIModelEntity]
) -> AIModelEntity:
    """Return the schema of a model that the user described in the form."""
    rules = next((list(entity.parameter_rules) for entity in predefined if entity.model == "default"), [])
    features: list[ModelFeature] = []
    if credentials.reasoning != "none":
        features.append(ModelFeature.AGENT_THOUGHT)
    if credentials.tool_calling:
        features += [ModelFeature.TOOL_CALL, ModelFeature.STREAM_TOOL_CALL]
    if credentials.vision:
        features.append(ModelFeature.VISION)
    if credentials.structured_output:
        features.append(ModelFeature.STRUCTURED_OUTPUT)
    return AIModelEntity(
        model=model,
        label=I18nObject(en_US=model),
        model_type=ModelType.LLM,
        features=features,
        fetch_from=FetchFrom.CUSTOMIZABLE_MODEL,
        model_properties={
            ModelPropertyKey.MODE: "chat",
            ModelPropertyKey.CONTEXT_SIZE: credentials.context_size,
        },
        parameter_rules=list(_rules(rules, credentials)),
    )


def _rules(rules: Iterable[ParameterRule], credentials: Credentials) -> Iterable[ParameterRule]:
    for rule in rules:
        if rule.name == EFFORT and credentials.reasoning != "effort":
            if credentials.reasoning == "switch":
                yield _THINKING_SWITCH
            continue
        if rule.name == "max_tokens":
            limit = min(credentials.max_output_tokens, credentials.context_size)
            default = min(int(rule.default), limit) if rule.default is not None else None
            yield rule.model_copy(update={"max": float(limit), "default": default})
            continue
        yield rule
    if credentials.structured_output:
        yield _RESPONSE_FORMAT
        yield _JSON_SCHEMA


_THINKING_SWITCH = ParameterRule(
    name="enable_thinking",
    label=I18nObject(en_US="Thinking", ja_JP="思考", zh_Hans="思考"),
    type=ParameterType.BOOLEAN,
    help=I18nObject(
        en_US="Whether the model reasons before it answers.",
        ja_JP="回答の前に推論するかどうか。",
        zh_Hans="模型在回答前是否进行推理。",
    ),
    required=True,
    default=True,
)
_RESPONSE_FORMAT = ParameterRule(
    name="response_format",
    label=I18nObject(en_US="Response format", ja_JP="回答形式", zh_Hans="回复格式"),
    type=ParameterType.STRING,
    options=["text", "json_object", "json_schema"],
)
_JSON_SCHEMA = ParameterRule(
    name="json_schema",
    label=I18nObject(en_US="JSON schema", ja_JP="JSON スキーマ", zh_Hans="JSON Schema"),
    type=ParameterType.TEXT,
)
