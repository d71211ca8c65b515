"""The settings of a reply as fields of requests, for every API that generates text.

Each setting is declared once (`settings.ReplySettings`); `accepts` adds those that an API takes to its body. A
validator (`as_…`) makes one form of the several that clients send; what it raises is a 400 for pydantic.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema, create_model
from pydantic_core import PydanticCustomError

from mlx_backend.api.errors import refuse
from mlx_backend.api.fields import Body
from mlx_backend.api.sent import Sent
from mlx_backend.chat.request import UNLIMITED
from mlx_backend.conversation.json_values import excerpt
from mlx_backend.declaration import declared
from mlx_backend.models.spec import RESERVED_KWARGS
from mlx_backend.settings import SAMPLING, ReasoningFormat, ReplySettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


_FORMAT_ALIASES = {"none": "raw", "auto": "separate", "deepseek": "separate", "parsed": "separate"}


def as_whole(value: Any) -> Any:
    """Accept 7.0 for 7: some languages write every number with a decimal point."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def as_limit(value: Any) -> Any:
    """Accept -1 for no limit, as several clients send it."""
    value = as_whole(value)
    return None if type(value) is int and value == -1 else value


def as_stop_strings(value: Any) -> Any:
    """Accept one stop string or several; empty ones are left out."""
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        return ()
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise PydanticCustomError("stop", "must be a string or a list of strings")
    return tuple(text for text in texts if text)


def as_logit_bias(value: Any) -> Any:
    """Return pairs of a token id and its bias."""
    if value in (None, ""):
        return ()
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias", "must be an object: token id -> bias")
    pairs = []
    for token, bias in value.items():
        if not re.fullmatch(r"[0-9]{1,9}", token):
            raise PydanticCustomError(
                "logit_bias", "has the key {key}, which is not a token id", {"key": repr(token)}
            )
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise PydanticCustomError("logit_bias", "must map to numbers from -100 to 100")
        pairs.append((int(token), float(bias)))
    return tuple(pairs)


def as_reasoning_format(value: Any) -> Any:
    """Accept our names of the formats and those of other servers."""
    if value is None:
        return None
    try:
        return ReasoningFormat(_FORMAT_ALIASES.get(value, value))
    except (ValueError, TypeError):
        words = ", ".join(ReasoningFormat)
        raise PydanticCustomError("reasoning_format", "must be one of {words}", {"words": words}) from None


type Limit = Annotated[Annotated[int, Field(gt=0)] | None, BeforeValidator(as_limit)]

_SETTINGS = declared(ReplySettings)

# Where a request accepts more than a file: -1 is no limit, and a seed is any 64-bit number.
_TYPES: dict[str, Any] = {
    "max_tokens": Limit,
    "n_predict": Limit,
    "top_k": Annotated[int, Field(ge=-1), BeforeValidator(as_whole)],
    "seed": Annotated[int, Field(ge=-(2**63), lt=2**64), BeforeValidator(as_whole)],
    "thinking_budget": Annotated[int, Field(ge=UNLIMITED), BeforeValidator(as_whole)],
    "thinking_budget_message": Annotated[str, Field(max_length=1000)],
    "reasoning_format": Annotated[
        Any, BeforeValidator(as_reasoning_format, json_schema_input_type=ReasoningFormat)
    ],
}


ALIASES = {
    "repeat_penalty": "repetition_penalty",
    "n_predict": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "thinking_token_budget": "thinking_budget",
    "thinking_budget_tokens": "thinking_budget",
    "reasoning_budget": "thinking_budget",
    "reasoning_budget_tokens": "thinking_budget",
    "reasoning_budget_message": "thinking_budget_message",
}
"""Other names of settings in requests, as other servers and clients have them."""


def names_of(setting: str) -> tuple[str, ...]:
    """Return all names of a setting in requests, its own first."""
    return (setting, *(alias for alias, name in ALIASES.items() if name == setting))


def accepts[B: BaseModel](*names: str) -> Callable[[type[B]], type[B]]:
    """Return a decorator that adds settings to a body, by their names or their aliases."""

    def add(body: type[B]) -> type[B]:
        added: dict[str, Any] = {name: (_field(ALIASES.get(name, name)), None) for name in names}
        return create_model(
            body.__name__, __base__=body, __doc__=body.__doc__, __module__=body.__module__, **added
        )

    return add


def _field(name: str) -> Any:
    return Annotated[_type(name) | None, Field(description=_SETTINGS[name].help)]


def _type(name: str) -> Any:
    setting = _SETTINGS[name]
    if name in _TYPES:
        return _TYPES[name]
    return (
        Annotated[int, Field(**setting.kind.limits), BeforeValidator(as_whole)]
        if setting.kind.type is int
        else setting.kind.annotation()
    )


def offer(
    functions: dict[str, dict[str, Any]], function: dict[str, Any], tool: Sent, *, may_repeat: bool = False
) -> None:
    """Add the function that a tool is, by its name.

    Raises the ApiError for a second one of that name, as other servers do; if it `may_repeat` for another one only.
    """
    name = function["function"]["name"]
    known = functions.setdefault(name, function)
    if known is not function and not (may_repeat and known == function):
        said = f"there is another tool called {excerpt(name)}. Each tool needs a name of its own."
        raise tool["name"].refusal(said)


