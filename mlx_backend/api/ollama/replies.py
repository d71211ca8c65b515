"""POST /api/chat and POST /api/generate. Without anything to answer, a model is loaded or unloaded."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlx_backend.api.base import Operation
from mlx_backend.api.fields import BodyCall
from mlx_backend.api.json_text import decode_json
from mlx_backend.api.ollama import objects
from mlx_backend.api.ollama.base import STREAM_TYPE, OllamaProtocol, as_time
from mlx_backend.api.ollama.body import GenerateBody, OllamaBody, OllamaChatBody
from mlx_backend.api.ollama.registry_call import RegistryCall
from mlx_backend.api.ollama.stream import LineWriter
from mlx_backend.api.openai.stream import ChatLogprobs
from mlx_backend.chat.request import ChatRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_backend.chat.reply import Reply
    from mlx_backend.chat.service import Service
    from mlx_backend.engine.base import QueueClient
    from mlx_backend.registry.base import ModelRegistry


class _Replies(OllamaProtocol):
    """Implements `ReplyProtocol` for a kind of body."""

    body: type[OllamaBody]

    def parse(self, body: bytes) -> LineCall | RegistryCall:
        """Parse a request. Raises ApiError naming the field that is wrong."""
        written = decode_json(body)
        parsed = self.body.parse(written)
        if not parsed.is_empty:
            return LineCall(parsed, written)
        return RegistryCall(parsed, lambda models, wait: _loaded(parsed, models, wait))


class Chat(_Replies):
    """Answers a conversation."""

    body = OllamaChatBody
    operation = Operation(
        summary="Answer a conversation, as Ollama does",
        body=OllamaChatBody,
        answer=objects.ChatPart,
        event=objects.ChatPart | objects.OllamaError,
        stream_type=STREAM_TYPE,
    )


class Generate(_Replies):
    """Answers a prompt, or continues a text."""

    body = GenerateBody
    operation = Operation(
        summary="Answer a prompt, as Ollama does",
        body=GenerateBody,
        answer=objects.GeneratePart,
        event=objects.GeneratePart | objects.OllamaError,
        stream_type=STREAM_TYPE,
    )


@dataclass(frozen=True)
class LineCall(BodyCall[OllamaBody]):
    """Implements `ReplyCall`. `written` is the body as the client wrote it, `arrived` when it came."""

    written: Mapping[str, Any]
    arrived: float = field(default_factory=time.perf_counter)

    @property
    def stream(self) -> bool:
        """Whether the reply is to be streamed."""
        return self.body.is_streamed

    @property
    def keep_alive(self) -> float | None:
        """The seconds that the model is to stay in memory."""
        return self.body.keep_alive

    def start(self, service: Service, client: QueueClient) -> tuple[Reply, LineWriter]:
        """Start the reply."""
        waited = time.perf_counter() - self.arrived
        request = self.body.request(self.written)
        if isinstance(request, ChatRequest):
            reply = service.chat(request, client)
        else:
            reply = service.complete(request, client)
        bytes_of = service.engine.tokenizer.bytes_of
        writer = LineWriter(
            self.body.model or service.model_id,
            self.body.part,
            reply.call_id,
            started=self.arrived,
            load_seconds=waited,
            logprobs=ChatLogprobs(bytes_of) if self.body.logprobs else None,
            silence=self.body.silence,
        )
        return reply, writer


def _loaded(body: OllamaBody, models: ModelRegistry, wait: float) -> dict[str, Any]:
    """Load the model that is named, unless it is not to stay."""
    is_unloaded, name = body.keep_alive == 0, body.model
    if not is_unloaded:
        with models.acquire(name, wait) as lease:
            name = name or lease.name
    return {
        "model": name or "default",
        "created_at": as_time(time.time()),
        **body.part(""),
        "done": True,
        "done_reason": "unload" if is_unloaded else "load",
    }
