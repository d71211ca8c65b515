"""The requests we accept: strict where a mistake would change the answer, lenient towards clients' habits.

    honoured       a field of the models below; a wrong type or value is a 400 with its path
    refused        UNSUPPORTED: it would change the answer and we do not do it, so it is a 400 by its name,
                   except with the value that asks for nothing
    ignored        everything else; named in the log and in a reply header

`null` means absent everywhere. Knows pydantic and the service's request types; knows nothing of HTTP.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from mlx_backend.api.errors import refuse
from mlx_backend.api.openai import fields
from mlx_backend.chat.request import UNLIMITED, AnswerFormat, ChatRequest, CompletionRequest, ToolChoice
from mlx_backend.conversation.json_values import DEEPEST, kind, shown, too_deep
from mlx_backend.settings import ReasoningFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def _nothing(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value is None or any(value == one and type(value) is type(one) for one in values)


_STRUCTURED = "send response_format with a json_schema, guided_regex or guided_choice"

# field -> (the values that ask for nothing, what to say to all others)
UNSUPPORTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n": (_is(1), "a request gets one answer; send several requests"),
    "best_of": (_is(1), "this server generates one candidate"),
    "structured_outputs": (_nothing, _STRUCTURED),
    "guided_grammar": (_nothing, _STRUCTURED),
    "grammar": (_nothing, _STRUCTURED),
    "format": (_nothing, _STRUCTURED),
    "functions": (_nothing, "the old form of tools: send 'tools' instead"),
    "function_call": (_is("auto", "none"), "the old form of tool_choice: send 'tool_choice' instead"),
    "prompt_logprobs": (_is(0, False), "only the reply's log probabilities are reported"),
    "modalities": (_is(["text"], []), "this model writes text only"),
    "audio": (_nothing, "this model writes text only"),
    "web_search_options": (_is(), "this server does not search the web"),
    "use_beam_search": (_is(False), "beam search is not supported"),
    "bad_words": (_nothing, "send logit_bias with the tokens that should not come"),
    "min_tokens": (_is(0), "a reply ends where the model ends it"),
    "ignore_eos": (_is(False), "a reply ends where the model ends it"),
    "stop_token_ids": (_nothing, "send the text in 'stop'"),
    "chat_template": (_nothing, "a template is chosen when the server is started (--chat-template)"),
    "echo": (_is(False), "the prompt is not repeated in the reply"),
    "suffix": (_is(""), "text cannot be inserted before a suffix"),
}


class _Lenient(BaseModel):
    """Types are not guessed ("7" is no number, true is no 1, but 7.0 is 7); unknown fields are kept, to be named."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, arbitrary_types_allowed=True)


type _Whole = Annotated[int, BeforeValidator(fields.whole)]
type _Limit = Annotated[Annotated[int, Field(gt=0)] | None, BeforeValidator(fields.limit)]
type _Budget = Annotated[_Whole, Field(ge=UNLIMITED)]


class StreamOptions(_Lenient):
    """What to add to a stream."""

    include_usage: bool | None = None


class Function(_Lenient):
    """A tool, as the model is told about it."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Lenient):
    """One entry of `tools`; the flat form of the Responses API is read as well."""

    type: Literal["function"] = "function"
    function: Function

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, tool: Any) -> Any:
        flat = isinstance(tool, dict) and "name" in tool and "function" not in tool
        return {"function": {key: tool[key] for key in tool if key != "type"}, **tool} if flat else tool

    def as_dict(self) -> dict[str, Any]:
        """Return the nested form, with nothing in it that a template does not read."""
        told = {"description": self.function.description, "parameters": self.function.parameters}
        given = {key: value for key, value in told.items() if value is not None}
        return {"type": "function", "function": {"name": self.function.name, **given}}


class AnyBody(_Lenient):
    """What the requests to every address share."""

    model: str | None = None

    @classmethod
    def read(cls, body: Any) -> Self:
        """Validate a decoded body; raise the 400 that names what is wrong with it."""
        if not isinstance(body, dict):
            raise refuse(f"The body must be a JSON object, not {kind(body)}.")
        for name, (asks_for_nothing, reason) in UNSUPPORTED.items():
            if name in body and not asks_for_nothing(body[name]):
                raise refuse(
                    f"{name} = {shown(body[name])} is not supported: {reason}.", name, "unsupported_value"
                )
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            _refuse(error)

    @property
    def ignored(self) -> list[str]:
        """The fields that were sent, mean something somewhere, and mean nothing here."""
        extra = self.model_extra or {}
        return [name for name, value in extra.items() if value is not None and name not in _READ_ELSEWHERE]


class _Body(AnyBody):
    """What both kinds of request for a reply share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: _Limit = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[_Whole, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[_Whole, Field(ge=-(2**63), lt=2**64)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    xtc_probability: Annotated[float, Field(ge=0, le=1)] | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] | None = None
    adapters: Annotated[str, Field(min_length=1)] | None = None
    priority: Annotated[_Whole, Field(gt=-(2**31), lt=2**31)] | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(fields.stop_strings)] = ()
    logit_bias: Annotated[tuple[tuple[int, float], ...], BeforeValidator(fields.logit_bias)] = ()

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self) -> dict[str, Any]:
        """Say what this request wishes of the next token, by the names of `Sampling`; nothing it is silent on."""
        penalty = self.repetition_penalty if self.repetition_penalty is not None else self.repeat_penalty
        wishes = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "min_p": self.min_p,
            "seed": None if self.seed in (None, -1) else self.seed % 2**63,
            "repetition_penalty": penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "xtc_probability": self.xtc_probability,
            "xtc_threshold": self.xtc_threshold,
            "logit_bias": self.logit_bias or None,
        }
        return {name: value for name, value in wishes.items() if value is not None}


