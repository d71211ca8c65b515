"""What a request for generated text holds, whether it sends a conversation or a bare text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from mlx_backend.api.errors import refuse
from mlx_backend.api.fields import Lenient, Refusals, is_empty, is_one_of
from mlx_backend.api.openai.objects import StopInput
from mlx_backend.api.reply_fields import (
    ReplyBody,
    accepts,
    as_stop_strings,
    as_whole,
)
from mlx_backend.settings import SAMPLING

if TYPE_CHECKING:
    from mlx_backend.chat.reply import Reply
    from mlx_backend.chat.reply_group import ReplyGroup


def as_count_of_logprobs(value: Any) -> Any:
    """Accept false for no log probabilities, as older clients send it."""
    return None if value is False else value


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
    "moderation": (is_one_of(), "nothing is moderated here"),
    "use_beam_search": (is_one_of(False), "beam search is not supported"),
    "bad_words": (is_empty, "send logit_bias with the tokens that should not come"),
    "min_tokens": (is_one_of(0), "a reply ends where the model ends it"),
    "ignore_eos": (is_one_of(False), "a reply ends where the model ends it"),
    "stop_token_ids": (is_empty, "send the text in 'stop'"),
    "chat_template": (is_empty, "a template is chosen when the server is started (--chat-template)"),
}


LIMIT_NAMES = ("max_completion_tokens", "max_tokens", "n_predict")
"""Names of one setting; the first that is sent counts."""
_FOR_STREAMS = ("stream_options", "return_progress")


class StreamOptions(Lenient):
    """What to add to a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


@accepts(
    *SAMPLING, "max_tokens", "max_completion_tokens", "n_predict", "max_repeated_tokens", "repeat_penalty"
)
class GenerationBody(ReplyBody):
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

    @property
    def ignored(self) -> list[str]:
        """The fields that have no meaning here, or none in a reply that is not streamed, or that another overrules."""
        sent = () if self.stream else (name for name in _FOR_STREAMS if getattr(self, name))
        return [*sent, *self.overruled(LIMIT_NAMES), *super().ignored]

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
