"""The bodies of /api/chat and /api/generate, and the requests for the chat service that they become.

options      the settings of the reply; those that mean nothing here are named in a header
think        one of the fields that state an effort
keep_alive   seconds, or 5m; 0 unloads the model after the reply, and a negative number keeps it
images       base64, next to a message's text
"""

from __future__ import annotations

import math
import re
import time
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, PrivateAttr, field_validator
from pydantic_core import PydanticCustomError

from mlx_backend.api.errors import refuse
from mlx_backend.api.fields import Body, Refusals, is_empty
from mlx_backend.api.openai.chat_body import take_images
from mlx_backend.api.openai.objects import EFFORT_FIELDS, DescribedAs, StopInput, ToolChoiceInput, ToolInput
from mlx_backend.api.reply_fields import (
    ConversationBody,
    ReplyBody,
    accepts,
    as_stop_strings,
    as_whole,
)
from mlx_backend.api.sent import Sent
from mlx_backend.api.tools import Tools
from mlx_backend.chat.request import AnswerFormat, ChatRequest, CompletionRequest
from mlx_backend.conversation.result_media import with_media_as_parts
from mlx_backend.settings import SAMPLING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.images import ImageSource

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_AMOUNT = r"\d{1,12}(?:\.\d{1,9})?"
_DURATION = re.compile(rf"([-+]?)({_AMOUNT}|(?:{_AMOUNT}(?:{'|'.join(_UNITS)}))+)")
_LONGEST = 10 * 365 * 86_400.0
"""Seconds; what is longer is for ever."""


def as_keep_alive(value: Any) -> Any:
    """Return seconds, of a number of them or of a text such as 1h30m; for ever if that is negative."""
    if value is None or value == "":
        return None
    if type(value) in (int, float):
        seconds = value
    elif isinstance(value, str) and (match := _DURATION.fullmatch(value.strip())):
        parts = re.findall(rf"({_AMOUNT})([^\d.]*)", match[2])
        seconds = sum(float(amount) * _UNITS.get(unit, 1.0) for amount, unit in parts)
        seconds = -seconds if match[1] == "-" else seconds
    else:
        raise PydanticCustomError("keep_alive", "must be a number of seconds, or a time such as 5m or 1h30m")
    return float(seconds) if 0 <= seconds <= _LONGEST else math.inf


def as_num_predict(value: Any) -> Any:
    """Accept 0, -1 and -2 for no limit."""
    value = as_whole(value)
    return None if type(value) is int and value in (0, -1, -2) else value


def as_format(value: Any) -> Any:
    """Return the format the answer must have: any JSON object, or what matches a schema."""
    if value is None or value == "":
        return None
    if value in ("json", {}):
        return AnswerFormat(kind="json_object", field="format")
    if isinstance(value, dict):
        return AnswerFormat(kind="json_schema", value=value, strict=True, field="format")
    raise PydanticCustomError("format", 'must be "json" or a JSON schema')


type KeepAlive = Annotated[
    float | None, BeforeValidator(as_keep_alive, json_schema_input_type=float | str | None)
]


@accepts(*SAMPLING, "repeat_penalty")
class Options(ReplyBody):
    """The settings of a reply, under this API's names."""

    num_predict: Annotated[Annotated[int, Field(gt=0)] | None, BeforeValidator(as_num_predict)] = None
    stop: Annotated[tuple[str, ...], BeforeValidator(as_stop_strings, json_schema_input_type=StopInput)] = ()

    @field_validator("repeat_penalty", mode="before", check_fields=False)
    @classmethod
    def _without_penalty(cls, value: Any) -> Any:
        """Accept 0 for none, which litellm makes of an OpenAI client's penalty of 0."""
        return 1 if value == 0 else value


class KeptBody(Body):
    """A request that says how long its model stays."""

    keep_alive: KeepAlive = None
    _arrived: float = PrivateAttr(default_factory=time.perf_counter)

    @property
    def arrived(self) -> float:
        """When the request came (`time.perf_counter`)."""
        return self._arrived

    @property
    def seconds_kept(self) -> float | None:
        """How long the model is to stay in memory."""
        return self.keep_alive


