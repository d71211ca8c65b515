"""POST /v1/messages, POST /v1/messages/count_tokens, and the list of models in this API's shape."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from mlx_backend.api.addresses import Addresses
from mlx_backend.api.anthropic import objects
from mlx_backend.api.anthropic.base import ANTHROPIC
from mlx_backend.api.anthropic.body import MessagesBody
from mlx_backend.api.anthropic.stream import MessageWriter
from mlx_backend.api.errors import ApiError
from mlx_backend.api.openai.models import description_of, listed_models
from mlx_backend.conversation.json_values import excerpt

if TYPE_CHECKING:
    from mlx_backend.api.addresses import Query
    from mlx_backend.chat.reply import Reply
    from mlx_backend.chat.service import Service
    from mlx_backend.engine.base import QueueClient
    from mlx_backend.models.description import ModelDescription


def addresses(created: int) -> Addresses:
    """Return the addresses of a server that was started when it was `created`, in seconds since 1970."""
    api, models = Addresses(ANTHROPIC), AnthropicModels(created)
    api.reply("/v1/messages", create_message, MessagesBody, objects.MessageObject, objects.Event)
    api.json("/v1/messages/count_tokens", count_tokens, MessagesBody, objects.TokenCount)
    api.resource("GET", "/v1/models", models.list, objects.ModelPage)
    api.resource("GET", "/v1/models/<path:name>", models.get, objects.AnthropicModel)
    api.resource("GET", "/api/hello", hello, objects.HelloObject, needs_key=False)
    return api


def create_message(body: MessagesBody, service: Service, client: QueueClient) -> tuple[Reply, MessageWriter]:
    """Answer a conversation of content blocks."""
    reply = service.chat(body.request(), client)
    context_length = service.engine.context_length
    return reply, MessageWriter(service.model_id, reply, context_length, omits_thinking=body.omits_thinking)


def count_tokens(body: MessagesBody, service: Service, client: QueueClient) -> objects.TokenCount:
    """Count the tokens of a conversation of content blocks."""
    return {"input_tokens": len(service.prompt(body.request(), client).tokens)}


def hello(_query: Query) -> objects.HelloObject:
    """Say that the server is there."""
    return {"message": "hello"}


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


class AnthropicModels:
    """The language models. Each is said to be as old as the server, which was started when it was `created`."""

    def __init__(self, created: int) -> None:
        self._created = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")

    def list(self, query: Query) -> dict[str, Any]:
        """List the models."""
        data = [
            self._described(name, description)
            for name, _, description, is_effort in listed_models(query.models)
            if description.kind == "llm" and not is_effort
        ]
        return {
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": False,
        }

    def get(self, query: Query) -> dict[str, Any]:
        """Describe a model."""
        name = query.arguments["name"]
        description = description_of(query.models, query.models.status(name).name)
        if description.kind != "llm":
            raise ApiError(404, f"{excerpt(name)} is no language model.", param="model")
        return self._described(name, description)

    def _described(self, name: str, description: ModelDescription) -> dict[str, Any]:
        head = {"type": "model", "id": name, "display_name": name}
        described: dict[str, Any] = {**head, "created_at": self._created, "lifecycle": "active"}
        if context := description.context_length:
            described["max_input_tokens"] = context
            described["max_tokens"] = description.default_max_tokens or context
        if description.capabilities:
            described["capabilities"] = capabilities_object(description)
        return described
