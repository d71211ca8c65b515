"""The WSGI application: every address, who may call, and one edge where everything raised becomes an error response.

A new address is a line in `all_routes`; what it parses and answers is in api/, how it is handled in handlers.py.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from werkzeug import Request
from werkzeug.exceptions import NotFound
from werkzeug.routing import Map, Rule

from mlx_backend.api.anthropic import messages as anthropic
from mlx_backend.api.anthropic.base import VERSION_HEADER, AnthropicProtocol
from mlx_backend.api.errors import ApiError
from mlx_backend.api.lmstudio.models import GetStudioModel, ListStudioModels
from mlx_backend.api.ollama import embed, replies
from mlx_backend.api.ollama import models as ollama
from mlx_backend.api.ollama.base import OllamaProtocol
from mlx_backend.api.openai.chat import ChatCompletions
from mlx_backend.api.openai.completions import Completions
from mlx_backend.api.openai.embeddings import CreateEmbeddings
from mlx_backend.api.openai.models import GetModel, ListModels, LoadModel, UnloadModel
from mlx_backend.api.openai.rerank import Rerank
from mlx_backend.api.openai.tokenize import Detokenize, Tokenize
from mlx_backend.api.responses.create import CountInputTokens, CreateResponse
from mlx_backend.api.responses.store import ResponseStore
from mlx_backend.api.responses.stored import (
    CancelResponse,
    DeleteResponse,
    GetResponse,
    ListInputItems,
)
from mlx_backend.registry.allowed_models import AllowedModels
from mlx_backend.server import auth
from mlx_backend.server.api_keys import ApiKeys
from mlx_backend.server.auth import TrustedProxies
from mlx_backend.server.errors import DEFAULT_ERRORS, as_api_error
from mlx_backend.server.handlers import (
    Backend,
    HeaderHandler,
    JsonHandler,
    LoadHandler,
    ReplyHandler,
    ResourceHandler,
    Route,
    json_response,
)
from mlx_backend.server.limits import RateLimits, RequestsInFlight
from mlx_backend.server.metrics import Metrics
from mlx_backend.server.openapi import OpenAPIHandler
from mlx_backend.server.origins import AllowedHosts, CorsPolicy
from mlx_backend.server.preparations import Preparations
from mlx_backend.server.request_log import RequestRecord
from mlx_backend.server.status import HealthHandler, HomeHandler, MetricsHandler, ReadyHandler
from mlx_backend.server.wsgi_server import SPARE_THREADS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from _typeshed.wsgi import StartResponse, WSGIEnvironment
    from werkzeug import Response
    from werkzeug.routing import MapAdapter

    from mlx_backend.api.base import Errors
    from mlx_backend.device.memory import MemoryBudget
    from mlx_backend.registry.base import ModelRegistry
    from mlx_backend.server.handlers import Handler
    from mlx_backend.settings import Settings


def all_routes() -> list[Route]:
    """Return the server's routes. Those of an API are found with and without /v1."""
    started = int(time.time())
    responses = ResponseStore()
    api: list[tuple[str, str, Handler]] = [
        ("POST", "/chat/completions", ReplyHandler(ChatCompletions())),
        ("POST", "/completions", ReplyHandler(Completions())),
        ("POST", "/embeddings", JsonHandler(CreateEmbeddings())),
        ("POST", "/rerank", JsonHandler(Rerank())),
        ("POST", "/messages", ReplyHandler(anthropic.Messages())),
        ("POST", "/messages/count_tokens", JsonHandler(anthropic.CountTokens())),
        (
            "GET",
            "/models",
            HeaderHandler(
                VERSION_HEADER,
                ResourceHandler(anthropic.ListModelInfos(started)),
                ResourceHandler(ListModels(started)),
            ),
        ),
        (
            "GET",
            "/models/<path:name>",
            HeaderHandler(
                VERSION_HEADER,
                ResourceHandler(anthropic.GetModelInfo(started)),
                ResourceHandler(GetModel(started)),
            ),
        ),
        ("POST", "/models/<path:name>/load", LoadHandler(LoadModel())),
        ("POST", "/models/<path:name>/unload", ResourceHandler(UnloadModel())),
        ("POST", "/tokenize", JsonHandler(Tokenize())),
        ("POST", "/detokenize", JsonHandler(Detokenize())),
        ("POST", "/responses", ReplyHandler(CreateResponse(responses))),
        ("POST", "/responses/input_tokens", JsonHandler(CountInputTokens(responses))),
        ("GET", "/responses/<response_id>", ResourceHandler(GetResponse(responses))),
        ("DELETE", "/responses/<response_id>", ResourceHandler(DeleteResponse(responses))),
        ("POST", "/responses/<response_id>/cancel", ResourceHandler(CancelResponse(responses))),
        ("GET", "/responses/<response_id>/input_items", ResourceHandler(ListInputItems(responses))),
    ]
    elsewhere: list[tuple[str, str, Handler]] = [
        ("POST", "/api/chat", ReplyHandler(replies.Chat())),
        ("POST", "/api/generate", ReplyHandler(replies.Generate())),
        ("POST", "/api/embed", JsonHandler(embed.Embed())),
        ("POST", "/api/embeddings", JsonHandler(embed.EmbedPrompt())),
        ("GET", "/api/tags", ResourceHandler(ollama.ListTags(started))),
        ("POST", "/api/show", JsonHandler(ollama.Show(started))),
        ("GET", "/api/ps", ResourceHandler(ollama.ListRunning())),
        ("POST", "/api/pull", JsonHandler(ollama.Pull())),
        *((method, path, ResourceHandler(refused)) for method, path, refused in ollama.refused()),
        ("GET", "/api/v0/models", ResourceHandler(ListStudioModels())),
        ("GET", "/api/v0/models/<path:name>", ResourceHandler(GetStudioModel())),
    ]
    addresses = ["/v1" + path for _, path, _ in api if "<" not in path] + ["/api/chat", "/api/generate"]
    routes = [
        # These tell no secrets and start nothing.
        Route("GET", "/", HomeHandler([*addresses, "/health"]), needs_key=False),
        Route("GET", "/health", HealthHandler(), needs_key=False),
        Route("GET", "/ready", ReadyHandler(), needs_key=False),
        Route("GET", "/api/hello", ResourceHandler(anthropic.Hello()), needs_key=False),
        Route("GET", "/api/version", ResourceHandler(ollama.Version()), needs_key=False),
        Route("GET", "/metrics", MetricsHandler()),
        Route("GET", "/openapi.json", OpenAPIHandler(lambda: routes)),
        *(Route(method, prefix + path, handler) for prefix in ("/v1", "") for method, path, handler in api),
        *(Route(method, path, handler) for method, path, handler in elsewhere),
    ]
    return routes


