"""From a request to a response, for each kind of endpoint of api/addresses.py. Knows HTTP; knows no API's shape."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from werkzeug import Response

from mlx_backend.api import json_text
from mlx_backend.api.addresses import BodyEndpoint, JsonCall, Operation, Query, SocketEndpoint
from mlx_backend.api.openai.base import OPENAI
from mlx_backend.server.errors import CLIENT_CLOSED_REQUEST, as_api_error
from mlx_backend.server.reply_response import ReplyLog, ReplyResponder, header_safe
from mlx_backend.server.request_body import check_places, read_body
from mlx_backend.server.request_log import LEFT
from mlx_backend.server.request_tasks import ON_DISCONNECT, PUMP, UPGRADE, WEBSOCKET

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from werkzeug import Request

    from mlx_backend.api.addresses import Api, BodyCall, Cost, OnDisconnect, ResourceEndpoint
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


@dataclass(frozen=True, slots=True)
class Handler:
    """Answers the requests to one address; `handle` gets the variable parts of it, and raises whatever goes wrong.

    That is written as its `api` has it. `choose` returns another handler for a request that is not this one's.
    """

    api: Api
    operation: Operation
    handle: Callable[[Request, Backend, Mapping[str, str]], Response]
    choose: Callable[[Request], Handler | None] = lambda _request: None


@dataclass(frozen=True, slots=True)
class Route:
    """A method and a path, and what handles it. Without `needs_key` it is open to everybody."""

    method: str
    path: str
    handler: Handler
    needs_key: bool = True


def handler_of(endpoint: BodyEndpoint | SocketEndpoint | ResourceEndpoint) -> Handler:
    """Return what answers at an address of an API."""
    if isinstance(endpoint, BodyEndpoint):
        return reply_handler(endpoint)
    if isinstance(endpoint, SocketEndpoint):
        return Handler(endpoint.api, endpoint.operation, partial(_accept, endpoint), _for_message)
    handle = _loaded if endpoint.loads else _known
    return Handler(endpoint.api, endpoint.operation, partial(handle, endpoint))


def own_route(
    path: str,
    summary: str,
    answer: Any,
    handle: Callable[[Request, Backend, Mapping[str, str]], Response],
    *,
    needs_key: bool = True,
    **more: Any,
) -> Route:
    """Return a route that belongs to no API, with the errors that most clients expect; `more` is of its `Operation`."""
    operation = Operation(summary=summary, answer=answer, **more)
    return Route("GET", path, Handler(OPENAI, operation, handle), needs_key)


def told_apart(header: str, sent: Handler, not_sent: Handler) -> Handler:
    """Return what answers at one address of two APIs, of whose clients only one's send a header."""
    return replace(not_sent, choose=lambda request: sent if header in request.headers else None)


def reply_handler(endpoint: BodyEndpoint) -> Handler:
    """Return what generates a reply, streamed or sent whole, or has a model compute one JSON object."""
    return Handler(endpoint.api, endpoint.operation, partial(_reply, endpoint))


def _reply(
    endpoint: BodyEndpoint, request: Request, backend: Backend, _arguments: Mapping[str, str]
) -> Response:
    """Start a reply, whose model is released when the response is closed; or wait for the object."""
    settings, on_disconnect = backend.settings, _on_disconnect(request)
    call, preparation = _parsed(endpoint.parse, request, backend)
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
        stream_type = endpoint.operation.stream_type
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


def _known(
    endpoint: ResourceEndpoint, request: Request, backend: Backend, arguments: Mapping[str, str]
) -> Response:
    """Answer from what is known, without waiting."""
    known = {**request.args.to_dict(), **arguments}
    return json_response(endpoint.answer(Query(backend.models, known, backend.client.in_queue)))


def _loaded(
    endpoint: ResourceEndpoint, request: Request, backend: Backend, arguments: Mapping[str, str]
) -> Response:
    """Answer once a model is in memory; a client that leaves stops waiting, and the load goes on."""
    acquire = partial(backend.models.acquire_any, arguments["name"], backend.settings.load_seconds)
    with backend.lease(acquire, _on_disconnect(request)):
        return _known(endpoint, request, backend, arguments)


def _accept(
    endpoint: SocketEndpoint, request: Request, _backend: Backend, _arguments: Mapping[str, str]
) -> Response:
    """Accept a WebSocket, whose messages are answered as requests."""
    from mlx_backend.server.websocket import WebSocket  # most servers never need it

    request.environ[UPGRADE](WebSocket(request, endpoint.connect()))
    return Response(status=101)


def _for_message(request: Request) -> Handler | None:
    """Return what answers a message of a WebSocket; None for a handshake."""
    websocket: WebSocket | None = request.environ.get(WEBSOCKET)
    return None if websocket is None else reply_handler(websocket.endpoint)


def json_response(value: Any, status: int = 200) -> Response:
    """Answer with a value as JSON."""
    return Response(json_text.body(value), status=status, mimetype="application/json")


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
    return _with_ignored(json_response(answer.body), ignored)


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
