"""The addresses of OpenAI's API, and those that other servers have added to it."""

from __future__ import annotations

from mlx_backend.api.addresses import Addresses
from mlx_backend.api.openai import chat, completions, models, objects, tokenize
from mlx_backend.api.openai.base import OPENAI
from mlx_backend.api.openai.chat_body import ChatBody
from mlx_backend.api.openai.completions import CompletionBody
from mlx_backend.api.openai.embeddings import EmbeddingsBody, RerankBody
from mlx_backend.api.reading import ReadingCall


def addresses(created: int) -> Addresses:
    """Return the addresses of a server that was started when it was `created`, in seconds since 1970."""
    api, known = Addresses(OPENAI), models.OpenAIModels(created)
    api.reply("/v1/chat/completions", chat.start, ChatBody, objects.ChatCompletion, objects.ChatChunk)
    api.reply("/v1/completions", completions.start, CompletionBody, objects.TextCompletion, objects.TextChunk)
    read = ReadingCall.of
    api.post("/v1/embeddings", "Turn texts into vectors", read, EmbeddingsBody, objects.EmbeddingList)
    api.post("/v1/rerank", "Rank documents for a query", read, RerankBody, objects.Ranking)
    api.resource("GET", "/v1/models", known.list, objects.ModelList)
    api.resource("GET", "/v1/models/<path:name>", known.get, objects.ModelObject)
    api.resource("POST", "/v1/models/<path:name>/load", models.load, objects.Loading, loads=True)
    api.resource("POST", "/v1/models/<path:name>/unload", models.unload, objects.Loading)
    tokenize.add_to(api)
    return api
