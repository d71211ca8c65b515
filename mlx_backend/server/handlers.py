"""From a request to a response, for each kind of endpoint of api/addresses.py. Knows HTTP; knows no API's shape."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from werkzeug import Response

from mlx_backend.api import json_text
from mlx_backend.api.addresses import BodyEndpoint, JsonCall, Query, ResourceEndpoint, SocketEndpoint
from mlx_backend.api.openai.base import OPENAI
from mlx_backend.server.errors import CLIENT_CLOSED_REQUEST, as_api_error
from mlx_backend.server.reply_response import (
    ReplyLog,
    ReplyResponder,
    header_safe,
)
from mlx_backend.server.request_body import check_places, read_body
from mlx_backend.server.request_log import LEFT
from mlx_backend.server.request_tasks import ON_DISCONNECT, PUMP, UPGRADE, WEBSOCKET

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from werkzeug import Request

    from mlx_backend.api.addresses import (
        Api,
        ApiEndpoint,
        BodyCall,
        Cost,
        OnDisconnect,
        Operation,
    )
    from mlx_backend.api.errors import ApiError
    from mlx_backend.conversation.effort_sources import Resolution
    from mlx_backend.registry.base import Lease, ModelRegistry
    from mlx_backend.server.auth import Client
    from mlx_backend.server.limits import RateLimits, RequestsInFlight
    from mlx_backend.server.metrics import Metrics
    from mlx_backend.server.preparations import Preparations
    from mlx_backend.server.request_log import RequestRecord
    from mlx_backend.server.websocket import WebSocket
    from mlx_backend.settings import Settings


@dataclass(frozen=True, slots=True)
class Backend:
    """What a handler works with for one request."""

    models: ModelRegistry
    settings: Settings
    in_flight: RequestsInFlight
    preparations: Preparations
    rate_limits: RateLimits
    metrics: Metrics
    record: RequestRecord

    @property
    def client(self) -> Client:
        """Who has sent the request. `models` are those that its key allows."""
        return self.record.client

    @contextmanager
    def lease[T](self, acquire: Callable[[], Lease[T]], on_disconnect: OnDisconnect) -> Iterator[Lease[T]]:
        """Lease a model; stop waiting for it if the client leaves or the server stops."""
        with self.preparations.waiting(on_disconnect):
            lease = acquire()
        try:
            yield lease
        finally:
            lease.release()

    def charge(self, tokens: int) -> None:
        """Count tokens that the client's request has used."""
        if self.client.key is not None:
            self.rate_limits.charge(self.client.key, tokens)

    def explain(self, error: Exception) -> ApiError:
        """Say what an error means to a client."""
        return as_api_error(error, is_draining=self.in_flight.is_draining)


class Handler(ABC):
    """Answers the requests to one address. What goes wrong there is written as its `api` has it."""

    api: Api = OPENAI
    """Most clients expect this one's errors, at an address that belongs to none, too."""
    operation: Operation

    def chosen(self, _request: Request) -> Handler:
        """Return what answers a request: this itself."""
        return self

    @abstractmethod
    def handle(self, request: Request, backend: Backend, arguments: Mapping[str, str]) -> Response:
        """Answer a request; raise whatever goes wrong. `arguments` are the variable parts of the address."""


@dataclass(frozen=True, slots=True)
class Route:
    """A method and a path, and what handles it. Without `needs_key` it is open to everybody."""

    method: str
    path: str
    handler: Handler
    needs_key: bool = True


class _EndpointHandler[E: ApiEndpoint](Handler):
    """Answers the requests to an endpoint."""

    def __init__(self, endpoint: E) -> None:
        self._endpoint = endpoint
        self.api, self.operation = endpoint.api, endpoint.operation


class ReplyHandler(_EndpointHandler[BodyEndpoint]):
    """A language model generates a reply, which is streamed or sent whole; or a model computes one JSON object."""

    def handle(self, request: Request, backend: Backend, _arguments: Mapping[str, str]) -> Response:
        """Start a reply, whose model is released when the response is closed; or wait for the object."""
        settings, on_disconnect = backend.settings, _on_disconnect(request)
        call, preparation = _parsed(self._endpoint.parse, request, backend)
        if isinstance(call, JsonCall):
            return _answer(call, preparation, request, backend)
        acquire = partial(backend.models.acquire, call.model, settings.load_seconds)
        with ExitStack() as stack:
            lease = stack.enter_context(backend.lease(acquire, on_disconnect))
            without_effect = _keep(call, lease.name, backend)
            with preparation():
                reply, writer = call.start(lease.service, backend.client.in_queue)
            ignored = [*call.ignored, *reply.unread, *without_effect]
            backend.charge(reply.usage.prompt_tokens)
            stack.callback(lambda: backend.charge(reply.usage.completion_tokens))
            model = lease.service.model_id
            responder = ReplyResponder(
                reply,
                writer,
                ReplyLog(backend.record, writer.id, model, ignored),
                backend.metrics.token_clock(model),
                keepalive_seconds=settings.keepalive_seconds,
                on_disconnect=on_disconnect,
                pump=request.environ.get(PUMP),
                explain=backend.explain,
            )
            stream_type = self.operation.stream_type
            response = responder.stream(stream_type) if call.stream else responder.whole()
            response.call_on_close(stack.pop_all().close)
        if reply.effort is not None:
            response.headers["x-mlx-backend-effort"] = _effort_header(reply.effort, reply.thinking_budget)
        if (run := reply.usage.repeated_run) is not None:
            response.headers["x-mlx-backend-stopped-by"] = f"repetition; tokens={run}"
        return _with_ignored(response, ignored)


