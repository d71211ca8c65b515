"""The body of POST /v1/chat/completions: what a conversation may ask for, in all the forms in which clients send it.

Images come in two forms, and each becomes one part of ours:

    {"type": "image_url", "image_url": {"url": …, "detail": …}}     Chat Completions; also with the URL as the value
    {"type": "input_image", "image_url": …, "detail": …}            the Responses API's form, which some send here too
    ─▶ {"type": "image", "image": 3}, and the fourth `ImageSource`

From here on a part is a number, and no other code handles megabytes of base64. Fetches and decodes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from mlx_backend.api.errors import refuse
from mlx_backend.api.fields import Lenient, Refusals, is_empty, is_one_of
from mlx_backend.api.openai.generation_body import LIMIT_NAMES, REFUSED, GenerationBody
from mlx_backend.api.openai.objects import (
    EFFORT_FIELDS,
    DescribedAs,
    Messages,
    ResponseFormatInput,
    ToolChoiceInput,
    ToolInput,
)
from mlx_backend.api.reply_fields import ConversationBody, accepts, as_json, as_whole
from mlx_backend.api.sent import Sent
from mlx_backend.api.tools import Tools, input_as_arguments
from mlx_backend.chat.request import AnswerFormat, ChatRequest
from mlx_backend.conversation.json_values import excerpt, json_type, unwrapped_schema
from mlx_backend.conversation.result_media import with_media_as_parts
from mlx_backend.images import Detail, ImageSource
from mlx_backend.settings import ReasoningFormat

if TYPE_CHECKING:
    from collections.abc import Sequence


IMAGE_PART_TYPES = ("image_url", "input_image")

_ROLES = ("user", "tool", "function")
"""Whose messages may hold images: models were trained to see those of users and of tools."""
IMAGE_FORM = 'Write it as {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}.'


def take_images(messages: Sequence[Any]) -> tuple[list[Any], list[ImageSource]]:
    """Return the messages with a number for each image, and the images. Changes nothing in place. Raises ApiError."""
    sources: list[ImageSource] = []
    taken: list[Any] = []
    for message in Sent(messages, "messages").entries():
        parts = message["content"].entries()
        images = [part for part in parts if part["type"].value in IMAGE_PART_TYPES]
        if not images:
            taken.append(message.value)
            continue
        if (role := message["role"].value) not in _ROLES:
            raise refuse(
                f"An image stands in a message of the role {excerpt(role)}: only users' messages and tools' results "
                "can show one.",
                images[0].path,
                "unsupported_content",
            )
        numbers = {part.path: len(sources) + at for at, part in enumerate(images)}
        sources += map(image_source, images)
        content = [
            {"type": "image", "image": numbers[part.path]} if part.path in numbers else part.value
            for part in parts
        ]
        taken.append({**message.value, "content": content})
    return taken, sources


def image_source(part: Sent) -> ImageSource:
    """Return where a part's image is. Raises the ApiError that says what is wrong with it."""
    image = part["image_url"]
    is_nested = isinstance(image.value, Mapping)
    url, detail = image["url"].value if is_nested else image.value, (image if is_nested else part)["detail"]
    if not isinstance(url, str) or not url:
        found = "is empty" if url == "" else "is missing" if url is None else f"is {json_type(url)}"
        is_file = part["file_id"].value
        what = "Files are not stored here" if is_file else f"The address of an image {found}"
        raise refuse(f"{what}. {IMAGE_FORM}", image.path, "invalid_image")
    try:
        wanted = Detail.AUTO if detail.value in (None, "original") else Detail(detail.value)
    except ValueError:
        said = f"An image's detail is {excerpt(detail.value)}: send low, high or auto."
        raise refuse(said, detail.path) from None
    return ImageSource(where=part.path, url=url, detail=wanted)