class App:
    """The models of a server at its addresses: `routes`, or all there are. `memory` is what /metrics reports of it.

    Raises ConfigurationError for API keys that are not as they should be.
    """

    def __init__(
        self,
        models: ModelRegistry,
        settings: Settings,
        routes: Sequence[Route] | None = None,
        *,
        memory: MemoryBudget | None = None,
    ) -> None:
        self.api_keys = ApiKeys(settings)
        self.proxies = TrustedProxies(settings.trusted_proxies)
        self._rate_limits = RateLimits()
        requests = settings.max_requests
        self.in_flight = RequestsInFlight(requests + 3 * SPARE_THREADS // 4, requests + SPARE_THREADS // 4)
        self._metrics = Metrics(models, memory)
        self.preparations = Preparations(settings.prepare_seconds, wait_seconds=settings.queue_seconds)
        self._models = models
        self._settings = settings
        self._cors = CorsPolicy(settings.cors_origins)
        # A key makes this needless: a web page does not know it.
        self._hosts = AllowedHosts(["*"] if self.api_keys.are_required else settings.allowed_hosts)
        table = all_routes() if routes is None else routes
        self._urls = Map(
            [Rule(route.path, endpoint=route, methods=[route.method]) for route in table],
            strict_slashes=False,
            merge_slashes=False,
        )

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        request = Request(environ)
        errors = _errors_for(request)
        client = self._client(request, request.remote_addr or "")
        record = RequestRecord(request, client, self._metrics.count)
        record.arrived()
        stack = ExitStack()
        stack.callback(record.end)
        try:
            self._hosts.check(request)
            urls = self._urls.bind_to_environ(environ)
            if request.method == "OPTIONS":
                response = self._cors.preflight(request, urls.allowed_methods())
            else:
                route, arguments = self._match(request, urls)
                errors = handler = _handler_for(request, route)
                self._check_access(request, route, client)
                if request.method == "POST":
                    stack.callback(self.in_flight.begin(client.share))
                    if client.key is not None:
                        self._rate_limits.admit(client.key)
                response = handler.handle(request, self._backend(record), arguments)
        except Exception as error:
            explained = as_api_error(error, is_draining=self.in_flight.is_draining)
            # They refer to what was being done, the request's body with it, and what was being done to them.
            explained.__traceback__ = explained.__cause__ = explained.__context__ = None
            record.refused(explained)
            response = _error_response(errors, explained)
        record.status = response.status_code
        response.headers["x-request-id"] = response.headers["request-id"] = record.id
        response.call_on_close(stack.close)
        self.preparations.give_back_memory()
        if client.key is not None:
            response.headers.extend(self._rate_limits.headers(client.key))
        self._cors.add_headers(request, response)
        return response(environ, start_response)

    def _client(self, request: Request, peer: str) -> auth.Client:
        address = self.proxies.client_address(peer, request.headers.get("X-Forwarded-For", ""))
        return auth.identify(request, self.api_keys, address)

    @staticmethod
    def error_body(status: int, message: str) -> bytes:
        """Return the body of an error that the WSGI server finds before there is a request to hand over."""
        return DEFAULT_ERRORS.error(ApiError(status, message))

    @staticmethod
    def _match(request: Request, urls: MapAdapter) -> tuple[Route, Mapping[str, str]]:
        try:
            return urls.match()
        except NotFound:
            path = f"{request.method} {request.path[:200]!r}"
            raise ApiError(404, f"There is no {path} here; GET / lists what there is.") from None

    def _check_access(self, request: Request, route: Route, client: auth.Client) -> None:
        if route.needs_key:
            auth.check(request, client)
        if request.method == "POST":
            self._cors.refuse_foreign_page(request)

    def _backend(self, record: RequestRecord) -> Backend:
        """Return what handlers work with for one request: the models that its client's key allows, and no others."""
        key = record.client.key
        models = AllowedModels(self._models, key.models) if key is not None and key.models else self._models
        return Backend(
            models,
            self._settings,
            self.in_flight,
            self.preparations,
            self._rate_limits,
            self._metrics,
            record,
        )


def _handler_for(request: Request, route: Route) -> Handler:
    return route.handler.chosen(request) if isinstance(route.handler, HeaderHandler) else route.handler


def _errors_for(request: Request) -> Errors:
    """Return how an error is written before it is known what answers, by whose client seems to ask."""
    if VERSION_HEADER in request.headers:
        return AnthropicProtocol()
    return OllamaProtocol() if request.path.startswith("/api/") else DEFAULT_ERRORS


def _error_response(errors: Errors, error: ApiError) -> Response:
    response = json_response(errors.error(error), errors.status(error))
    response.headers.extend(error.headers)
    return response
