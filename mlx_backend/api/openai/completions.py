"""POST /v1/completions: a text goes to the model as it is, and comes back as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from mlx_backend.api.base import Operation
from mlx_backend.api.errors import refuse
from mlx_backend.api.json_text import decode_json
from mlx_backend.api.openai.base import (
    BodyCall,
    OpenAIProtocol,
    Refusals,
    is_empty,
    is_one_of,
    with_extra_body,
)
from mlx_backend.api.openai.generation_body import REFUSED, GenerationBody, as_count_of_logprobs
from mlx_backend.api.openai.objects import DescribedAs, Prompt, TextChunk, TextCompletion
from mlx_backend.api.openai.stream import Chunk, ChunkWriter, TextLogprobs
from mlx_backend.chat.reply import ContentLogprobs
from mlx_backend.chat.request import CompletionRequest
from mlx_backend.conversation.events import ContentDelta, ReasoningDelta, StreamEnd
from mlx_backend.conversation.json_values import excerpt

if TYPE_CHECKING:
    from mlx_backend.chat.reply import Reply, ReplyEvent
    from mlx_backend.chat.service import Service
    from mlx_backend.engine.base import QueueClient


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
    logprobs: Annotated[Annotated[int, Field(ge=0, le=20)] | None, BeforeValidator(as_count_of_logprobs)] = (
        None
    )

    def request(self) -> CompletionRequest:
        """Return the request for the chat service."""
        return CompletionRequest(
            prompt=_one_prompt(self.prompt),
            sampling=self.sampling(),
            adapter=self.adapters,
            priority=self.priority,
            max_tokens=self.setting("max_tokens"),
            max_repeated_tokens=self.setting("max_repeated_tokens"),
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


class Completions(OpenAIProtocol):
    """Implements `ReplyProtocol`: a text is continued."""

    operation = Operation(
        summary="Continue a text",
        body=CompletionBody,
        answer=TextCompletion,
        event=TextChunk,
    )

    def parse(self, body: bytes) -> CompletionCall:
        """Parse a request. Raises ApiError naming the field that is wrong."""
        return CompletionCall(CompletionBody.parse(with_extra_body(decode_json(body))))


class CompletionCall(BodyCall[CompletionBody]):
    """Implements `ReplyCall`."""

    @property
    def stream(self) -> bool:
        """Whether the reply is to be streamed."""
        return bool(self.body.stream)

    def start(self, service: Service, client: QueueClient) -> tuple[Reply, TextWriter]:
        """Start the reply."""
        reply = service.complete(self.body.request(), client)
        engine = service.engine
        has_logprobs = self.body.logprobs is not None
        writer = TextWriter(
            engine.model_id,
            include_usage=self.body.include_usage,
            logprobs=TextLogprobs(engine.tokenizer.bytes_of) if has_logprobs else None,
        )
        return reply, writer


class TextWriter(ChunkWriter):
    """Implements `ReplyWriter`."""

    id_prefix = "cmpl-"
    chunk_object = whole_object = "text_completion"

    def opening(self) -> list[Chunk]:
        """Return nothing: the first chunk is text."""
        return []

    def chunks(self, event: ReplyEvent) -> list[Chunk]:
        """Return the chunks of an event."""
        match event:
            case ContentLogprobs(tokens):
                self._tokens = tokens
            case ContentDelta(text) | ReasoningDelta(text):
                return [Chunk({"text": text}, self.take_logprobs())]
            case StreamEnd(finish):
                return [Chunk(finish=finish)]
        return []

    def choice(self, delta: dict[str, Any]) -> dict[str, Any]:
        """Return a choice's text."""
        return {"text": delta.get("text", "")}

    def whole_choice(self, deltas: dict[str, list[Any]]) -> dict[str, Any]:
        """Return a choice's text, joined."""
        return {"text": "".join(deltas.get("text", ()))}
