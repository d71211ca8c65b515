"""What a wire API is to the server: from the bytes of a request to the bytes of its response.

    ReplyProtocol        parse ─┬─▶ ReplyCall ─start─▶ Reply, ReplyWriter ─▶ bytes, streamed or whole
                                └─▶ JsonCall ─answer─▶ one JSON object that a model computes
    SocketProtocol       connect ─▶ a MessageProtocol, for the messages of one connection
    ResourceProtocol     nothing to parse: answer ─▶ one JSON object

A new API is a folder in api/ whose addresses implement these, as addresses.py makes them of functions, and a line in
server/app.py. The server knows status codes, headers and sockets; an API knows its bodies, and neither knows the
other's part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from mlx_backend.api.errors import ApiError
    from mlx_backend.chat.reply import Reply, ReplyEvent, Usage
    from mlx_backend.chat.reply_group import GroupEvent, ReplyGroup
    from mlx_backend.chat.service import Service
    from mlx_backend.conversation.events import StreamEnd
    from mlx_backend.engine.base import Progress, QueueClient, Queued
    from mlx_backend.registry.base import Lease, ModelRegistry

# A context in which the callable is called if the client disconnects.
type OnDisconnect = Callable[[Callable[[], None]], AbstractContextManager[None]]


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


class Errors(Protocol):
    """How an API writes what went wrong before anything was streamed."""

    error_type: Any
    """The type of the body of an error response, for /openapi.json."""

    def error(self, error: ApiError) -> bytes:
        """Return the body of an error response."""
        ...

    def status(self, error: ApiError) -> int:
        """Return the status of an error response."""
        ...


class Call(Protocol):
    """A parsed request: which model it names, and which of its fields mean nothing here."""

    @property
    def model(self) -> str | None:
        """The model's name; None for the default."""
        ...

    @property
    def ignored(self) -> Sequence[str]:
        """Fields that were sent and are ignored, for the log and a response header."""
        ...


@runtime_checkable
class KeepingCall(Protocol):
    """A request that says how long its model is to stay in memory after it."""

    @property
    def keep_alive(self) -> float | None:
        """The seconds; infinity: always; None: as before."""
        ...


class Described(Protocol):
    """An address that says what it takes and answers."""

    operation: Operation


class ReplyProtocol(Errors, Described, Protocol):
    """An address that takes a body."""

    def parse(self, body: bytes) -> ReplyCall | JsonCall[Any]:
        """Parse a request: for a reply, or for one JSON object. Raises ApiError naming the field that is wrong."""
        ...


class MessageProtocol(ReplyProtocol, Protocol):
    """What answers the messages of one connection, and may remember earlier ones."""

    def close(self) -> None:
        """Forget them: the connection is closed."""
        ...


class SocketProtocol(Errors, Described, Protocol):
    """An address to which a client keeps a connection."""

    def connect(self) -> MessageProtocol:
        """Return what answers the messages of a new connection."""
        ...


class ReplyCall(Call, Protocol):
    """A parsed request for a reply."""

    @property
    def stream(self) -> bool:
        """Whether the reply is to be streamed."""
        ...

    def start(self, service: Service, client: QueueClient) -> tuple[Reply | ReplyGroup, ReplyWriter]:
        """Start the client's reply, or several as one. Raises ApiError and whatever the service raises."""
        ...


class ReplyWriter(Protocol):
    """Writes one reply: `open`, `feed` for each event, `finish`; or `fold` for all of them at once.

    What `open`, `feed` and `finish` return is sent as it is; b"" sends nothing.
    """

    @property
    def id(self) -> str:
        """The reply's id, also for the log and the response header."""
        ...

    def open(self) -> bytes:
        """Return what is sent at once, before the first token."""
        ...

    def feed(self, event: ReplyEvent | GroupEvent) -> bytes:
        """Write any event but the last. Where several replies were started, the events say whose they are."""
        ...

    def finish(self, end: StreamEnd, usage: Usage) -> bytes:
        """Write the last event and whatever marks the end of a stream."""
        ...

    def keepalive(self, reason: Progress | Queued | None = None) -> bytes:
        """Return what fills a silence; the `reason` for it, if that is the prefill or the queue."""
        ...

    def progress(self, progress: Progress) -> bytes:
        """Write how far prefill is, each time that is known, if the request asks for that."""
        ...

    def error(self, error: ApiError) -> bytes:
        """Write an error in mid-stream, which ends the stream."""
        ...

    def fold(self, events: Iterable[ReplyEvent | GroupEvent], usage: Usage) -> bytes:
        """Return the body of a reply that is not streamed. `usage` is final once the events are consumed."""
        ...


@runtime_checkable
class JsonCall[S](Call, Protocol):
    """A parsed request for one JSON object."""

    @property
    def waits_for_engine(self) -> bool:
        """Whether the answer is computed by an engine, which has a queue. Otherwise it is prepared like a request."""
        ...

    def acquire(self, models: ModelRegistry, wait: float) -> Lease[S]:
        """Lease the model it needs, waiting `wait` seconds for it to load. Raises what `ModelRegistry` raises."""
        ...

    def answer(self, service: S, client: QueueClient, on_disconnect: OnDisconnect) -> JsonAnswer:
        """Compute a client's answer, and stop if the client disconnects. Raises ApiError, RequestError, EngineError."""
        ...


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


class ResourceProtocol(Errors, Described, Protocol):
    """An address without a body, answered from what is known."""

    def answer(
        self, models: ModelRegistry, arguments: Mapping[str, str], client: QueueClient
    ) -> Mapping[str, Any]:
        """Return the JSON object; `arguments` are the variable parts of the address, and those of its query."""
        ...
