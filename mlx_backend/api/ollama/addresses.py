"""The addresses of Ollama's API. A reply without anything to answer loads or unloads a model."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from mlx_backend.api.addresses import Addresses, FindCall, StartCall
from mlx_backend.api.ollama import embed, models, objects
from mlx_backend.api.ollama.base import OLLAMA, STREAM_TYPE, as_time
from mlx_backend.api.ollama.body import GenerateBody, OllamaChatBody
from mlx_backend.api.ollama.stream import LineWriter
from mlx_backend.api.openai.stream import ChatLogprobs
from mlx_backend.chat.request import ChatRequest

if TYPE_CHECKING:
    from mlx_backend.api.ollama.body import OllamaBody
    from mlx_backend.chat.reply import Reply
    from mlx_backend.chat.service import Service
    from mlx_backend.engine.base import QueueClient
    from mlx_backend.registry.base import ModelRegistry

_TO_CREATE = "set one up in the models file, or put its folder where --models-dir looks"


def addresses(created: int) -> Addresses:
    """Return the addresses of a server that was started when it was `created`, in seconds since 1970."""
    api, known = Addresses(OLLAMA), models.OllamaModels(created)
    for path, answered, body, part in (
        ("/api/chat", "a conversation", OllamaChatBody, objects.ChatPart),
        ("/api/generate", "a prompt", GenerateBody, objects.GeneratePart),
    ):
        summary, event = f"Answer {answered}, as Ollama does", part | objects.OllamaError
        api.post(path, summary, call, body, part, event, stream_type=STREAM_TYPE)
    api.post(
        "/api/embed",
        "Turn texts into vectors, as Ollama does",
        embed.EmbedCall.of,
        embed.EmbedBody,
        objects.OllamaEmbeddings,
    )
    api.post(
        "/api/embeddings",
        "Turn a text into a vector, as Ollama did",
        embed.EmbedCall.of,
        embed.PromptBody,
        objects.OllamaEmbedding,
    )
    api.resource("GET", "/api/tags", known.tags, objects.TagList)
    api.lookup("/api/show", known.show, models.NamedBody, objects.ShownModel)
    api.resource("GET", "/api/ps", models.running, objects.RunningList)
    api.lookup("/api/pull", models.pull, models.NamedBody, objects.PullStatus)
    for method, path, what, remedy in (
        ("POST", "/api/create", "create models", _TO_CREATE),
        ("POST", "/api/blobs/<digest>", "create models", _TO_CREATE),
        ("POST", "/api/copy", "copy models", "give one an alias in the models file"),
        ("DELETE", "/api/delete", "delete models", "delete their folders"),
        ("POST", "/api/push", "push models", "upload their folders to Hugging Face"),
    ):
        api.resource(method, path, models.unsupported(what, remedy), objects.PullStatus)
    api.resource("GET", "/api/version", models.version, objects.OllamaVersion, needs_key=False)
    return api


def call(body: OllamaBody) -> StartCall[OllamaBody] | FindCall[OllamaBody]:
    """Return what a request becomes."""
    return FindCall(body, load) if body.is_empty else StartCall(body, start)


def start(body: OllamaBody, service: Service, client: QueueClient) -> tuple[Reply, LineWriter]:
    """Start the reply."""
    waited = time.perf_counter() - body.arrived
    request = body.request()
    if isinstance(request, ChatRequest):
        reply = service.chat(request, client)
    else:
        reply = service.complete(request, client)
    writer = LineWriter(
        body.model or service.model_id,
        body.part,
        reply.call_id,
        started=body.arrived,
        load_seconds=waited,
        logprobs=ChatLogprobs(service.engine.tokenizer.bytes_of) if body.logprobs else None,
        silence=body.silence,
    )
    return reply, writer


def load(body: OllamaBody, models: ModelRegistry, wait: float) -> dict[str, Any]:
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