# Not ignored either: effort is looked up in the request as it was written, and the others are refused.
_READ_ELSEWHERE = frozenset(
    ["reasoning_effort", "reasoning", "think", "thinking", "enable_thinking", *UNSUPPORTED]
)


class ChatBody(_Body):
    """POST /v1/chat/completions."""

    messages: list[Any]
    max_completion_tokens: _Limit = None
    tools: list[Tool] | None = None
    tool_choice: Annotated[str | ToolChoice | None, BeforeValidator(fields.tool_choice)] = None
    response_format: Annotated[AnswerFormat | None, BeforeValidator(fields.response_format)] = None
    thinking_budget: _Budget | None = None
    thinking_token_budget: _Budget | None = None
    thinking_budget_tokens: _Budget | None = None
    answer_reserve: Annotated[_Whole, Field(ge=1)] | None = None
    guided_json: Annotated[dict[str, Any] | None, BeforeValidator(fields.json_schema)] = None
    json_schema: dict[str, Any] | None = None
    guided_regex: Annotated[str, Field(min_length=1, max_length=10_000)] | None = None
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=1000)] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_format: Annotated[ReasoningFormat | None, BeforeValidator(fields.reasoning_format)] = None
    include_reasoning: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(fields.template_kwargs)] = {}
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[_Whole, Field(ge=0, le=20)] | None = None
    role_mapping: dict[str, str] | None = None

    def _answer_format(self) -> AnswerFormat | None:
        """What the answer is held to, by whichever of the fields says so."""
        ways = {
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
        said = {name: way for name, way in ways.items() if way}
        if len(said) > 1:
            raise refuse(f"{' and '.join(said)}: an answer can be held to one of them.", list(said)[1])
        return next((way for way in said.values() if isinstance(way, AnswerFormat)), None)

    def _wanted_budget(self) -> int | None:
        """How many tokens may be reasoning, by whichever of the fields says so."""
        said: dict[str, int] = {}
        for name in ("thinking_budget", "thinking_token_budget", "thinking_budget_tokens"):
            if (value := getattr(self, name)) is not None:
                said[name] = value
        said |= fields.nested_budgets(self.model_extra or {}, self.chat_template_kwargs)
        one = next(iter(said), "")
        for other, value in said.items():
            if value != said[one]:
                text = f"{one} is {said[one]} and {other} is {value}: they mean the same; send one of them."
                raise refuse(text, other)
        return said.get(one)

    def _wanted_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise refuse("top_logprobs is given without logprobs = true.", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def shown_reasoning(self, default: ReasoningFormat) -> ReasoningFormat:
        """Where this reply's reasoning goes."""
        reasoning = (self.model_extra or {}).get("reasoning")
        excluded = isinstance(reasoning, dict) and reasoning.get("exclude") is True
        if excluded or self.include_reasoning is False:
            return ReasoningFormat.HIDDEN
        return self.reasoning_format or default

    def request(self, body: Mapping[str, Any], shown: ReasoningFormat) -> ChatRequest:
        """Say it in the service's words. `body` is the same request as it was written."""
        _refuse_what_is_not_text(self.messages)
        tools = [] if self.tool_choice == "none" else (self.tools or [])
        choice = self.tool_choice if isinstance(self.tool_choice, ToolChoice) else ToolChoice()
        strict = frozenset(tool.function.name for tool in tools if tool.function.strict)
        return ChatRequest(
            messages=self.messages,
            tools=[tool.as_dict() for tool in tools],
            fields=body,
            template_kwargs=self.chat_template_kwargs,
            sampling=self.sampling(),
            adapter=self.adapters,
            priority=self.priority or 0,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stop=self.stop,
            logprobs=self._wanted_logprobs(),
            role_mapping=self.role_mapping,
            answer_format=self._answer_format(),
            tool_choice=replace(choice, strict=strict),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            continue_last=self.continue_final_message is not False,
            add_generation_prompt=self.add_generation_prompt is not False,
            raw=shown is ReasoningFormat.RAW,
            thinking_budget=self._wanted_budget(),
            answer_reserve=self.answer_reserve,
        )


class CompletionBody(_Body):
    """POST /v1/completions: the text goes to the model as it is, and comes back as it is.

    No chat template, no channels: a Harmony model's markers are control tokens in the prompt and stand in the
    reply. Only the token that ends the reply is left out.
    """

    prompt: Any
    logprobs: Annotated[
        Annotated[int, Field(ge=0, le=20)] | None, BeforeValidator(fields.count_of_logprobs)
    ] = None

    def request(self) -> CompletionRequest:
        """Say it in the service's words."""
        return CompletionRequest(
            prompt=_one_prompt(self.prompt),
            sampling=self.sampling(),
            adapter=self.adapters,
            priority=self.priority or 0,
            max_tokens=self.max_tokens,
            stop=self.stop,
            logprobs=self.logprobs,
        )


def parse_json(data: bytes) -> Any:
    """Decode a body; raise the 400 that says where it is wrong."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise refuse(f"The body is not UTF-8: byte {error.start} cannot be decoded.") from None
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise refuse(f"The body is not JSON: {error.msg} at {where}.") from None
    except RecursionError:
        raise refuse(_TOO_DEEP) from None
    except ValueError as error:  # NaN, or a number of thousands of digits
        what = "a number has thousands of digits" if "digits" in str(error) else str(error)
        raise refuse(f"The body is not JSON that can be read: {what}.") from None
    if too_deep(value):
        raise refuse(_TOO_DEEP)
    # Half a surrogate pair is what is left when a client cuts a text in the middle of an emoji.
    return _mended(value) if re.search(r"\\u[dD][89a-fA-F]", text) else value


_TOO_DEEP = f"The body is nested too deeply: more than {DEEPEST} levels."


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _mended(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case list():
            return [_mended(item) for item in value]
        case dict():
            return {_mended(key): _mended(item) for key, item in value.items()}
        case _:
            return value


def _refuse_what_is_not_text(messages: Sequence[Any]) -> None:
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        for j, part in enumerate(content if isinstance(content, list) else ()):
            part_type = part.get("type", "text") if isinstance(part, dict) else "text"
            if part_type not in _TEXT_PARTS:
                raise refuse(
                    f"messages[{i}].content[{j}] is of type {shown(part_type)}; this model reads text only.",
                    f"messages[{i}].content[{j}]",
                    "unsupported_content",
                )


_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking", "reasoning", "reasoning_content")


def _one_prompt(prompt: Any) -> str | tuple[int, ...]:
    match prompt:
        case [str() | list() as only]:
            return _one_prompt(only)
        case [str() | list(), *_]:
            raise refuse(f"prompt: a list of {len(prompt)} prompts is not supported; send one.", "prompt")
        case str() if prompt:
            return prompt
        case [*tokens] if tokens and all(type(token) is int for token in tokens):
            return tuple(tokens)
        case _ if _nothing(prompt):
            raise refuse("prompt: must not be empty.", "prompt")
        case _:
            raise refuse(f"prompt: must be a string or a list of token ids, not {shown(prompt)}.", "prompt")


def _refuse(error: ValidationError) -> NoReturn:
    first = error.errors(include_url=False)[0]
    where = ""
    for step in first["loc"]:
        where += f"[{step}]" if isinstance(step, int) else f".{step}" if where else str(step)
    if first["type"] == "missing":
        raise refuse(f"{where} is missing.", where)
    message = first["msg"]
    message = message[:1].lower() + message[1:]
    raise refuse(f"{where}: {message}; got {shown(first['input'])}.", where)


def _or[T](value: T | None, default: T) -> T:
    return default if value is None else value
