"""The body of POST /v1/messages, and the request for the chat service that it becomes.

tools      those with `defer_loading` are no part of the prompt's head; of those that run at Anthropic, by their types,
           nothing is left but their names in a header
effort     output_config.effort, and `thinking` (budget_tokens, disabled)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from mlx_backend.api.anthropic.blocks import BlockConversation, system_text
from mlx_backend.api.anthropic.objects import OutputConfig, ThinkingConfig
from mlx_backend.api.errors import refuse
from mlx_backend.api.fields import Lenient, Refusals, is_one_of
from mlx_backend.api.openai.objects import EFFORT_FIELDS
from mlx_backend.api.reply_fields import ConversationBody, Limit, accepts, as_stop_strings, offer
from mlx_backend.chat.request import AnswerFormat, ChatRequest, ToolChoice
from mlx_backend.conversation.json_values import excerpt, json_type
from mlx_backend.conversation.result_media import with_media_as_parts
from mlx_backend.settings import SAMPLING

if TYPE_CHECKING:
    from collections.abc import Sequence


_KEEPS_ALL = {"type": "clear_thinking_20251015", "keep": "all"}
"""The edit of a context that asks for what is done anyway."""


class ClientTool(Lenient):
    """A tool of the client's own."""

    type: str | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None

    @property
    def is_hosted(self) -> bool:
        """Whether it is one that only Anthropic's models know."""
        return self.type not in (None, "custom")

    def as_function(self) -> dict[str, Any]:
        """Return it as a function."""
        said = {"description": self.description, "parameters": self.input_schema}
        sent = {key: value for key, value in said.items() if value is not None}
        return {"type": "function", "function": {"name": self.name, **sent}}


@accepts(*SAMPLING)
class MessagesBody(ConversationBody):
    """POST /v1/messages. The settings of replies that other addresses take are taken here, too."""

    refused: ClassVar[Refusals] = {
        "mcp_servers": (
            is_one_of([]),
            "this server calls no other servers; let your client list their tools",
        ),
        "container": (is_one_of(), "this server runs no code"),
    }
    read_elsewhere: ClassVar[dict[str, Any]] = {
        **EFFORT_FIELDS,
        "thinking": ThinkingConfig | None,
        "output_config": OutputConfig | None,
    }

    messages: list[Any]
    system: str | list[Any] | None = None
    max_tokens: Limit = None
    stream: bool | None = None
    stop_sequences: Annotated[
        tuple[str, ...], BeforeValidator(as_stop_strings, json_schema_input_type=list[str] | None)
    ] = ()
    tools: list[ClientTool] | None = None
    tool_choice: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None

    @property
    def ignored(self) -> list[str]:
        """The fields that have no meaning here, and the tools that run at Anthropic."""
        match (self.model_extra or {}).get("context_management"):
            case {"edits": list(edits)} if any(edit != _KEEPS_ALL for edit in edits):
                habits: tuple[str, ...] = ("betas",)
            case _:
                habits = ("betas", "context_management")
        hosted = [f"tools[{at}].{tool.type}" for at, tool in enumerate(self.tools or ()) if tool.is_hosted]
        names = [name for name in super().ignored if name not in habits and not name.startswith("tools.")]
        return [*names, *hosted]

    def request(self, written: Mapping[str, Any]) -> ChatRequest:
        """Return the request for the chat service. Raises ApiError."""
        thinking = written.get("thinking")
        if thinking is not None and not isinstance(thinking, Mapping):
            raise refuse(f"thinking: must be an object, not {json_type(thinking)}.", "thinking")
        known = self._functions()
        deferred = {tool.name for tool in self.tools or () if tool.defer_loading}
        conversation = BlockConversation(known)
        if system := system_text(self.system):
            conversation.messages.append({"role": "system", "content": system})
        for at, message in enumerate(self.messages):
            conversation.add(message, f"messages[{at}]")
        if not conversation.messages:
            raise refuse("messages is empty: send at least one.", "messages")
        offered = [name for name in known if name not in deferred or name in conversation.referenced]
        tools = [] if self._choice_type() == "none" else [known[name] for name in offered]
        places = {tool.name: f"tools[{at}]" for at, tool in enumerate(self.tools or ())}
        return ChatRequest(
            messages=with_media_as_parts(conversation.messages),
            images=conversation.images,
            tools=tools,
            deferred_tools=frozenset(conversation.referenced & deferred),
            tool_paths=[places[name] for name in offered],
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            answer_format=self._answer_format(written),
            tool_choice=self._tool_choice(offered),
            parallel_tool_calls=not (self.tool_choice or {}).get("disable_parallel_tool_use"),
            **self.common(written, "messages", "system"),
        )

    def omits_thinking(self, written: Mapping[str, Any]) -> bool:
        """Whether reasoning is sent as its signature alone."""
        thinking = written.get("thinking")
        return isinstance(thinking, Mapping) and thinking.get("display") == "omitted"

    def _functions(self) -> dict[str, dict[str, Any]]:
        """Return the tools as functions, by their names in order: a list in another order is the same list."""
        found: dict[str, dict[str, Any]] = {}
        for at, tool in enumerate(self.tools or ()):
            if tool.is_hosted:
                continue
            offer(found, tool.as_function(), f"tools[{at}].name")
        return dict(sorted(found.items()))

    def _choice_type(self) -> Any:
        return (self.tool_choice or {}).get("type", "auto")

    def _tool_choice(self, offered: Sequence[str]) -> ToolChoice:
        strict = frozenset(tool.name for tool in self.tools or () if tool.strict and tool.name in offered)
        match self._choice_type():
            case "auto":
                return ToolChoice(strict=strict)
            case "none":
                return ToolChoice()
            case "any":
                return ToolChoice(required=True, strict=strict)
            case "tool":
                name = (self.tool_choice or {}).get("name")
                if name not in offered:
                    known = ", ".join(offered) or "none"
                    raise refuse(
                        f"tool_choice.name = {excerpt(name)}: there is no such tool to call; the request's tools: "
                        f"{known}.",
                        "tool_choice.name",
                    )
                return ToolChoice(name=name, strict=strict)
            case kind:
                raise refuse(
                    f"tool_choice.type = {excerpt(kind)}: must be auto, any, tool or none.",
                    "tool_choice.type",
                )

    def _answer_format(self, written: Mapping[str, Any]) -> AnswerFormat | None:
        config = written.get("output_config")
        nested = config.get("format") if isinstance(config, Mapping) else None
        field = "output_config.format" if nested is not None else "output_format"
        match nested if nested is not None else self.output_format:
            case None:
                return None
            case {"type": "json_schema", "schema": dict(schema)}:
                return AnswerFormat(kind="json_schema", value=schema, strict=True, field=field)
            case value:
                raise refuse(
                    f'{field} = {excerpt(value)}: send {{"type": "json_schema", "schema": …}}.', field
                )
