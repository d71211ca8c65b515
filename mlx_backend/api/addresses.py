"""The addresses of an API, each of them a function: implements the protocols of base.py for bodies that are models.

    reply       start(body, service, client)    ─▶ the reply and what writes it
    json        compute(body, service, client)  ─▶ a JSON object, from a model that is leased
    socket      connection()                    ─▶ what parses and starts the messages of a WebSocket
    lookup      find(body, models, wait)        ─▶ a JSON object, from the registry of models
    resource    answer(query)                   ─▶ a JSON object, where there is no body

The first line of a function's docstring is what /openapi.json says of the address. Knows no API.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from mlx_backend.api import json_text
from mlx_backend.api.base import JsonAnswer, Operation
from mlx_backend.api.fields import Body
from mlx_backend.api.json_text import decode_json
from mlx_backend.registry.base import Lease

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mlx_backend.api.base import Errors, JsonCall, OnDisconnect, ReplyCall, ReplyWriter
    from mlx_backend.api.errors import ApiError
    from mlx_backend.chat.reply import Reply
    from mlx_backend.chat.reply_group import ReplyGroup
    from mlx_backend.chat.service import Service
    from mlx_backend.engine.base import QueueClient
    from mlx_backend.registry.base import ModelRegistry

WEBSOCKET = "WEBSOCKET"
"""Stands where the others have a method: the handshake is a GET, and the messages are as the bodies of POSTs."""

type Start[B] = Callable[[B, Service, QueueClient], tuple[Reply | ReplyGroup, ReplyWriter]]
type Compute[B, S] = Callable[[B, S, QueueClient], Mapping[str, Any]]
type Acquire[S] = Callable[[ModelRegistry, str | None, float], Lease[S]]
type Find[B] = Callable[[B, ModelRegistry, float], Mapping[str, Any]]
type AnyCall = ReplyCall | JsonCall[Any]


@dataclass
class Api:
    """How an API writes errors: implements base.py's `Errors`. `error_object` says what went wrong."""

    error_type: Any
    error_object: Callable[[ApiError], Any]
    status: Callable[[ApiError], int] = lambda error: error.status

    def error(self, error: ApiError) -> bytes:
        """Return the body of an error response."""
        return json_text.body(self.error_object(error))


@dataclass(frozen=True)
class BodyCall[B: Body]:
    """Implements base.py's `Call` for a body that has been parsed."""

    waits_for_engine: ClassVar[bool] = False

    body: B

    @property
    def model(self) -> str | None:
        """The model's name; None for the default."""
        return self.body.model

    @property
    def ignored(self) -> Sequence[str]:
        """The fields that are ignored."""
        return self.body.ignored

    @property
    def keep_alive(self) -> float | None:
        """How long the model is to stay in memory."""
        return self.body.seconds_kept


@dataclass(frozen=True)
class StartCall[B: Body](BodyCall[B]):
    """Implements `ReplyCall`."""

    begin: Start[B]

    @property
    def stream(self) -> bool:
        """Whether the reply is to be streamed."""
        return self.body.is_streamed

    def start(self, service: Service, client: QueueClient) -> tuple[Reply | ReplyGroup, ReplyWriter]:
        """Start the reply."""
        return self.begin(self.body, service, client)


@dataclass(frozen=True)
class ComputeCall[B: Body, S](BodyCall[B]):
    """Implements `JsonCall` for what needs no engine."""

    lease: Acquire[S]
    compute: Compute[B, S]

    def acquire(self, models: ModelRegistry, wait: float) -> Lease[S]:
        """Lease the model."""
        return self.lease(models, self.model, wait)

    def answer(self, service: S, client: QueueClient, _on_disconnect: OnDisconnect) -> JsonAnswer:
        """Compute the answer."""
        return JsonAnswer(self.compute(self.body, service, client))


@dataclass(frozen=True)
class FindCall[B: Body](BodyCall[B]):
    """Implements `JsonCall` for what the registry knows."""

    find: Find[B]

    def acquire(self, models: ModelRegistry, wait: float) -> Lease[Mapping[str, Any]]:
        """Ask the registry."""
        return Lease(self.model or "", self.find(self.body, models, wait), lambda: None)

    def answer(
        self, found: Mapping[str, Any], _client: QueueClient, _on_disconnect: OnDisconnect
    ) -> JsonAnswer:
        """Return what was found."""
        return JsonAnswer(found)


@dataclass(frozen=True, slots=True)
class Query:
    """A request without a body: `arguments` are the variable parts of the address, and those of its query."""

    models: ModelRegistry
    arguments: Mapping[str, str]
    client: QueueClient


class _Endpoint:
    """What all have: how errors are written, and what /openapi.json says."""

    def __init__(self, api: Errors, operation: Operation) -> None:
        self.error, self.status, self.error_type = api.error, api.status, api.error_type
        self.operation = operation


class BodyEndpoint(_Endpoint):
    """Implements `ReplyProtocol`: `call` is what a body becomes that has been parsed."""

    def __init__(
        self, api: Errors, operation: Operation, parse: Callable[[Any], Any], call: Callable[[Any], AnyCall]
    ) -> None:
        super().__init__(api, operation)
        self._parse, self._call = parse, call

    def parse(self, body: bytes) -> AnyCall:
        """Parse a request. Raises ApiError naming the field that is wrong."""
        return self._call(self._parse(decode_json(body)))


