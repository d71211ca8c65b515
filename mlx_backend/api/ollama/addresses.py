"""The addresses of Ollama's API."""

from __future__ import annotations

from mlx_backend.api.addresses import Addresses
from mlx_backend.api.ollama import embed, models, objects, replies
from mlx_backend.api.ollama.base import OLLAMA, STREAM_TYPE
from mlx_backend.api.ollama.body import GenerateBody, OllamaChatBody


def addresses(created: int) -> Addresses:
    """Return the addresses of a server that was started when it was `created`, in seconds since 1970."""
    api, known = Addresses(OLLAMA), models.OllamaModels(created)
    for path, answered, body, part in (
        ("/api/chat", "a conversation", OllamaChatBody, objects.ChatPart),
        ("/api/generate", "a prompt", GenerateBody, objects.GeneratePart),
    ):
        summary, event = f"Answer {answered}, as Ollama does", part | objects.OllamaError
        api.post(path, summary, replies.call, body, part, event, stream_type=STREAM_TYPE)
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
    api.resource("POST", "/api/create", models.create, objects.PullStatus)
    api.resource("POST", "/api/blobs/<digest>", models.create, objects.PullStatus)
    api.resource("POST", "/api/copy", models.copy, objects.PullStatus)
    api.resource("DELETE", "/api/delete", models.delete, objects.PullStatus)
    api.resource("POST", "/api/push", models.push, objects.PullStatus)
    api.resource("GET", "/api/version", models.version, objects.OllamaVersion, needs_key=False)
    return api
