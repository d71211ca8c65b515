"""POST /v1/completions: a text goes to the model as it is, and comes back as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_backend.api.base import Operation
from mlx_backend.api.json_body import decode_json
from mlx_backend.api.openai.base import BodyCall, OpenAIProtocol
from mlx_backend.api.openai.body import with_extra_body
from mlx_backend.api.openai.completions_body import CompletionBody
from mlx_backend.api.openai.logprobs import TextLogprobs
from mlx_backend.api.openai.objects import TextChunk, TextCompletion
from mlx_backend.api.openai.stream import Chunk, ChunkWriter
from mlx_backend.chat.reply import ContentLogprobs
from mlx_backend.conversation.events import ContentDelta, ReasoningDelta, StreamEnd

if TYPE_CHECKING:
    from mlx_backend.chat.reply import Reply, ReplyEvent
    from mlx_backend.chat.service import Service
    from mlx_backend.engine.base import QueueClient


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
