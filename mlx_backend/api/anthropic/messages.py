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
from mlx_backend.api.errors import ApiError
from mlx_backend.api.fields import BodyCall
from mlx_backend.api.json_text import decode_json
from mlx_backend.api.openai.models import description_of
from mlx_backend.conversation.json_values import excerpt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_backend.api.base import OnDisconnect
    from mlx_backend.chat.reply import Reply
    from mlx_backend.chat.reply_group import ReplyGroup
    from mlx_backend.chat.service import Service
    from mlx_backend.engine.base import QueueClient
    from mlx_backend.models.description import ModelDescription
    from mlx_backend.registry.base import Lease, ModelRegistry, ModelStatus


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
        context_length = service.engine.context_length
        return reply, MessageWriter(service.model_id, reply, context_length, omits_thinking=omits)


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

    def answer(self, service: Service, client: QueueClient, _on_disconnect: OnDisconnect) -> JsonAnswer:
        """Build the prompt and count it."""
        prompt = service.prompt(self.body.request(self.written), client)
        return JsonAnswer({"input_tokens": len(prompt.tokens)})


def capabilities_object(description: ModelDescription) -> dict[str, Any]:
    """Build the API's `capabilities`: clients offer the efforts, thinking and formats of a model by them."""

    def support(is_supported: bool, **inner: Any) -> dict[str, Any]:
        return {"supported": is_supported, **inner}

    can, efforts = description.capabilities, description.efforts
    reasons, no = "thinking" in can, support(False)
    levels = {level: support(level in efforts) for level in ("low", "medium", "high", "xhigh", "max")}
    kinds = {kind: support(reasons) for kind in ("adaptive", "enabled", "between_tools")}
    return {
        "effort": support(any(level["supported"] for level in levels.values()), **levels),
        "thinking": support(reasons, types={**kinds, "disabled": support(True)}),
        "structured_outputs": support("structured_output" in can),
        "image_input": support("vision" in can),
        "context_management": no,
        "server_tools": support(False, web_search=no, code_execution=no),
        **dict.fromkeys(("batch", "citations", "code_execution", "pdf_input"), no),
    }


class Hello(AnthropicProtocol):
    """Implements `ResourceProtocol`: the address at which a client sees whether the server is there."""

    operation = Operation(summary="Say that the server is there", answer=objects.HelloObject)

    def answer(
        self, _models: ModelRegistry, _arguments: Mapping[str, str], _client: QueueClient
    ) -> dict[str, Any]:
        """Say so."""
        return {"message": "hello"}


class _ModelProtocol(AnthropicProtocol):
    """What the addresses of models share."""

    def __init__(self, created: int) -> None:
        self._created = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")

    def _infos(self, models: ModelRegistry, status: ModelStatus) -> list[dict[str, Any]]:
        """Describe a language model under each of its names; any other is not described."""
        description = description_of(models, status.name)
        if description.kind != "llm":
            return []
        common: dict[str, Any] = {"created_at": self._created, "lifecycle": "active"}
        if context := description.context_length:
            common |= {
                "max_input_tokens": context,
                "max_tokens": description.default_max_tokens or context,
            }
        if description.capabilities:
            common["capabilities"] = capabilities_object(description)
        return [
            {"type": "model", "id": name, "display_name": name, **common}
            for name in (status.name, *status.aliases)
        ]


class ListModelInfos(_ModelProtocol):
    """Implements `ResourceProtocol`: the language models that can be served, each once for every name it has."""

    operation = Operation(summary="List the models", answer=objects.ModelPage)

    def answer(
        self, models: ModelRegistry, _arguments: Mapping[str, str], _client: QueueClient
    ) -> dict[str, Any]:
        """Return the list, all of it in one page."""
        data = [info for status in models.statuses() for info in self._infos(models, status)]
        return {
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": False,
        }


class GetModelInfo(_ModelProtocol):
    """Implements `ResourceProtocol`: one language model, by any of its names."""

    operation = Operation(summary="Describe a model", answer=objects.AnthropicModel)

    def answer(
        self, models: ModelRegistry, arguments: Mapping[str, str], _client: QueueClient
    ) -> dict[str, Any]:
        """Return the model's object. Raises UnknownModel or ModelNotAllowed."""
        name = arguments["name"]
        infos = self._infos(models, models.status(name))
        if not infos:
            raise ApiError(404, f"{excerpt(name)} is no language model.", param="model")
        return {**infos[0], "id": name, "display_name": name}
