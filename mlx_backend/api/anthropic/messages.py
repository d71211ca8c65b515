"""POST /v1/messages, POST /v1/messages/count_tokens, and the list of models in this API's shape."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar

from mlx_backend.api.anthropic import objects
from mlx_backend.api.anthropic.base import AnthropicProtocol
from mlx_backend.api.anthropic.body import MessagesBody
from mlx_backend.api.anthropic.stream import MessageWriter
from mlx_backend.api.base import JsonAnswer, Operation
from mlx_backend.api.fields import BodyCall
from mlx_backend.api.json_text import decode_json
from mlx_backend.api.openai.models import description_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_backend.api.base import OnDisconnect
    from mlx_backend.chat.reply import Reply
    from mlx_backend.chat.reply_group import ReplyGroup
    from mlx_backend.chat.service import Service
    from mlx_backend.engine.base import QueueClient
    from mlx_backend.registry.base import Lease, ModelRegistry


class Messages(AnthropicProtocol):
    """Implements `ReplyProtocol`: a conversation of content blocks is answered."""

    operation = Operation(
        summary="Answer a conversation of content blocks",
        body=MessagesBody,
        answer=objects.MessageObject,
        event=objects.Event,
    )

    def parse(self, body: bytes) -> MessagesCall:
        """Parse a request. Raises ApiError naming the field that is wrong."""
        written = decode_json(body)
        return MessagesCall(MessagesBody.parse(written), written)


@dataclass(frozen=True)
class MessagesCall(BodyCall[MessagesBody]):
    """Implements `ReplyCall`. `written` is the body as the client wrote it."""

    written: Mapping[str, Any]

    @property
    def stream(self) -> bool:
        """Whether the message is to be streamed."""
        return bool(self.body.stream)

    def start(self, service: Service, client: QueueClient) -> tuple[Reply | ReplyGroup, MessageWriter]:
        """Start the reply."""
        reply = service.chat(self.body.request(self.written), client)
        omits = self.body.omits_thinking(self.written)
        return reply, MessageWriter(service.model_id, reply, omits_thinking=omits)


class CountTokens(AnthropicProtocol):
    """Implements `JsonProtocol`: how many tokens a request's prompt has."""

    operation = Operation(
        summary="Count the tokens of a conversation of content blocks",
        body=MessagesBody,
        answer=objects.TokenCount,
    )

    def parse(self, body: bytes) -> CountTokensCall:
        """Parse a request. Raises ApiError naming the field that is wrong."""
        written = decode_json(body)
        return CountTokensCall(MessagesBody.parse(written), written)


@dataclass(frozen=True)
class CountTokensCall(BodyCall[MessagesBody]):
    """Implements `JsonCall`."""

    waits_for_engine: ClassVar[bool] = False

    written: Mapping[str, Any]

    def acquire(self, models: ModelRegistry, wait: float) -> Lease[Service]:
        """Lease a language model."""
        return models.acquire(self.model, wait)

    def answer(self, service: Service, _client: QueueClient, _on_disconnect: OnDisconnect) -> JsonAnswer:
        """Build the prompt and count it."""
        return JsonAnswer({"input_tokens": len(service.prompt(self.body.request(self.written)).tokens)})


class ListModelInfos(AnthropicProtocol):
    """Implements `ResourceProtocol`: the language models that can be served, each once for every name it has."""

    operation = Operation(summary="List the models", answer=objects.ModelPage)

    def __init__(self, created: int) -> None:
        self._created = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")

    def answer(
        self, models: ModelRegistry, _arguments: Mapping[str, str], _client: QueueClient
    ) -> dict[str, Any]:
        """Return the list, all of it in one page."""
        data = []
        for status in models.statuses():
            description = description_of(models, status.name)
            if description.kind != "llm":
                continue
            context = description.context_length
            for name in (status.name, *status.aliases):
                found = {"type": "model", "id": name, "display_name": name, "created_at": self._created}
                data.append({**found, **({"max_input_tokens": context} if context else {})})
        return {
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": False,
        }
