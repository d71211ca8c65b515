"""The WSGI application: every address, who may call, and one edge where everything raised becomes an error response.

A new address is a line in its API's folder (api/), a new API one in `all_routes`; handlers.py says how it is handled.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache
from math import ceil
from typing import TYPE_CHECKING

from werkzeug import Request, Response
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound
from werkzeug.routing import Map, Rule, WebsocketMismatch

from mlx_backend.api.addresses import WEBSOCKET
from mlx_backend.api.anthropic import addresses as anthropic
from mlx_backend.api.anthropic.base import ANTHROPIC, VERSION_HEADER
from mlx_backend.api.errors import ApiError
from mlx_backend.api.lmstudio import models as lmstudio
from mlx_backend.api.ollama import addresses as ollama
from mlx_backend.api.ollama.base import OLLAMA
from mlx_backend.api.openai import addresses as openai
from mlx_backend.api.openai.base import OPENAI
from mlx_backend.api.responses import addresses as responses
from mlx_backend.errors import EngineBusy
from mlx_backend.registry.allowed_models import AllowedModels
from mlx_backend.server import auth
from mlx_backend.server.api_keys import ApiKeys, is_loopback
from mlx_backend.server.auth import TrustedProxies
from mlx_backend.server.errors import as_api_error
from mlx_backend.server.handlers import Backend, Route, handler_of, told_apart
from mlx_backend.server.limits import RateLimits, RequestsInFlight
from mlx_backend.server.metrics import Metrics
from mlx_backend.server.openapi import openapi_route
from mlx_backend.server.origins import AllowedHosts, CorsPolicy
from mlx_backend.server.page.files import with_page
from mlx_backend.server.preparations import Preparations
from mlx_backend.server.request_log import RequestRecord
from mlx_backend.server.request_tasks import HAS_ROOM_FOR
from mlx_backend.server.status import status_routes
from mlx_backend.server.wsgi_server import SPARE_THREADS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from _typeshed.wsgi import StartResponse, WSGIEnvironment
    from werkzeug.routing import MapAdapter

    from mlx_backend.api.addresses import Api
    from mlx_backend.device.memory import MemoryBudget
    from mlx_backend.registry.base import ModelRegistry
    from mlx_backend.settings import Settings


_PREFIX = "/v1"
_LARGE_ANSWER = 64 << 10
"""Bytes. Smaller ones are sent however many are not read."""


def all_routes(*, page: bool = True) -> list[Route]:
    """Return the server's routes, with or without those of the `page`; those of an API are found without /v1, too."""
    started = int(time.time())
    apis = (
        openai.addresses(started),
        responses.addresses(),
        ollama.addresses(started),
        lmstudio.addresses(),
        anthropic.addresses(started),
    )
    api_routes: dict[tuple[str, str], Route] = {}
    for address in (address for api in apis for address in api.all):
        key, handler = (address.method, address.path), handler_of(address.endpoint)
        if (other := api_routes.get(key)) is not None:
            handler = told_apart(VERSION_HEADER, handler, other.handler)
        api_routes[key] = Route(address.method, address.path, handler, address.needs_key)
    listed = {path: None for _, path in api_routes if path.startswith(_PREFIX) and "<" not in path}
    routes = [
        *status_routes([*listed, "/api/chat", "/api/generate", "/health"]),
        openapi_route(lambda: routes),
        *api_routes.values(),
        *(
            replace(route, path=route.path.removeprefix(_PREFIX))
            for route in api_routes.values()
            if route.path.startswith(_PREFIX + "/")
        ),
    ]
    if page:
        routes = with_page(routes)
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
        self._hosts = AllowedHosts(
            ["*"] if self.api_keys.are_required else settings.allowed_hosts,
            is_loopback=is_loopback(settings.host),
        )
        table = all_routes(page=settings.page) if routes is None else routes
        self._routes = {(route.method, route.path): route for route in table}
        self._urls = _url_map(tuple(self._routes))

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        request = Request(environ)
        api = _api_of(request)
        forwarded_for = request.headers.get("X-Forwarded-For", "")
        sender = self.proxies.client_address(request.remote_addr or "", forwarded_for)
        client = auth.identify(request, self.api_keys, sender)
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
                address, arguments = self._match(request, urls)
                route = self._routes[address]
                handler = route.handler.choose(request) or route.handler
                api = handler.api
                if route.needs_key:
                    auth.check(request, client)
                if request.method == "POST" or route.method == WEBSOCKET:
                    self._cors.refuse_foreign_page(request)
                if request.method == "POST":
                    stack.callback(self.in_flight.begin(client.share))
                    if client.key is not None:
                        self._rate_limits.admit(client.key)
                response = handler.handle(request, self._backend(record), arguments)
                _check_room(response, environ)
        except Exception as error:
            explained = as_api_error(error, is_draining=self.in_flight.is_draining)
            # They refer to what was being done, the request's body with it, and what was being done to them.
            explained.__traceback__ = explained.__cause__ = explained.__context__ = None
            record.refused(explained)
            response = Response(
                api.error(explained), api.status(explained), explained.headers, mimetype="application/json"
            )
        record.status = response.status_code
        response.headers["x-request-id"] = response.headers["request-id"] = record.id
        response.call_on_close(stack.close)
        self.preparations.give_back_memory()
        if client.key is not None:
            response.headers.extend(self._rate_limits.headers(client.key))
        self._cors.add_headers(request, response)
        return response(environ, start_response)

    @staticmethod
    def error_body(status: int, message: str) -> bytes:
        """Return the body of an error that the WSGI server finds before there is a request to hand over."""
        return OPENAI.error(ApiError(status, message))

    @staticmethod
    def _match(request: Request, urls: MapAdapter) -> tuple[tuple[str, str], Mapping[str, str]]:
        try:
            return urls.match()
        except WebsocketMismatch:
            raise ApiError(400, f"{request.path[:200]!r} is no address of a WebSocket.") from None
        except MethodNotAllowed as error:
            allowed = ", ".join(sorted(error.valid_methods or ()))
            accepted = allowed
            with suppress(HTTPException):
                urls.match(websocket=True)
                accepted += ", and a WebSocket (a GET with `Upgrade: websocket`)"
            message = f"This address does not accept that method; it accepts {accepted}."
            raise ApiError(405, message, headers=(("Allow", allowed),)) from None
        except NotFound:
            path = f"{request.method} {request.path[:200]!r}"
            raise ApiError(404, f"There is no {path} here; GET / lists what there is.") from None

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


