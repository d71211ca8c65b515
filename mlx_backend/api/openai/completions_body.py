"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from mlx_backend.api.errors import refuse
from mlx_backend.api.openai import fields
from mlx_backend.api.openai.body import Refusals, is_empty, is_one_of
from mlx_backend.api.openai.generation_body import REFUSED, GenerationBody
from mlx_backend.api.openai.input_types import DescribedAs, Prompt
from mlx_backend.chat.request import CompletionRequest
from mlx_backend.conversation.json_values import excerpt

_FORMATS = ("guided_json", "guided_regex", "guided_choice", "json_schema", "regex", "structured_outputs")
_NO_FORMAT = "the answers of /v1/chat/completions can be held to a format"


class CompletionBody(GenerationBody):
    """POST /v1/completions: the text goes to the model as it is, and comes back as it is.

    No chat template, no channels: a Harmony model's markers are control tokens in the prompt and are part of the
    reply. Only the token that ends the reply is left out.
    """

    refused: ClassVar[Refusals] = {
        **REFUSED,
        "response_format": (is_one_of({"type": "text"}), _NO_FORMAT),
        **dict.fromkeys(_FORMATS, (is_empty, _NO_FORMAT)),
    }

    prompt: Annotated[Any, DescribedAs(Prompt)]
    logprobs: Annotated[
        Annotated[int, Field(ge=0, le=20)] | None, BeforeValidator(fields.count_of_logprobs)
    ] = None

    def request(self) -> CompletionRequest:
        """Return the request for the chat service."""
        return CompletionRequest(
            prompt=_one_prompt(self.prompt),
            sampling=self.sampling(),
            adapter=self.adapters,
            priority=self.priority,
            max_tokens=self.setting("max_tokens"),
            stop=self.stop,
            logprobs=self.logprobs,
        )


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
        case _ if is_empty(prompt):
            raise refuse("prompt: must not be empty.", "prompt")
        case _:
            raise refuse(f"prompt: must be a string or a list of token ids, not {excerpt(prompt)}.", "prompt")