class Connection(Protocol):
    """What becomes of the messages of one connection, with what is remembered of earlier ones."""

    def parse(self, message: Any) -> Body:
        """Parse a message. Raises ApiError naming the field that is wrong."""
        ...

    def start(self, body: Any, service: Service, client: QueueClient) -> tuple[Reply, ReplyWriter]:
        """Start the reply."""
        ...

    def close(self) -> None:
        """Forget them: the connection is closed."""
        ...


class MessageEndpoint(BodyEndpoint):
    """Implements `MessageProtocol`."""

    def __init__(self, api: Errors, operation: Operation, connection: Connection) -> None:
        super().__init__(api, operation, connection.parse, lambda body: StartCall(body, connection.start))
        self.close = connection.close


class SocketEndpoint(_Endpoint):
    """Implements `SocketProtocol`. What is wrong with a message is written as `message_api` writes it."""

    def __init__(
        self, api: Errors, message_api: Errors, operation: Operation, connection: Callable[[], Connection]
    ) -> None:
        super().__init__(api, operation)
        self._message_api, self._connection = message_api, connection

    def connect(self) -> MessageEndpoint:
        """Return what answers the messages of a new connection."""
        return MessageEndpoint(self._message_api, self.operation, self._connection())


class ResourceEndpoint(_Endpoint):
    """Implements `ResourceProtocol`. If it `loads` a model, it answers once that is in memory."""

    def __init__(
        self, api: Errors, operation: Operation, answer: Callable[[Query], Any], *, loads: bool
    ) -> None:
        super().__init__(api, operation)
        self._answer, self.loads = answer, loads

    def answer(
        self, models: ModelRegistry, arguments: Mapping[str, str], client: QueueClient
    ) -> Mapping[str, Any]:
        """Return the JSON object."""
        found: Mapping[str, Any] = self._answer(Query(models, arguments, client))
        return found


@dataclass(frozen=True, slots=True)
class Address:
    """A method, a path, and what answers there. Without `needs_key` it is open to everybody."""

    method: str
    path: str
    endpoint: BodyEndpoint | SocketEndpoint | ResourceEndpoint
    needs_key: bool = True


class Addresses:
    """The addresses of an API, in their order. The types are those of an `Operation`."""

    def __init__(self, api: Errors) -> None:
        self._api = api
        self.all: list[Address] = []

    def reply(self, path: str, start: Start[Any], body: Any, answer: Any, event: Any) -> None:
        """Add one at which a reply is generated, streamed or whole."""
        self.post(path, _first_line(start), lambda parsed: StartCall(parsed, start), body, answer, event)

    def json(
        self,
        path: str,
        compute: Compute[Any, Any],
        body: Any,
        answer: Any,
        acquire: Acquire[Any] | None = None,
        *,
        parse: Callable[[Any], Any] | None = None,
    ) -> None:
        """Add one at which something is computed, from a language model unless it is to `acquire` another."""
        lease = acquire or (lambda models, name, wait: models.acquire(name, wait))
        self.post(
            path,
            _first_line(compute),
            lambda parsed: ComputeCall(parsed, lease, compute),
            body,
            answer,
            parse=parse,
        )

    def lookup(self, path: str, find: Find[Any], body: Any, answer: Any) -> None:
        """Add one at which something of the registry is looked up."""
        self.post(path, _first_line(find), lambda parsed: FindCall(parsed, find), body, answer)

    def post(
        self,
        path: str,
        summary: str,
        call: Callable[[Any], AnyCall],
        body: Any,
        answer: Any,
        event: Any = None,
        *,
        parse: Callable[[Any], Any] | None = None,
        stream_type: str = "text/event-stream",
    ) -> None:
        """Add one at which a body becomes a `call`. `parse` checks the body, if its type does not."""
        operation = Operation(summary=summary, body=body, answer=answer, event=event, stream_type=stream_type)
        endpoint = BodyEndpoint(self._api, operation, parse or body.parse, call)
        self.all.append(Address("POST", path, endpoint))

    def socket(
        self, path: str, connection: Callable[[], Connection], body: Any, event: Any, message_api: Errors
    ) -> None:
        """Add one for WebSockets. What is wrong with a message is written as `message_api` writes it."""
        operation = Operation(
            summary=_first_line(connection), body=body, answer=event | message_api.error_type
        )
        endpoint = SocketEndpoint(self._api, message_api, operation, connection)
        self.all.append(Address(WEBSOCKET, path, endpoint))

    def resource(
        self,
        method: str,
        path: str,
        find: Callable[[Query], Any],
        answer: Any,
        *,
        needs_key: bool = True,
        loads: bool = False,
    ) -> None:
        """Add one that is answered from what is known."""
        operation = Operation(summary=_first_line(find), answer=answer)
        endpoint = ResourceEndpoint(self._api, operation, find, loads=loads)
        self.all.append(Address(method, path, endpoint, needs_key))


def _first_line(function: Callable[..., Any]) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0].removesuffix(".")
