"""What a request for generated text holds, whether it sends a conversation or a bare text."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from mlx_backend.api.openai import fields
from mlx_backend.api.openai.body import Body, Lenient, Refusals, is_empty, is_one_of
from mlx_backend.api.openai.input_types import EFFORT_FIELDS, LogitBiasInput, StopInput
from mlx_backend.api.openai.setting_fields import accepts
from mlx_backend.sampling_settings import SAMPLING

_STRUCTURED = "send response_format with a json_schema, guided_regex or guided_choice"

REFUSED: Refusals = {
    "n": (is_one_of(1), "a request gets one answer; send several requests"),
    "best_of": (is_one_of(1), "this server generates one candidate"),
    "guided_grammar": (is_empty, _STRUCTURED),
    "grammar": (is_empty, _STRUCTURED),
    "ebnf": (is_empty, _STRUCTURED),
    "structural_tag": (is_empty, _STRUCTURED),
    "format": (is_empty, _STRUCTURED),
    "functions": (is_empty, "the old form of tools: send 'tools' instead"),
    "function_call": (is_one_of("auto", "none"), "the old form of tool_choice: send 'tool_choice' instead"),
    "prompt_logprobs": (is_one_of(0, False), "only the reply's log probabilities are reported"),
    "modalities": (is_one_of(["text"], []), "this model writes text only"),
    "audio": (is_empty, "this model writes text only"),
    "web_search_options": (is_one_of(), "this server does not search the web"),
    "use_beam_search": (is_one_of(False), "beam search is not supported"),
    "bad_words": (is_empty, "send logit_bias with the tokens that should not come"),
    "min_tokens": (is_one_of(0), "a reply ends where the model ends it"),
    "ignore_eos": (is_one_of(False), "a reply ends where the model ends it"),
    "stop_token_ids": (is_empty, "send the text in 'stop'"),
    "chat_template": (is_empty, "a template is chosen when the server is started (--chat-template)"),
    "echo": (is_one_of(False), "the prompt is not repeated in the reply"),
    "suffix": (is_one_of(""), "text cannot be inserted before a suffix"),
}


class StreamOptions(Lenient):
    """What to add to a stream."""

    include_usage: bool | None = None


@accepts(*SAMPLING, "max_tokens", "repeat_penalty")
class GenerationBody(Body):
    """What both kinds of request for generated text share."""

    refused: ClassVar[Refusals] = REFUSED
    read_elsewhere: ClassVar[dict[str, Any]] = EFFORT_FIELDS

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    adapters: Annotated[str, Field(min_length=1)] | None = None
    priority: Annotated[int, Field(gt=-(2**31), lt=2**31), BeforeValidator(fields.whole)] | None = None
    stop: Annotated[
        tuple[str, ...], BeforeValidator(fields.stop_strings, json_schema_input_type=StopInput)
    ] = ()
    logit_bias: Annotated[
        tuple[tuple[int, float], ...],
        BeforeValidator(fields.logit_bias, json_schema_input_type=LogitBiasInput),
    ] = ()

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def setting(self, *names: str) -> Any:
        """Return the first of these settings that was sent; None if none was."""
        values = (getattr(self, name) for name in names)
        return next((value for value in values if value is not None), None)

    def sampling(self) -> dict[str, Any]:
        """Return the sampling settings that were sent, by the names of `Sampling`."""
        top_k, seed = self.setting("top_k"), self.setting("seed")
        sent = {
            **{name: self.setting(name) for name in SAMPLING},
            "top_k": None if top_k is None else max(top_k, 0),
            "seed": None if seed in (None, -1) else seed % 2**63,
            "repetition_penalty": self.setting("repetition_penalty", "repeat_penalty"),
            "logit_bias": self.logit_bias or None,
        }
        return {name: value for name, value in sent.items() if value is not None}
