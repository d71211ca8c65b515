"""What a request for generated text holds, whether it sends a conversation or a bare text.

The settings of a reply (`settings.ReplySettings`) are fields here by the same declarations: `accepts` adds them. A
validator (`as_…`) makes one form of the several that clients send; what it raises is a 400 for pydantic.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, Field, create_model
from pydantic_core import PydanticCustomError

from mlx_backend.api.errors import refuse
from mlx_backend.api.openai.base import Body, Lenient, Refusals, is_empty, is_one_of
from mlx_backend.api.openai.objects import LogitBiasInput, StopInput
from mlx_backend.chat.request import UNLIMITED
from mlx_backend.declaration import declared
from mlx_backend.settings import SAMPLING, ReasoningFormat, ReplySettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlx_backend.chat.reply import Reply
    from mlx_backend.chat.reply_group import ReplyGroup


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


def as_count_of_logprobs(value: Any) -> Any:
    """Accept false for no log probabilities, as older clients send it."""
    return None if value is False else value


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


_STRUCTURED = "send response_format with a json_schema, guided_regex or guided_choice"

REFUSED: Refusals = {
    "guided_grammar": (is_empty, _STRUCTURED),
    "grammar": (is_empty, _STRUCTURED),
    "ebnf": (is_empty, _STRUCTURED),
    "structural_tag": (is_empty, _STRUCTURED),
    "format": (is_empty, _STRUCTURED),
    "functions": (is_empty, "the old form of tools: send 'tools' instead"),
    "function_call": (is_one_of("auto", "none"), "the old form of tool_choice: send 'tool_choice' instead"),
    "include_stop_str_in_output": (is_one_of(False), "a reply ends before its stop string"),
    "no_stop_trim": (is_one_of(False), "a reply ends before its stop string"),
    "stop_regex": (is_empty, "send texts in 'stop'"),
    "truncate_prompt_tokens": (is_one_of(), "a prompt is never cut: send a shorter one"),
    "allowed_token_ids": (is_empty, f"{_STRUCTURED}, or logit_bias"),
    "logits_processors": (is_empty, "this server runs no code of requests"),
    "custom_logit_processor": (is_empty, "this server runs no code of requests"),
    "documents": (is_empty, "put their texts into a message"),
    "lora": (is_empty, "name an adapter in 'adapters'"),
    "lora_path": (is_empty, "name an adapter in 'adapters'"),
    "n_probs": (is_one_of(0), "send logprobs"),
    "return_token_ids": (is_one_of(False), "a reply is text: /v1/tokenize has the tokens"),
    "return_tokens_as_token_ids": (is_one_of(False), "a reply is text: /v1/tokenize has the tokens"),
    "return_hidden_states": (is_one_of(False), "a reply is text"),
    "prompt_logprobs": (
        is_one_of(False),
        "send echo and logprobs to /v1/completions, whose reply then has the prompt's log probabilities",
    ),
    "modalities": (is_one_of(["text"], []), "this model writes text only"),
    "audio": (is_empty, "this model writes text only"),
    "web_search_options": (is_one_of(), "this server does not search the web"),
    "use_beam_search": (is_one_of(False), "beam search is not supported"),
    "bad_words": (is_empty, "send logit_bias with the tokens that should not come"),
    "min_tokens": (is_one_of(0), "a reply ends where the model ends it"),
    "ignore_eos": (is_one_of(False), "a reply ends where the model ends it"),
    "stop_token_ids": (is_empty, "send the text in 'stop'"),
    "chat_template": (is_empty, "a template is chosen when the server is started (--chat-template)"),
}


LIMIT_NAMES = ("max_completion_tokens", "max_tokens", "n_predict")
PENALTY_NAMES = ("repetition_penalty", "repeat_penalty")
"""Names of one setting; the first that is sent counts."""
_FOR_STREAMS = ("stream_options", "return_progress")


class StreamOptions(Lenient):
    """What to add to a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


@accepts(
    *SAMPLING, "max_tokens", "max_completion_tokens", "n_predict", "max_repeated_tokens", "repeat_penalty"
)
class GenerationBody(Body):
    """What both kinds of request for generated text share."""

    refused: ClassVar[Refusals] = REFUSED

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    n: Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(as_whole)] = None
    best_of: Annotated[int | None, BeforeValidator(as_whole)] = None
    adapters: Annotated[str, Field(min_length=1)] | None = None
    priority: Annotated[int, Field(gt=-(2**31), lt=2**31), BeforeValidator(as_whole)] | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(as_stop_strings, json_schema_input_type=StopInput)] = ()
    logit_bias: Annotated[
        tuple[tuple[int, float], ...],
        BeforeValidator(as_logit_bias, json_schema_input_type=LogitBiasInput),
    ] = ()

    @property
    def ignored(self) -> list[str]:
        """The fields that have no meaning here, or none in a reply that is not streamed, or that another overrules."""
        sent = () if self.stream else (name for name in _FOR_STREAMS if getattr(self, name))
        overruled: list[str] = []
        for names in (LIMIT_NAMES, PENALTY_NAMES):
            values = [(name, value) for name in names if (value := getattr(self, name, None)) is not None]
            overruled += [name for name, value in values if value != values[0][1]]
        return [*sent, *overruled, *super().ignored]

    @property
    def num_choices(self) -> int:
        """How many replies to a prompt are asked for. Raises ApiError if more than those are to be generated."""
        n = self.n or 1
        if self.best_of not in (None, n):
            raise refuse(
                f"best_of = {self.best_of} is not supported: each reply that is generated is sent, which are n = {n}. "
                "Leave best_of out, and send as n how many you want.",
                "best_of",
                "unsupported_value",
            )
        return n

    def stream_fields(self, reply: Reply | ReplyGroup) -> dict[str, Any]:
        """Return what a stream is to hold in addition, by the names of `ChunkWriter`."""
        options = self.stream_options or StreamOptions()
        return {
            "include_usage": bool(options.include_usage),
            "running_usage": (lambda: reply.usage) if options.continuous_usage_stats else None,
            "return_progress": bool(self.return_progress),
        }

    def setting(self, *names: str) -> Any:
        """Return the first of these settings that was sent; None if none was."""
        values = (getattr(self, name, None) for name in names)
        return next((value for value in values if value is not None), None)

    def sampling(self) -> dict[str, Any]:
        """Return the sampling settings that were sent, by the names of `Sampling`."""
        top_k, seed = self.setting("top_k"), self.setting("seed")
        sent = {
            **{name: self.setting(name) for name in SAMPLING},
            "top_k": None if top_k is None else max(top_k, 0),
            "seed": None if seed in (None, -1) else seed % 2**63,
            "repetition_penalty": self.setting(*PENALTY_NAMES),
            "logit_bias": self.logit_bias or None,
        }
        return {name: value for name, value in sent.items() if value is not None}
