"""The body of POST /v1/messages, and the request for the chat service that it becomes.

tools      those with `defer_loading` are no part of the prompt's head; of those that run at Anthropic, by their types,
           nothing is left but their names in a header
effort     output_config.effort, and `thinking` (budget_tokens, disabled)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator

from mlx_backend.api.anthropic.blocks import BlockConversation, system_text
from mlx_backend.api.anthropic.objects import OutputConfig, ThinkingConfig
from mlx_backend.api.anthropic.tools import ClientTool  # noqa: TC001 (read at run time)
from mlx_backend.api.errors import refuse
from mlx_backend.api.fields import Refusals, is_one_of
from mlx_backend.api.openai.objects import EFFORT_FIELDS
from mlx_backend.api.reply_fields import ConversationBody, Limit, accepts, as_stop_strings, offer
from mlx_backend.api.sent import Sent
from mlx_backend.chat.request import AnswerFormat, ChatRequest, ToolChoice
from mlx_backend.conversation.result_media import with_media_as_parts
from mlx_backend.settings import SAMPLING

if TYPE_CHECKING:
    from collections.abc import Sequence


_KEEPS_ALL = {"type": "clear_thinking_20251015", "keep": "all"}
"""The edit of a context that asks for what is done anyway."""


@accepts(*SAMPLING, "repeat_penalty")
class MessagesBody(ConversationBody):
    """POST /v1/messages. The settings of replies that other addresses take are taken here, too."""

    refused: ClassVar[Refusals] = {
        "mcp_servers": (
            is_one_of([]),
            "this server calls no other servers; let your client list their tools",
        ),
        "container": (is_one_of(), "this server runs no code"),
        "thread": (is_one_of(), "conversations are not stored here; send all of its messages"),
        "compaction": (is_one_of(), "ask for a summary in a message"),
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
    cache_control: dict[str, Any] | None = None

    @property
    def ignored(self) -> list[str]:
        """The fields that have no meaning here."""
        match (self.model_extra or {}).get("context_management"):
            case {"edits": list(edits)} if any(edit != _KEEPS_ALL for edit in edits):
                habits: tuple[str, ...] = ("betas",)
            case _:
                habits = ("betas", "context_management")
        return [name for name in super().ignored if name not in habits]

    def request(self) -> ChatRequest:
        """Return the request for the chat service. Raises ApiError."""
        conversation = BlockConversation(self._functions())
        if system := system_text(Sent(self.system, "system")):
            conversation.messages.append({"role": "system", "content": system})
        conversation.add_all(Sent(self.messages, "messages").entries())
        if not conversation.messages:
            raise refuse("messages is empty: send at least one.", "messages")
        paths = {tool.name: f"tools[{at}]" for at, tool in enumerate(self.tools or ())}
        deferred = {tool.name for tool in self.tools or () if tool.defer_loading} | conversation.added
        known = {
            name: function
            for name, function in conversation.tools.items()
            if name not in deferred or name in conversation.defined
        }
        callable_tools = [name for name in known if name not in conversation.removed]
        return ChatRequest(
            messages=with_media_as_parts(conversation.messages),
            images=conversation.images,
            tools=list(known.values()),
            deferred_tools=frozenset(deferred),
            tool_paths=[paths.get(name, "messages") for name in known],
            max_tokens=self.max_tokens,
            reserves_reply=bool(known),
            stop=self.stop_sequences,
            answer_format=self._answer_format(),
            tool_choice=self._tool_choice(callable_tools, is_restricted=bool(conversation.removed)),
            parallel_tool_calls=not (self.tool_choice or {}).get("disable_parallel_tool_use"),
            **self.common("messages", "system", **_effort_fields(self.written, conversation.effort)),
        )

    @property
    def omits_thinking(self) -> bool:
        """Whether reasoning is sent as its signature alone."""
        thinking = self.written.get("thinking")
        return isinstance(thinking, Mapping) and thinking.get("display") == "omitted"

    def _functions(self) -> dict[str, dict[str, Any]]:
        """Return the tools as functions, by their names."""
        found: dict[str, dict[str, Any]] = {}
        for at, tool in enumerate(self.tools or ()):
            if not tool.is_hosted:
                offer(found, tool.as_function(), Sent(tool, f"tools[{at}]"))
        return found

    def _tool_choice(self, offered: Sequence[str], *, is_restricted: bool) -> ToolChoice:
        strict = frozenset(tool.name for tool in self.tools or () if tool.strict and tool.name in offered)
        allowed = frozenset(offered) if is_restricted else None
        choice = Sent({"type": "auto", **(self.tool_choice or {})}, "tool_choice")
        match choice["type"].value:
            case "auto":
                return ToolChoice(strict=strict, allowed=allowed)
            case "none":
                return ToolChoice(forbidden=True)
            case "any":
                return ToolChoice(required=True, strict=strict, allowed=allowed)
            case "tool":
                if (name := choice["name"]).value not in offered:
                    known = ", ".join(offered) or "none"
                    raise name.wrong_value(f"there is no such tool to call; the request's tools: {known}.")
                return ToolChoice(name=name.value, strict=strict)
            case _:
                raise choice["type"].wrong_value("must be auto, any, tool or none.")

    def _answer_format(self) -> AnswerFormat | None:
        written = Sent(self.written)
        nested = written["output_config"]["format"]
        wanted = nested if nested.value is not None else written["output_format"]
        match wanted.value:
            case None:
                return None
            case {"type": "json_schema", "schema": dict(schema)}:
                return AnswerFormat(kind="json_schema", value=schema, strict=True, field=wanted.path)
        raise wanted.wrong_value('send {"type": "json_schema", "schema": …}.')


def _effort_fields(written: Mapping[str, Any], effort: Any) -> dict[str, Any]:
    """Return one statement of the effort: what a message asks for, and none where thinking is off."""
    thinking = Sent(written.get("thinking"), "thinking")
    kind = thinking.object_or_empty().get("type")
    config = dict(Sent(written.get("output_config"), "output_config").object_or_empty())
    if kind not in (None, "enabled", "adaptive", "disabled", "between_tools"):
        raise thinking["type"].wrong_value("must be enabled, adaptive, disabled or between_tools.")
    if effort is not None:
        config["effort"] = effort
    # Between tools it is off, too: what is written there is no more than a line about what comes next.
    if kind in ("disabled", "between_tools"):
        return {"thinking": {"type": "disabled"}, "output_config": {**config, "effort": None}}
    return {"output_config": config} if config else {}
