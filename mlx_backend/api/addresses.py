"""What a wire API is to the server: its addresses, each of them a function, from a request's bytes to a response's.

    reply       start(body, service, client)    ─▶ the reply and what writes it
    json        compute(body, service, client)  ─▶ a JSON object, from a model that is leased
    socket      connection()                    ─▶ what parses and starts the messages of a WebSocket
    lookup      find(body, models, wait)        ─▶ a JSON object, from the registry of models
    resource    answer(query)                   ─▶ a JSON object, where there is no body

The first line of a function's docstring is what /openapi.json says of the address. A new API is a folder in api/ with
such addresses, and a line in server/app.py. The server knows status codes, headers and sockets; an API knows its
bodies, and neither knows the other's part.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from mlx_backend.api import json_text
from mlx_backend.api.fields import Body
from mlx_backend.api.json_text import decode_json
from mlx_backend.registry.base import Lease

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from mlx_backend.api.errors import ApiError
    from mlx_backend.api.writers import ReplyWriter
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
type OnDisconnect = Callable[[Callable[[], None]], AbstractContextManager[None]]
"""A context in which the callable is called if the client disconnects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What /openapi.json says of an address. Types are any that pydantic can describe."""

    summary: str
    answer: Any
    """The type of the JSON object that is sent."""
    body: Any = None
    """The type of the request's body, as clients write it; None if there is none."""
    event: Any = None
    """The type of one streamed object; None where nothing is streamed."""
    stream_type: str = "text/event-stream"
    """The media type of a stream: server-sent events, or one JSON object a line."""
    media_type: str = "application/json"
    also_answers: Sequence[int] = ()
    """Further status codes with which `answer` is sent."""


@dataclass
class Api:
    """How an API writes what went wrong before anything was streamed.

    `error_type` is the type of the body of an error response, for /openapi.json; `error_object` makes one.
    """

    error_type: Any
    error_object: Callable[[ApiError], Any]
    status: Callable[[ApiError], int] = lambda error: error.status

    def error(self, error: ApiError) -> bytes:
        """Return the body of an error response."""
        return json_text.body(self.error_object(error))


@dataclass(frozen=True)
class BodyCall[B: Body]:
    """A body that has been parsed: which model it names, and which of its fields mean nothing here."""

    body: B

    @property
    def model(self) -> str | None:
        """The model's name; None for the default."""
        return self.body.model

    @property
    def ignored(self) -> Sequence[str]:
        """Fields that were sent and are ignored, for the log and a response header."""
        return self.body.ignored

    @property
    def keep_alive(self) -> float | None:
        """The seconds that its model is to stay in memory after it; infinity: always; None: as before."""
        return self.body.seconds_kept


@dataclass(frozen=True)
class StartCall[B: Body](BodyCall[B]):
    """A request for a reply."""

    begin: Start[B]

    @property
    def stream(self) -> bool:
        """Whether the reply is to be streamed."""
        return self.body.is_streamed

    def start(self, service: Service, client: QueueClient) -> tuple[Reply | ReplyGroup, ReplyWriter]:
        """Start the client's reply, or several as one. Raises ApiError and whatever the service raises."""
        return self.begin(self.body, service, client)


@dataclass(frozen=True, slots=True)
class JsonAnswer:
    """A JSON object, None if the client disconnected; and what it cost, if that is worth a line in the log."""

    body: Mapping[str, object] | None
    cost: Cost | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What an answer has cost. `truncated` counts the texts that were too long to be read to their end."""

    model: str
    texts: int
    tokens: int
    truncated: int = 0


@dataclass(frozen=True)
class JsonCall[B: Body, S](BodyCall[B]):
    """A request for one JSON object."""

    waits_for_engine: ClassVar[bool] = False
    """Whether the answer is computed by an engine, which has a queue. Otherwise it is prepared like a request."""

    @abstractmethod
    def acquire(self, models: ModelRegistry, wait: float) -> Lease[S]:
        """Lease the model it needs, waiting `wait` seconds for it to load. Raises what `ModelRegistry` raises."""

    @abstractmethod
    def answer(self, service: S, client: QueueClient, on_disconnect: OnDisconnect) -> JsonAnswer:
        """Compute a client's answer, and stop if the client disconnects. Raises ApiError, RequestError, EngineError."""


@dataclass(frozen=True)
class ComputeCall[B: Body, S](JsonCall[B, S]):
    """Asks for what needs no engine."""

    lease: Acquire[S]
    compute: Compute[B, S]

    def acquire(self, models: ModelRegistry, wait: float) -> Lease[S]:
        """Lease the model."""
        return self.lease(models, self.model, wait)

    def answer(self, service: S, client: QueueClient, _on_disconnect: OnDisconnect) -> JsonAnswer:
        """Compute the answer."""
        return JsonAnswer(self.compute(self.body, service, client))


@dataclass(frozen=True)
class FindCall[B: Body](JsonCall[B, Mapping[str, Any]]):
    """Asks for what the registry knows."""

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


type AnyCall = StartCall[Any] | JsonCall[Any, Any]


@dataclass(frozen=True)
class ApiEndpoint:
    """What answers at an address: how it writes errors, and what /openapi.json says of it."""

    api: Api
    operation: Operation


@dataclass(frozen=True)
class BodyEndpoint(ApiEndpoint):
    """Takes a body. `check` parses it when it is decoded, `call` says what it becomes then."""

    check: Callable[[Any], Any]
    call: Callable[[Any], AnyCall]

    def parse(self, body: bytes) -> AnyCall:
        """Parse a request. Raises ApiError naming the field that is wrong."""
        return self.call(self.check(decode_json(body)))


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


@dataclass(frozen=True)
class MessageEndpoint(BodyEndpoint):
    """Takes the messages of one connection, and may remember earlier ones until it is told to `close`."""

    close: Callable[[], None]


@dataclass(frozen=True)
class SocketEndpoint(ApiEndpoint):
    """Clients keep a connection to it. What is wrong with a message is written as `message_api` writes it."""

    message_api: Api
    connection: Callable[[], Connection]

    def connect(self) -> MessageEndpoint:
        """Return what answers the messages of a new connection."""
        new = self.connection()
        call = partial(StartCall, begin=new.start)
        return MessageEndpoint(self.message_api, self.operation, new.parse, call, new.close)


@dataclass(frozen=True)
class ResourceEndpoint(ApiEndpoint):
    """Takes no body. If it `loads` a model, it answers once that is in memory."""

    answer: Callable[[Query], Any]
    loads: bool


@dataclass(frozen=True, slots=True)
class Address:
    """A method, a path, and what answers there. Without `needs_key` it is open to everybody."""

    method: str
    path: str
    endpoint: BodyEndpoint | SocketEndpoint | ResourceEndpoint
    needs_key: bool = True


class Addresses:
    """The addresses of an API, in their order. The types are those of an `Operation`."""

    def __init__(self, api: Api) -> None:
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
        self, path: str, connection: Callable[[], Connection], body: Any, event: Any, message_api: Api
    ) -> None:
        """Add one for WebSockets. What is wrong with a message is written as `message_api` writes it."""
        operation = Operation(
            summary=_first_line(connection), body=body, answer=event | message_api.error_type
        )
        endpoint = SocketEndpoint(self._api, operation, message_api, connection)
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