def with_function_calls(message: Any) -> Any:
    """Return a message with its calls of custom tools as those of the functions that the model knows."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_function_call(call) for call in calls]}


def _function_call(call: Any) -> Any:
    match call:
        case {"type": "custom", "custom": {"name": name, "input": str(text)}}:
            function = {"name": name, "arguments": input_as_arguments(text)}
            return {"id": call.get("id"), "type": "function", "function": function}
    return call


def as_answer_format(value: Any) -> Any:
    """Return the format the answer must have."""
    match value:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object", **rest}:
            schema = rest.get("schema")
            if schema is None:
                return AnswerFormat(kind="json_object")
            if isinstance(schema, dict):
                return _schema_format(schema)
        case {
            "type": "json_schema"
        }:  # of Chat Completions, or of the Responses API, which has one level less
            if (found := _schema_format(value)).value is not value and isinstance(found.value, dict):
                return found
            raise PydanticCustomError(
                "response_format", "names no schema: send json_schema.schema, an object"
            )
    raise PydanticCustomError("response_format", 'must be of type "text", "json_object" or "json_schema"')


def _schema_format(written: dict[Any, Any], field: str = "response_format") -> AnswerFormat:
    schema, said = unwrapped_schema(written)
    words = {name: text for name in ("name", "description") if isinstance(text := said.get(name), str)}
    strict = said.get("strict") is True
    return AnswerFormat(kind="json_schema", value=schema, strict=strict, field=field, **words)


def as_json_schema(value: Any) -> Any:
    """Accept a schema as text."""
    return as_json(value, "json_schema")


type _Kind = Literal["json_object", "json_schema", "regex", "choice"]


type Pattern = Annotated[str, Field(min_length=1, max_length=10_000)]
type Choices = Annotated[list[str], Field(min_length=1, max_length=1000)]


class StructuredOutputs(Lenient):
    """vLLM's `structured_outputs`: what the answer is held to."""

    schema_of_json: Annotated[dict[str, Any] | None, BeforeValidator(as_json_schema), Field(alias="json")] = (
        None
    )
    regex: Pattern | None = None
    choice: Choices | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _known(self) -> Self:
        extra = {name for name, value in (self.model_extra or {}).items() if not is_empty(value)}
        if unknown := sorted(extra - _HARMLESS_OUTPUT_FIELDS):
            raise PydanticCustomError(
                "structured_outputs",
                "{name} is not supported: send json, regex, choice or json_object",
                {"name": unknown[0]},
            )
        return self


_HARMLESS_OUTPUT_FIELDS = frozenset({"disable_fallback", "disable_any_whitespace", "whitespace_pattern"})
"""How the JSON is laid out, and by which library: any layout is JSON."""


