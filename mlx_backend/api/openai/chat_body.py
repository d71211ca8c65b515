"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from mlx_backend.api.errors import refuse
from mlx_backend.api.openai import fields
from mlx_backend.api.openai.body import Lenient
from mlx_backend.api.openai.generation_body import GenerationBody
from mlx_backend.api.openai.setting_fields import Whole, accepts
from mlx_backend.chat.request import AnswerFormat, ChatRequest, ToolChoice
from mlx_backend.conversation.json_values import excerpt
from mlx_backend.settings import ReasoningFormat

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Function(Lenient):
    """A tool's name, description and parameters."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Lenient):
    """One entry of `tools`; the flat form of the Responses API is accepted too."""

    type: Literal["function"] = "function"
    function: Function

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, tool: Any) -> Any:
        flat = isinstance(tool, dict) and "name" in tool and "function" not in tool
        return {"function": {key: tool[key] for key in tool if key != "type"}, **tool} if flat else tool

    def as_dict(self) -> dict[str, Any]:
        """Return the nested form, with only what templates use."""
        optional = {"description": self.function.description, "parameters": self.function.parameters}
        sent = {key: value for key, value in optional.items() if value is not None}
        return {"type": "function", "function": {"name": self.function.name, **sent}}


@accepts(
    *("thinking_budget", "thinking_token_budget", "thinking_budget_tokens"),
    *("answer_reserve", "reasoning_format", "max_completion_tokens", "background_detection"),
)
class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    # Which replies are one user's is looked up in the request too.
    read_elsewhere: ClassVar[frozenset[str]] = GenerationBody.read_elsewhere | {"user"}

    messages: list[Any]
    tools: list[Tool] | None = None
    tool_choice: Annotated[str | ToolChoice | None, BeforeValidator(fields.tool_choice)] = None
    response_format: Annotated[AnswerFormat | None, BeforeValidator(fields.response_format)] = None
    guided_json: Annotated[dict[str, Any] | None, BeforeValidator(fields.json_schema)] = None
    json_schema: dict[str, Any] | None = None
    guided_regex: Annotated[str, Field(min_length=1, max_length=10_000)] | None = None
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=1000)] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(fields.template_kwargs)] = Field(
        default_factory=dict
    )
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    role_mapping: dict[str, str] | None = None

    def _answer_format(self) -> AnswerFormat | None:
        """Return the format the answer must have, from whichever field was sent."""
        formats = {
            "response_format": self.response_format,
            "guided_json": self.guided_json
            and AnswerFormat(kind="json_schema", value=self.guided_json, field="guided_json"),
            "json_schema": self.json_schema
            and AnswerFormat(kind="json_schema", value=self.json_schema, field="json_schema"),
            "guided_regex": self.guided_regex
            and AnswerFormat(kind="regex", value=self.guided_regex, field="guided_regex"),
            "guided_choice": self.guided_choice
            and AnswerFormat(kind="choice", value=self.guided_choice, field="guided_choice"),
        }
        sent = {name: value for name, value in formats.items() if value}
        if len(sent) > 1:
            raise refuse(f"{' and '.join(sent)}: an answer can be held to one of them.", list(sent)[1])
        return next((value for value in sent.values() if isinstance(value, AnswerFormat)), None)

    def _thinking_budget(self) -> int | None:
        """Return how many tokens may be reasoning, from whichever field was sent."""
        sent: dict[str, int] = {}
        for name in ("thinking_budget", "thinking_token_budget", "thinking_budget_tokens"):
            if (value := self.setting(name)) is not None:
                sent[name] = value
        sent |= fields.nested_budgets(self.model_extra or {}, self.chat_template_kwargs)
        first = next(iter(sent), "")
        for other, value in sent.items():
            if value != sent[first]:
                text = (
                    f"{first} is {sent[first]} and {other} is {value}: they mean the same; send one of them."
                )
                raise refuse(text, other)
        return sent.get(first)

    def _logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise refuse("top_logprobs is given without logprobs = true.", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def reasoning_format_or(self, default: ReasoningFormat) -> ReasoningFormat:
        """Return the form in which this reply's reasoning is sent."""
        reasoning = (self.model_extra or {}).get("reasoning")
        excluded = isinstance(reasoning, dict) and reasoning.get("exclude") is True
        if excluded or self.include_reasoning is False:
            return ReasoningFormat.HIDDEN
        return self.setting("reasoning_format") or default

    def request(self, written: Mapping[str, Any], reasoning_format: ReasoningFormat) -> ChatRequest:
        """Return the request for the chat service. `written` is the body as the client wrote it."""
        _refuse_other_than_text(self.messages)
        tools = [] if self.tool_choice == "none" else (self.tools or [])
        choice = self.tool_choice if isinstance(self.tool_choice, ToolChoice) else ToolChoice()
        strict = frozenset(tool.function.name for tool in tools if tool.function.strict)
        return ChatRequest(
            messages=self.messages,
            tools=[tool.as_dict() for tool in tools],
            fields=written,
            template_kwargs=self.chat_template_kwargs,
            sampling=self.sampling(),
            adapter=self.adapters,
            priority=self.priority,
            max_tokens=self.setting("max_completion_tokens", "max_tokens"),
            stop=self.stop,
            logprobs=self._logprobs(),
            role_mapping=self.role_mapping,
            answer_format=self._answer_format(),
            tool_choice=replace(choice, strict=strict),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            continue_last=self.continue_final_message is not False,
            add_generation_prompt=self.add_generation_prompt is not False,
            raw=reasoning_format is ReasoningFormat.RAW,
            thinking_budget=self._thinking_budget(),
            answer_reserve=self.setting("answer_reserve"),
            background_detection=self.setting("background_detection"),
        )


def _refuse_other_than_text(messages: Sequence[Any]) -> None:
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        for j, part in enumerate(content if isinstance(content, list) else ()):
            part_type = part.get("type", "text") if isinstance(part, dict) else "text"
            if part_type not in _TEXT_PARTS:
                raise refuse(_cannot_use(part_type), f"messages[{i}].content[{j}]", "unsupported_content")


def _cannot_use(part_type: Any) -> str:
    """Say it for people: a chat's page shows the sentence as it is. The field's name goes beside it, in `param`."""
    if not isinstance(part_type, str) or part_type not in _MEDIA:
        return f"This model reads text only; it cannot use a part of type {excerpt(part_type)}. Remove that part."
    cannot, what, remedy = _MEDIA[part_type]
    return f"This model cannot {cannot}. Remove the {what}, or choose a model {remedy}."


_IMAGE = ("see images", "image", "with vision")
_AUDIO = ("hear audio", "audio", "that can")
_VIDEO = ("watch videos", "video", "that can")
_FILE = ("open files", "file, or send its text", "that can")
_MEDIA = {
    **dict.fromkeys(("image_url", "input_image", "image"), _IMAGE),
    **dict.fromkeys(("input_audio", "audio_url"), _AUDIO),
    **dict.fromkeys(("video_url", "input_video", "video"), _VIDEO),
    **dict.fromkeys(("file", "input_file", "document"), _FILE),
}
"""The types of parts that clients send: what the model cannot do, what to remove, and what to choose instead."""

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking", "reasoning", "reasoning_content")