def _effort_header(decided: Resolution, budget: int | None) -> str:
    """Write an effort and its source, with the model's own level and the budget as parameters."""
    parts = [f"{decided.effort} ({decided.source})"]
    if decided.level is not None:
        parts.append(f"level={decided.level.effort}")
    if budget is not None:
        parts.append(f"budget={budget}")
    return "; ".join(parts)


class ResourceHandler(_EndpointHandler[ResourceEndpoint]):
    """Answers from what is known, without waiting."""

    def handle(self, request: Request, backend: Backend, arguments: Mapping[str, str]) -> Response:
        """Answer at once."""
        known = {**request.args.to_dict(), **arguments}
        query = Query(backend.models, known, backend.client.in_queue)
        return json_response(json_text.body(self._endpoint.answer(query)))


class SocketHandler(_EndpointHandler[SocketEndpoint]):
    """Accepts WebSockets; the messages of each are answered as requests."""

    def chosen(self, request: Request) -> Handler:
        """Return what answers a message; this itself for a handshake."""
        websocket: WebSocket | None = request.environ.get(WEBSOCKET)
        return self if websocket is None else ReplyHandler(websocket.endpoint)

    def handle(self, request: Request, _backend: Backend, _arguments: Mapping[str, str]) -> Response:
        """Accept a WebSocket."""
        from mlx_backend.server.websocket import WebSocket  # most servers never need it

        request.environ[UPGRADE](WebSocket(request, self._endpoint.connect()))
        return Response(status=101)


class HeaderHandler(Handler):
    """One address of two APIs, whose clients are told apart by a header that only one of them sends."""

    def __init__(self, header: str, sent: Handler, not_sent: Handler) -> None:
        self._header = header
        self._sent, self._not_sent = sent, not_sent
        self.api, self.operation = not_sent.api, not_sent.operation

    def chosen(self, request: Request) -> Handler:
        """Return the handler of the API that the client speaks; errors are written as it writes them, too."""
        return self._sent if self._header in request.headers else self._not_sent

    def handle(self, request: Request, backend: Backend, arguments: Mapping[str, str]) -> Response:
        """Answer as that API does."""
        return self.chosen(request).handle(request, backend, arguments)


class LoadHandler(ResourceHandler):
    """Answers once a model is in memory; a client that leaves stops waiting, and the load goes on."""

    def handle(self, request: Request, backend: Backend, arguments: Mapping[str, str]) -> Response:
        """Wait for the model, as a request for a reply would."""
        acquire = partial(backend.models.acquire_any, arguments["name"], backend.settings.load_seconds)
        with backend.lease(acquire, _on_disconnect(request)):
            return super().handle(request, backend, arguments)


def json_response(body: bytes, status: int = 200) -> Response:
    """Answer with a JSON body."""
    return Response(body, status=status, mimetype="application/json")


type _Preparation = Callable[[], AbstractContextManager[None]]


def _parsed[C](parse: Callable[[bytes], C], request: Request, backend: Backend) -> tuple[C, _Preparation]:
    """Return what is made of a request's body, and the context in which the rest of the request is prepared."""
    limits = backend.settings.max_body_bytes, backend.settings.max_images_bytes
    body = read_body(request, *limits)
    preparation = partial(backend.preparations.of, len(body), _on_disconnect(request), backend.client.share)
    with preparation():
        check_places(body, *limits)
        return parse(body), preparation


def _answer(
    call: JsonCall[Any, Any], preparation: _Preparation, request: Request, backend: Backend
) -> Response:
    """Answer with the object that a model computes."""
    on_disconnect = _on_disconnect(request)
    acquire = partial(call.acquire, backend.models, backend.settings.load_seconds)
    with backend.lease(acquire, on_disconnect) as lease:
        started = time.perf_counter()
        with nullcontext() if call.waits_for_engine else preparation():
            answer = call.answer(lease.service, backend.client.in_queue, on_disconnect)
        ignored = [*call.ignored, *_keep(call, lease.name, backend)]
    if answer.cost is not None:
        backend.charge(answer.cost.tokens)
        _end(backend.record, answer.cost, time.perf_counter() - started, left=answer.body is None)
    if answer.body is None:
        return Response(status=CLIENT_CLOSED_REQUEST)
    return _with_ignored(json_response(json_text.body(answer.body)), ignored)


def _keep(call: BodyCall[Any], model: str, backend: Backend) -> Sequence[str]:
    """Have a model stay in memory as the request says; return the field if that has no effect."""
    seconds = call.keep_alive
    return () if seconds is None or backend.models.keep(model, seconds) else ("keep_alive",)


def _end(record: RequestRecord, cost: Cost, seconds: float, *, left: bool) -> None:
    words = f"{record.path} model={cost.model} texts={cost.texts} tokens={cost.tokens} {seconds:.3f}s"
    if cost.truncated:
        words += f" cut={cost.truncated}"
    if left:
        words += f" {LEFT}"
    record.status = CLIENT_CLOSED_REQUEST if left else 200
    record.end(words, {"model": cost.model, "texts": cost.texts, "prompt_tokens": cost.tokens})


def _with_ignored(response: Response, ignored: Sequence[str]) -> Response:
    if ignored:
        response.headers["x-mlx-backend-ignored"] = header_safe(ignored)
    return response


def _on_disconnect(request: Request) -> OnDisconnect:
    on_disconnect: OnDisconnect | None = request.environ.get(ON_DISCONNECT)
    return on_disconnect or (lambda _callback: nullcontext())
