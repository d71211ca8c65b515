"""From Dify's call to a chat request: messages, tools and parameters as the server wants them.

Dify keeps the thinking block in its history and sends it back; `sanitise` moves it to `reasoning_content` inside a tool
loop. From answered turns it removes it, unless the server says that it wants it back (mlx-backend, for models that were
trained to see it again): others would put it into the prompt of any model. Dify also sends empty values where it has
none; they are left out.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dify_plugin.entities.model.message import (
    AssistantPromptMessage,
    PromptMessage,
    PromptMessageTool,
    ToolPromptMessage,
    UserPromptMessage,
)

from dify_mlx_provider.chat.content_parts import AcceptedMedia, message_content
from dify_mlx_provider.chat.think_block import remove_guards, without_breaks
from dify_mlx_provider.servers.requests import parse_extra_body
from mlx_backend.conversation.dialects.base import HistoryPolicy
from mlx_backend.conversation.history import sanitise
from mlx_backend.conversation.json_values import unwrapped_schema

if TYPE_CHECKING:
    from dify_mlx_provider.servers.base import ServedModel
    from dify_mlx_provider.upstream.credentials import Credentials


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInvocation:
    """One call of Dify to a chat model.

    `form` is the credential form as Dify sent it, `parameters` are the settings with the SDK's defaults, `chosen` names
    those that Dify sent, and `efforts` are those the model has. `user` is Dify's id of who asks.
    """

    model: str
    form: Mapping[str, Any]
    messages: Sequence[PromptMessage]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[PromptMessageTool] = ()
    stop: Sequence[str] = ()
    stream: bool = True
    user: str | None = None
    chosen: Collection[str] = ()
    efforts: Collection[str] = ()


def chat_request(
    call: ChatInvocation, credentials: Credentials, described: ServedModel | None
) -> dict[str, Any]:
    """Return the body of one streamed chat request. Raises ValueError with a sentence for the user.

    `described` is what the server says of the model.
    """
    tool_fields = [tool_field(tool) for tool in call.tools]
    media = AcceptedMedia.of(call.model, credentials, described)
    questions = [
        index for index, message in enumerate(call.messages) if isinstance(message, UserPromptMessage)
    ]
    asked = questions[-1] if questions else 0
    shown = without_breaks(
        [_message(message, media, is_earlier=index < asked) for index, message in enumerate(call.messages)]
    )
    preserves = described is not None and described.preserves_reasoning
    history = sanitise(shown, tools=tool_fields, policy=HistoryPolicy(keeps_answered_turns=preserves))
    for message in history:
        if message["role"] != "assistant":
            continue
        message["content"] = remove_guards(message["content"])
        if reasoning := message.get("reasoning_content"):
            message["reasoning_content"] = remove_guards(reasoning)
    body: dict[str, Any] = {
        "model": call.model,
        "messages": history,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body.update(_parameters(call.parameters))
    if tool_fields:
        body["tools"] = tool_fields
    if words := [word for word in call.stop if word]:
        body["stop"] = words
    return body


def wants_structure(parameters: Mapping[str, Any]) -> bool:
    """Whether the answer is to be JSON: then the text may hold nothing but the answer."""
    return _wanted_format(parameters) not in ("text", "xml")


def _wanted_format(parameters: Mapping[str, Any]) -> str:
    """The setting Response format; a schema without a format means json_schema."""
    default = "json_schema" if parameters.get("json_schema") else "text"
    return str(parameters.get("response_format") or default).strip().lower()


def _message(message: PromptMessage, media: AcceptedMedia, *, is_earlier: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "role": message.role.value,
        "content": message_content(message, media, is_earlier=is_earlier),
    }
    if message.name:
        fields["name"] = message.name
    match message:
        case AssistantPromptMessage() if message.tool_calls:
            fields["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call in message.tool_calls
            ]
        case ToolPromptMessage() if message.tool_call_id:
            fields["tool_call_id"] = message.tool_call_id
    return fields


def tool_field(tool: PromptMessageTool) -> dict[str, Any]:
    """Return a tool as a request offers it."""
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
    }


def _parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Dify's model parameters as request fields; a few change their shape."""
    fields = {name: value for name, value in parameters.items() if value is not None and value != ""}
    fields.pop("reasoning_format", None)  # for the plugin: whether the block is shown
    fields.pop("long_conversations", None)  # for the plugin: whether old turns may be left out
    if (extra := fields.pop("extra_body", None)) is not None:
        fields["extra_body"] = parse_extra_body(extra)
    schema = fields.pop("json_schema", None)
    fields.pop("response_format", None)
    match wanted := _wanted_format(parameters):
        case "json_schema" if schema is None:
            raise ValueError(
                "the setting Response format is json_schema, and JSON schema is empty. Enter a schema, or choose "
                "json_object."
            )
        case "json_schema":
            fields["response_format"] = {"type": "json_schema", "json_schema": _schema(schema)}
        case "json_object" | "json":
            fields["response_format"] = {"type": "json_object"}
        case "text" | "xml":
            pass  # no server constrains to XML; Dify's SDK asks for it in the prompt
        case _:
            raise ValueError(
                f"the response format {wanted!r} is unknown. Choose text, json_object or json_schema."
            )
    if "enable_thinking" in fields:
        fields["reasoning_effort"] = "medium" if fields.pop("enable_thinking") else "none"
    return fields


def _schema(schema: Any) -> Any:
    """Dify sends the schema as a JSON string, with or without the `{"schema": …, "name": …}` around it.

    People paste a whole response_format where Dify wants a schema.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"the JSON schema of the structured output is not valid JSON: {error}"
            ) from error
    schema, words = unwrapped_schema(schema)
    if not isinstance(schema, Mapping | bool):
        raise ValueError(
            f"the JSON schema of the structured output must be a JSON object, not {json.dumps(schema)[:60]}."
        )
    return {**words, "name": str(words.get("name") or "answer"), "schema": schema}