def _check_room(response: Response, environ: WSGIEnvironment) -> None:
    """Raise EngineBusy if a large answer would wait with too many others for its client to read it."""
    size = response.calculate_content_length() if response.is_sequence else 0
    has_room: Callable[[int], bool] = environ.get(HAS_ROOM_FOR, lambda _: True)
    if size and size > _LARGE_ANSWER and not has_room(size):
        response.close()
        raise EngineBusy(
            f"The answer has {ceil(size / (1 << 20))} MB. With those that you have not read yet it is more than this "
            "server holds for a client: read them first, or ask for less at once."
        )


@cache  # to compile the rules takes longer than all else that an `App` does when it is made
def _url_map(addresses: tuple[tuple[str, str], ...]) -> Map:
    """Return what finds a request's method and path, as a route has them, among these."""
    rules = [
        Rule(path, endpoint=(method, path), websocket=True)
        if method == WEBSOCKET
        else Rule(path, endpoint=(method, path), methods=[method])
        for method, path in addresses
    ]
    return Map(rules, strict_slashes=False, merge_slashes=False)


def _api_of(request: Request) -> Api:
    """Return how an error is written before it is known what answers, by whose client seems to ask."""
    if VERSION_HEADER in request.headers:
        return ANTHROPIC
    return OLLAMA if request.path.startswith("/api/") else OPENAI