type LogitBiasInput = Annotated[
    dict[str, float] | None,
    WithJsonSchema(
        {
            "type": ["object", "null"],
            "description": "Token id -> what is added to its logit.",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]


class ReplyBody(Body):
    """What every request for generated text shares. Its settings are the fields that `accepts` has added."""

    logit_bias: Annotated[
        tuple[tuple[int, float], ...],
        BeforeValidator(as_logit_bias, json_schema_input_type=LogitBiasInput),
    ] = ()

    @property
    def ignored(self) -> list[str]:
        """The fields that have no meaning here, or that another name of the same setting overrules."""
        return [*self.overruled(names_of("repetition_penalty")), *super().ignored]

    def overruled(self, names: Sequence[str]) -> list[str]:
        """Return which of the names of one setting were sent with another value than the first, which counts."""
        sent = self._sent(names)
        return [name for name, value in sent if value != sent[0][1]]

    def setting(self, *names: str) -> Any:
        """Return the first of these settings that was sent; None if none was."""
        return next((value for _, value in self._sent(names)), None)

    def _sent(self, names: Sequence[str]) -> list[tuple[str, Any]]:
        # Attributes that are no fields are what was sent of others, which nothing has checked.
        fields = type(self).model_fields
        return [
            (name, value) for name in names if name in fields and (value := getattr(self, name)) is not None
        ]

    def sampling(self) -> dict[str, Any]:
        """Return the sampling settings that were sent, by the names of `Sampling`."""
        top_k, seed = self.setting("top_k"), self.setting("seed")
        sent = {
            **{name: self.setting(*names_of(name)) for name in SAMPLING},
            "top_k": None if top_k is None else max(top_k, 0),
            "seed": None if seed in (None, -1) else seed % 2**63,
            "logit_bias": self.logit_bias or None,
        }
        return {name: value for name, value in sent.items() if value is not None}


def as_json(value: Any, field: str) -> Any:
    """Decode JSON that is sent as text."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            raise PydanticCustomError(field, "is not JSON") from None
    return value


def as_template_kwargs(value: Any) -> Any:
    """Accept further variables for the chat template, also as text, except those the server sets itself."""
    if value == "":
        return {}
    value = as_json(value, "chat_template_kwargs")
    if isinstance(value, dict) and (reserved := sorted(RESERVED_KWARGS & value.keys())):
        raise PydanticCustomError(
            "chat_template_kwargs", "cannot replace {name}", {"name": ", ".join(reserved)}
        )
    return {} if value is None else value


def nested_budgets(
    written: Mapping[str, Any], template_kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, int]]:
    """Yield the thinking budgets inside other fields. Raises ApiError for what is not a number of tokens."""
    for sent in (Sent(written)["reasoning"]["max_tokens"], Sent(written)["thinking"]["budget_tokens"]):
        if (value := sent.value) is None or value == "":
            continue
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value.strip()):
            value = int(value)
        if type(value) is not int or value < 0:
            raise sent.unlike("a whole number of tokens from 0 up")
        yield sent.path, value
    value = template_kwargs.get("thinking_budget")
    if type(value) is int and value >= 0:  # some templates read it, and -1 means something to them
        yield "chat_template_kwargs.thinking_budget", value


@accepts(
    *names_of("thinking_budget"),
    *names_of("thinking_budget_message"),
    *("answer_reserve", "max_repeated_tokens", "background_detection"),
)
class ConversationBody(ReplyBody):
    """What every request that sends a conversation shares."""

    adapters: Annotated[str, Field(min_length=1)] | None = None
    priority: Annotated[int, Field(gt=-(2**31), lt=2**31), BeforeValidator(as_whole)] | None = None
    chat_template_kwargs: Annotated[
        dict[str, Any],
        BeforeValidator(as_template_kwargs, json_schema_input_type=dict[str, Any] | str | None),
    ] = Field(default_factory=dict)

    def common(self, *conversation: str, **read: Any) -> dict[str, Any]:
        """Return what a `ChatRequest` has of these fields. `read` are those that are not as the client wrote them.

        Those that hold the `conversation` are left out: a request lives as long as its reply, and images are megabytes.
        """
        return {
            "fields": {
                **{name: value for name, value in self.written.items() if name not in conversation},
                **read,
                "chat_template_kwargs": self.chat_template_kwargs,  # which may have been text
            },
            "template_kwargs": self.chat_template_kwargs,
            "sampling": self.sampling(),
            "adapter": self.adapters,
            "priority": self.priority,
            "max_repeated_tokens": self.setting("max_repeated_tokens"),
            "thinking_budget": self.thinking_budget_sent(),
            "thinking_budget_message": self.setting(*names_of("thinking_budget_message")),
            "answer_reserve": self.setting("answer_reserve"),
            "background_detection": self.setting("background_detection"),
        }

    def thinking_budget_sent(self) -> int | None:
        """Return how many tokens may be reasoning, from whichever field was sent."""
        sent: dict[str, int] = {}
        for name in names_of("thinking_budget"):
            if (value := self.setting(name)) is not None:
                sent[name] = value
        sent |= nested_budgets(self.model_extra or {}, self.chat_template_kwargs)
        first = next(iter(sent), "")
        for other, value in sent.items():
            if value != sent[first]:
                text = (
                    f"{first} is {sent[first]} and {other} is {value}: they mean the same; send one of them."
                )
                raise refuse(text, other)
        return sent.get(first)