@accepts("reasoning_format")
class ChatBody(ConversationBody, GenerationBody):
    """POST /v1/chat/completions."""

    refused: ClassVar[Refusals] = {
        **REFUSED,
        "echo": (is_one_of(False), "only /v1/completions repeats the prompt"),
        "add_special_tokens": (is_one_of(False), "the chat template writes them"),
        "suffix": (is_one_of(""), "only /v1/completions fills in text before a suffix"),
    }
    read_elsewhere: ClassVar[dict[str, Any]] = EFFORT_FIELDS

    messages: Annotated[list[Any], DescribedAs(Messages)]
    tools: Annotated[
        Tools | None, BeforeValidator(Tools.parse_functions, json_schema_input_type=list[ToolInput] | None)
    ] = None
    tool_choice: Annotated[Any, DescribedAs(ToolChoiceInput)] = None
    response_format: Annotated[
        AnswerFormat | None,
        BeforeValidator(as_answer_format, json_schema_input_type=ResponseFormatInput),
    ] = None
    guided_json: Annotated[dict[str, Any] | None, BeforeValidator(as_json_schema)] = None
    json_schema: Annotated[dict[str, Any] | None, BeforeValidator(as_json_schema)] = None
    guided_regex: Pattern | None = None
    regex: Pattern | None = None
    guided_choice: Choices | None = None
    structured_outputs: StructuredOutputs | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    output_config: dict[str, Any] | None = None
    user: str | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), BeforeValidator(as_whole)] | None = None
    role_mapping: dict[str, str] | None = None

    def _answer_format(self) -> AnswerFormat | None:
        """Return the format the answer must have, from whichever field was sent."""
        outputs = self.structured_outputs or StructuredOutputs()
        values: tuple[tuple[str, _Kind, Any], ...] = (
            ("guided_json", "json_schema", self.guided_json),
            ("json_schema", "json_schema", self.json_schema),
            ("guided_regex", "regex", self.guided_regex),
            ("regex", "regex", self.regex),
            ("guided_choice", "choice", self.guided_choice),
            ("structured_outputs.json", "json_schema", outputs.schema_of_json),
            ("structured_outputs.regex", "regex", outputs.regex),
            ("structured_outputs.choice", "choice", outputs.choice),
            ("structured_outputs.json_object", "json_object", outputs.json_object or None),
        )
        sent = {} if self.response_format is None else {"response_format": self.response_format}
        for field, kind, value in values:
            if value:  # an empty schema asks for nothing
                used = None if kind == "json_object" else value
                sent[field] = (
                    _schema_format(value, field)
                    if kind == "json_schema"
                    else AnswerFormat(kind=kind, value=used, field=field)
                )
        if len(sent) > 1:
            raise refuse(f"{' and '.join(sent)}: an answer can be held to one of them.", list(sent)[1])
        return next(iter(sent.values()), None)

    def _logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise refuse("top_logprobs is given without logprobs = true.", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def ignored(self) -> list[str]:
        """The fields that have no meaning here: there may be no message of the model's to continue, too."""
        last = self.messages[-1] if self.messages else None
        has_none = self.continue_final_message and not (
            isinstance(last, dict) and last.get("role") == "assistant"
        )
        return [*(["continue_final_message"] if has_none else []), *super().ignored]

    def reasoning_format_or(self, default: ReasoningFormat) -> ReasoningFormat:
        """Return the form in which this reply's reasoning is sent."""
        reasoning = (self.model_extra or {}).get("reasoning")
        excluded = isinstance(reasoning, dict) and reasoning.get("exclude") is True
        if excluded or self.include_reasoning is False:
            return ReasoningFormat.HIDDEN
        if self.separate_reasoning is False:  # as in SGLang
            default = ReasoningFormat.THINK
        return self.setting("reasoning_format") or default

    def request(self, reasoning_format: ReasoningFormat = ReasoningFormat.SEPARATE) -> ChatRequest:
        """Return the request for the chat service."""
        if self.add_generation_prompt and self.continue_final_message:
            raise refuse(
                "continue_final_message = true continues the last message, add_generation_prompt = true begins a new "
                "one: send one of them.",
                "continue_final_message",
            )
        messages = with_media_as_parts([with_function_calls(message) for message in self.messages])
        _check_contents(messages)
        messages, images = take_images(messages)
        tools = self.tools or Tools()
        return ChatRequest(
            messages=messages,
            images=images,
            tools=tools.functions,
            tool_paths=tools.paths,
            max_tokens=self.setting(*LIMIT_NAMES),
            stop=self.stop,
            logprobs=self._logprobs(),
            role_mapping=self.role_mapping,
            answer_format=self._answer_format(),
            tool_choice=tools.choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            continue_last=self.continue_final_message is not False,
            add_generation_prompt=self.add_generation_prompt is not False,
            raw=reasoning_format is ReasoningFormat.RAW,
            **self.common("messages"),
        )


def _check_contents(messages: Sequence[Any]) -> None:
    """Raise the ApiError for a content that is no text, or that no model here can be shown."""
    for message in Sent(messages, "messages").entries():
        content = message["content"]
        # Where a tool's result is no text, it is shown as JSON.
        is_result = message["role"].value in ("tool", "function")
        if not (is_result or isinstance(content.value, list) or _has_text(content.value)):
            raise content.refusal(f"must be a text or a list of parts; got {excerpt(content.value)}.")
        for part in content.entries():
            part_type = part.value.get("type", "text") if isinstance(part.value, dict) else "text"
            if part_type not in _TAKEN_PARTS:
                raise refuse(_cannot_use(part_type), part.path, "unsupported_content")
            if part_type in _TEXT_PARTS and not (is_result or _has_text(part.value)):
                raise part.refusal(f"must be a part with a text; got {excerpt(part.value)}. {_TEXT_FORM}")


def _has_text(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, str)
        or (isinstance(value, dict) and isinstance(value.get("text"), str))
    )


def _cannot_use(part_type: Any) -> str:
    """Say it for people: a chat's page shows the sentence as it is. The field's name goes with it, in `param`."""
    if part_type == "image":
        return f"Here an image is a part of another form. {IMAGE_FORM}"
    if not isinstance(part_type, str) or part_type not in _MEDIA:
        return f"A message cannot have a part of type {excerpt(part_type)} here. Remove that part."
    cannot, what, remedy = _MEDIA[part_type]
    return f"This model cannot {cannot}. Remove the {what}, or choose a model {remedy}."


_AUDIO = ("hear audio", "audio", "that can")
_VIDEO = ("watch videos", "video", "that can")
_FILE = ("open files", "file, or send its text", "that can")
_MEDIA = {
    **dict.fromkeys(("input_audio", "audio_url"), _AUDIO),
    **dict.fromkeys(("video_url", "input_video", "video"), _VIDEO),
    **dict.fromkeys(("file", "input_file", "document"), _FILE),
}
"""The types of parts that clients send: what the model cannot do, what to remove, and what to choose instead."""

_TEXT_PARTS = ("text", "input_text", "output_text")
_TEXT_FORM = 'Write it as {"type": "text", "text": "…"}.'
_TAKEN_PARTS = (
    *_TEXT_PARTS,
    *("refusal", "thinking", "reasoning", "reasoning_content"),
    *IMAGE_PART_TYPES,
)
