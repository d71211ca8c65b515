"""Every address of the server. A new one is a line here; what it parses and answers is in api/."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mlx_backend.api.openai.chat import ChatCompletions
from mlx_backend.api.openai.completions import Completions
from mlx_backend.api.openai.embeddings import CreateEmbeddings
from mlx_backend.api.openai.models import GetModel, ListModels, UnloadModel
from mlx_backend.api.openai.rerank import Rerank
from mlx_backend.api.openai.tokenize import Detokenize, Tokenize
from mlx_backend.server.handlers import JsonHandler, ReplyHandler, ResourceHandler, Route
from mlx_backend.server.openapi import OpenAPIHandler
from mlx_backend.server.status import HealthHandler, HomeHandler, MetricsHandler, ReadyHandler

if TYPE_CHECKING:
    from mlx_backend.server.handlers import Handler


def all_routes() -> list[Route]:
    """Return the server's routes. Those of an API are found with and without /v1."""
    started = int(time.time())
    api: list[tuple[str, str, Handler]] = [
        ("POST", "/chat/completions", ReplyHandler(ChatCompletions())),
        ("POST", "/completions", ReplyHandler(Completions())),
        ("POST", "/embeddings", JsonHandler(CreateEmbeddings())),
        ("POST", "/rerank", JsonHandler(Rerank())),
        ("GET", "/models", ResourceHandler(ListModels(started))),
        ("GET", "/models/<path:name>", ResourceHandler(GetModel(started))),
        ("POST", "/models/<path:name>/unload", ResourceHandler(UnloadModel())),
        ("POST", "/tokenize", JsonHandler(Tokenize())),
        ("POST", "/detokenize", JsonHandler(Detokenize())),
    ]
    addresses = ["/v1" + path for _, path, _ in api if "<" not in path]
    routes = [
        # These tell no secrets and start nothing.
        Route("GET", "/", HomeHandler([*addresses, "/health"]), needs_key=False),
        Route("GET", "/health", HealthHandler(), needs_key=False),
        Route("GET", "/ready", ReadyHandler(), needs_key=False),
        Route("GET", "/metrics", MetricsHandler()),
        Route("GET", "/openapi.json", OpenAPIHandler(lambda: routes)),
        *(Route(method, prefix + path, handler) for prefix in ("/v1", "") for method, path, handler in api),
    ]
    return routes
