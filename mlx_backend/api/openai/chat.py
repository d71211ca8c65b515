"""POST /v1/chat/completions.

`role` comes once, before everything else. A tool call is sent whole, with its index, and only if it is complete:
one that the token limit cut must not be run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_backend.api.base import Operation
from mlx_backend.api.json_body import decode_json
from mlx_backend.api.openai.base import BodyCall, OpenAIProtocol
from mlx_backend.api.openai.body import with_extra_body
from mlx_backend.api.openai.chat_body import ChatBody
from mlx_backend.api.openai.logprobs import ChatLogprobs
from mlx_backend.api.openai.objects import ChatChunk, ChatCompletion
from mlx_backend.api.openai.reasoning import reasoning_deltas
from mlx_backend.api.openai.stream import Chunk, ChunkWriter
from mlx_backend.api.openai.usage import reasoning_object
from mlx_backend.chat.reply import ContentLogprobs
from mlx_backend.conversation.events import (
    ContentDelta,
    ReasoningDelta,
    StreamEnd,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from mlx_backend.settings import ReasoningField, ReasoningFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mlx_backend.api.openai.logprobs import LogprobsFormat
    from mlx_backend.api.openai.objects import ReasoningObject
    from mlx_backend.chat.reply import Reply, ReplyEvent
    from mlx_backend.chat.service import Service
    from mlx_backend.engine.base import QueueClient


class ChatCompletions(OpenAIProtocol):
    """Implements `ReplyProtocol`: a conversation is answered."""

    operation = Operation(
        summary="Answer a conversation",
        body=ChatBody,
        answer=ChatCompletion,
        event=ChatChunk,
    )

    def parse(self, body: bytes) -> ChatCall:
        """Parse a request. Raises ApiError naming the field that is wrong."""
        written = with_extra_body(decode_json(body))
        return ChatCall(ChatBody.parse(written), written)


@dataclass(frozen=True)
class ChatCall(BodyCall[ChatBody]):
    """Implements `ReplyCall`. `written` is the body as the client wrote it: effort is looked up there."""

    written: Mapping[str, Any]

    @property
    def stream(self) -> bool:
        """Whether the reply is to be streamed."""
        return bool(self.body.stream)

    def start(self, service: Service, client: QueueClient) -> tuple[Reply, ChatWriter]:
        """Start the reply, with the reasoning where the request, the model or the server wants it."""
        settings = service.settings
        reasoning_format = self.body.reasoning_format_or(settings.reasoning_format)
        reply = service.chat(self.body.request(self.written, reasoning_format), client)
        engine = service.engine
        writer = ChatWriter(
            engine.model_id,
            call_id=reply.call_id,
            reasoning_format=reasoning_format,
            reasoning_field=settings.reasoning_field,
            include_usage=self.body.include_usage,
            logprobs=ChatLogprobs(engine.tokenizer.bytes_of) if self.body.logprobs else None,
            reasoning=reasoning_object(reply),
        )
        return reply, writer


class ChatWriter(ChunkWriter):
    """Implements `ReplyWriter`. `call_id` gives the id of a tool call by its index."""

    id_prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(
        self,
        model: str,
        *,
        call_id: Callable[[int], str],
        reasoning_format: ReasoningFormat = ReasoningFormat.SEPARATE,
        reasoning_field: ReasoningField = ReasoningField.REASONING_CONTENT,
        include_usage: bool = False,
        logprobs: LogprobsFormat | None = None,
        reasoning: ReasoningObject | None = None,
    ) -> None:
        super().__init__(model, include_usage=include_usage, logprobs=logprobs, reasoning=reasoning)
        self._call_id = call_id
        self._reasoning = reasoning_deltas(reasoning_format, reasoning_field)
        self._calls: dict[int, tuple[str, list[str]]] = {}  # index -> name, arguments so far

    def opening(self) -> list[Chunk]:
        """Return the chunk with the role."""
        return [Chunk({"role": "assistant"})]

    def chunks(self, event: ReplyEvent) -> list[Chunk]:
        """Return the chunks of an event."""
        match event:
            case ReasoningDelta(text):
                return [Chunk(delta) for delta in self._reasoning.feed(text)]
            case ContentLogprobs(tokens):
                self._tokens = tokens
            case ContentDelta(text):
                return [*self._reasoning_end(), Chunk({"content": text}, self.take_logprobs())]
            case ToolCallStart(index, name):
                self._calls[index] = (name, [])
            case ToolCallDelta(index, arguments):
                self._calls[index][1].append(arguments)
            case ToolCallEnd(index, complete):
                name, parts = self._calls.pop(index)
                if complete:
                    return [*self._reasoning_end(), self._call(index, name, "".join(parts))]
            case StreamEnd(finish):
                return [*self._reasoning_end(), Chunk(finish=finish)]
        return []

    def choice(self, delta: dict[str, Any]) -> dict[str, Any]:
        """Return a choice's delta."""
        return {"delta": delta}

    def whole_choice(self, deltas: dict[str, list[Any]]) -> dict[str, Any]:
        """Return a choice's message: texts joined, calls in order. With calls alone the content is null."""
        texts = {key: "".join(parts) for key, parts in deltas.items() if key not in ("role", "tool_calls")}
        calls = [
            {key: value for key, value in call.items() if key != "index"}
            for delta in deltas.get("tool_calls", ())
            for call in delta
        ]
        message: dict[str, Any] = {"role": "assistant", "content": None if calls else "", **texts}
        return {"message": {**message, "tool_calls": calls} if calls else message}

    def _reasoning_end(self) -> list[Chunk]:
        return [Chunk(delta) for delta in self._reasoning.close()]

    def _call(self, index: int, name: str, arguments: str) -> Chunk:
        function = {"name": name, "arguments": arguments}
        call = {"index": index, "id": self._call_id(index), "type": "function", "function": function}
        return Chunk({"tool_calls": [call]})