class OllamaBody(KeptBody, ConversationBody):
    """What requests for a reply share."""

    read_elsewhere: ClassVar[dict[str, Any]] = EFFORT_FIELDS
    conversation: ClassVar[tuple[str, ...]]
    """The fields that hold what is answered."""
    silence: ClassVar[dict[str, list[Any]]] = {}
    """What a line holds that only keeps a connection alive."""

    stream: bool | None = None
    format: Annotated[
        AnswerFormat | None, BeforeValidator(as_format, json_schema_input_type=str | dict[str, Any] | None)
    ] = None
    options: Options | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def ignored(self) -> list[str]:
        """The fields that have no meaning here."""
        return [*super().ignored, *(["top_logprobs"] if self.top_logprobs and not self.logprobs else [])]

    @property
    def is_streamed(self) -> bool:
        """Whether the reply is to be streamed: it is, unless the request says otherwise."""
        return self.stream is not False

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether there is nothing to answer: the model is to be loaded, or unloaded."""

    @abstractmethod
    def request(self) -> ChatRequest | CompletionRequest:
        """Return the request for the chat service. Raises ApiError."""

    @abstractmethod
    def part(self, text: str, **more: Any) -> dict[str, Any]:
        """Return what a line of the reply holds of it: a text, and `thinking` or `tool_calls` if there are some."""

    def _reply(self) -> dict[str, Any]:
        """Return what a `ChatRequest` has of all but the conversation."""
        return {
            **self.common(*self.conversation, stream=self.is_streamed),
            **self._settings(),
            "answer_format": self.format,
        }

    def _settings(self) -> dict[str, Any]:
        options = self.options or Options()
        return {
            "sampling": {**self.sampling(), **options.sampling()},
            "max_tokens": options.num_predict,
            "max_repeated_tokens": self.setting("max_repeated_tokens"),
            "stop": options.stop,
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
        }


class OllamaChatBody(OllamaBody):
    """POST /api/chat."""

    conversation = ("messages",)

    messages: list[Any] | None = None
    tools: Annotated[
        Tools | None, BeforeValidator(Tools.parse_functions, json_schema_input_type=list[ToolInput] | None)
    ] = None
    tool_choice: Annotated[Any, DescribedAs(ToolChoiceInput)] = None

    @property
    def is_empty(self) -> bool:
        """Whether there are no messages."""
        return not self.messages

    def request(self) -> ChatRequest:
        """Return the request for the chat service."""
        tools = self.tools or Tools()
        messages, images = _conversation(Sent(self.messages, "messages").entries())
        return ChatRequest(
            messages=messages,
            images=images,
            tools=tools.functions,
            tool_paths=tools.paths,
            tool_choice=tools.choice(self.tool_choice),
            **self._reply(),
        )

    def part(self, text: str, **more: Any) -> dict[str, Any]:
        """Return a message of the model's."""
        return {"message": {"role": "assistant", "content": text, **more}}


_OF_ANY_PROMPT = frozenset({"model", "adapters", "priority", "logit_bias", "max_repeated_tokens"})
"""What all requests for text share that has a meaning for a bare text, too."""


class GenerateBody(OllamaBody):
    """POST /api/generate. A prompt that is `raw`, or has a `suffix`, goes to the model as it is."""

    refused: ClassVar[Refusals] = {
        "template": (is_empty, "a template is chosen when the server is started (--chat-template)"),
        "context": (is_empty, "this server gives none; send the conversation to /api/chat"),
    }
    conversation = ("prompt", "system", "suffix", "images")
    silence: ClassVar = {"thinking": [""]}  # litellm takes no line that has neither a response nor this

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[Any] | None = None

    @property
    def ignored(self) -> list[str]:
        """The fields that have no meaning here, or none for a prompt that goes to the model as it is."""
        sent = {**dict(self), **(self.model_extra or {})} if self.raw or self.suffix else {}
        others = self.read_elsewhere.keys() | ConversationBody.model_fields.keys() - _OF_ANY_PROMPT
        return [*super().ignored, *(name for name in sorted(others) if sent.get(name) not in (None, {}))]

    @property
    def is_empty(self) -> bool:
        """Whether there is no prompt."""
        return not (self.prompt or self.images or self.suffix)

    def request(self) -> ChatRequest | CompletionRequest:
        """Return the request for the chat service."""
        if self.raw or self.suffix:
            return self._completion()
        system = [{"role": "system", "content": self.system}] if self.system else []
        user = {"role": "user", "content": self.prompt or "", "images": self.images}
        messages, images = _conversation([Sent(message) for message in (*system, user)])
        return ChatRequest(messages=messages, images=images, **self._reply())

    def _completion(self) -> CompletionRequest:
        """Return the request for a bare text. Raises ApiError for what only a conversation can have."""
        form = "raw" if self.raw else "suffix"
        for name in ("system", "images", "format"):
            if getattr(self, name):
                raise refuse(
                    f"{name}: a prompt with {form} goes to the model as it is; send one of the two.", name
                )
        return CompletionRequest(
            prompt=self.prompt or "",
            suffix=self.suffix or "",
            adapter=self.adapters,
            priority=self.priority,
            **self._settings(),
        )

    def part(self, text: str, **more: Any) -> dict[str, Any]:
        """Return a response of the model's."""
        return {"response": text, **more}


def _conversation(messages: Sequence[Sent]) -> tuple[list[Any], list[ImageSource]]:
    """Return the messages as the chat service takes them, and their images."""
    shown, sources = take_images(with_media_as_parts([_message(message) for message in messages]))
    places = {
        f"messages[{index}].content[{at}]": image.path
        for index, message in enumerate(messages)
        for at, image in enumerate(message["images"].entries())
    }
    return shown, [replace(source, where=places.get(source.where, source.where)) for source in sources]


def _message(message: Sent) -> Any:
    """Return a message with its images as parts, before its text, and a tool's name where the others have it."""
    if not isinstance(message.value, Mapping):
        return message.value
    content, images, tool_name = message["content"], message["images"], message["tool_name"].value
    if not isinstance(content.value, str | None):
        raise content.wrong_type("a text")
    taken = {key: value for key, value in message.value.items() if key not in ("images", "tool_name")}
    if tool_name is not None:
        taken["name"] = tool_name
    if not images.value:
        return taken
    if not isinstance(images.value, list):
        raise images.wrong_type("a list")
    text = {"type": "text", "text": content.value or ""}
    return {**taken, "content": [*map(_image, images.entries()), text]}


def _image(image: Sent) -> dict[str, Any]:
    if not isinstance(image.value, str) or not image.value:
        raise image.unlike("a file in base64", "invalid_image")
    url = image.value if image.value.startswith("data:") else f"data:image/png;base64,{image.value}"
    return {"type": "image_url", "image_url": {"url": url}}
