"""Replies of /api/chat and /api/generate. Without anything to answer, a model is loaded or unloaded."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from mlx_backend.api.addresses import FindCall, StartCall
from mlx_backend.api.ollama.base import as_time
from mlx_backend.api.ollama.stream import LineWriter
from mlx_backend.api.openai.stream import ChatLogprobs
from mlx_backend.chat.request import ChatRequest

if TYPE_CHECKING:
    from mlx_backend.api.ollama.body import OllamaBody
    from mlx_backend.chat.reply import Reply
    from mlx_backend.chat.service import Service
    from mlx_backend.engine.base import QueueClient
    from mlx_backend.registry.base import ModelRegistry


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
