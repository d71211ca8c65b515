"""A WebSocket to an address that streams: a message is the body of a POST, and each event of its answer is a message.

    in     frames                                  ─▶ HTTP requests with the head of the handshake, in chunks
    out    server-sent events, or a JSON object    ─▶ messages

So all that holds for requests holds for messages: keys, limits, times, the log. They are answered one after the other.
wsproto reads and writes the frames. Knows no sockets and no API.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Ping, TextMessage
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import RemoteProtocolError

from mlx_backend.api.errors import ApiError
from mlx_backend.api.writers import data_of_events

if TYPE_CHECKING:
    from collections.abc import Iterator

    from werkzeug import Request
    from wsproto.events import Event

    from mlx_backend.api.addresses import MessageEndpoint

MAX_WAITING = 8
"""Messages that may wait while one is answered."""
_VERSION = "13"
_MAX_SHOWN = 20
"""Characters of another version that are repeated."""
_MAX_REASON_BYTES = 120
_CLOSE_CODES = {
    None: CloseReason.GOING_AWAY,
    413: CloseReason.MESSAGE_TOO_BIG,
    500: CloseReason.INTERNAL_ERROR,
    503: CloseReason.TRY_AGAIN_LATER,
}
_OWN_HEADERS = ("content-length", "transfer-encoding", "expect")


class WebSocket:
    """A connection whose handshake is `request`; `endpoint` takes its messages."""

    def __init__(self, request: Request, endpoint: MessageEndpoint) -> None:
        """Raise the ApiError of what is no handshake, or one of another version."""
        self.endpoint = endpoint
        self._guard = threading.Lock()
        self._is_within_message = False
        headers = [(name.lower(), value) for name, value in request.headers.items()]
        self._connection = WSConnection(ConnectionType.SERVER)
        try:
            if request.method != "GET":
                raise RemoteProtocolError("it has to be a GET")
            self._connection.initiate_upgrade_connection(
                [(name.encode(), value.encode("latin-1")) for name, value in headers], request.path
            )
            list(self._connection.events())
        except (RemoteProtocolError, ValueError) as error:
            version = request.headers.get("Sec-WebSocket-Version", _VERSION)
            if version != _VERSION:
                raise ApiError(
                    426,
                    f"This server speaks version {_VERSION} of WebSockets, not {version[:_MAX_SHOWN]!r}.",
                    headers=(("Sec-WebSocket-Version", _VERSION),),
                ) from None
            raise ApiError(400, f"This is no handshake of a WebSocket: {error}.") from None
        self.accepted = self._connection.send(AcceptConnection())
        """The response to the handshake."""
        lines = [f"{name}: {value}" for name, value in headers if name not in _OWN_HEADERS]
        target = request.environ["REQUEST_URI"]
        head = "\r\n".join([f"POST {target} HTTP/1.1", *lines, "Transfer-Encoding: chunked"])
        self._head = head.encode("latin-1") + b"\r\n\r\n"

    @property
    def is_closed(self) -> bool:
        """Whether nothing more is received."""
        return self._connection.state is not ConnectionState.OPEN

    def receive(self, received: bytes, unanswered: int) -> tuple[bytes, bytes]:
        """Take what was received while so many messages were not answered.

        Return it as HTTP requests, and what is to be sent at once: a pong, or the end of the connection. Both are empty
        once the connection was closed.
        """
        requests, reply = bytearray(), bytearray()
        with self._guard:
            if self.is_closed:
                return b"", b""
            self._connection.receive_data(received)
            for event in self._connection.events():
                match event:
                    case TextMessage() | BytesMessage():
                        requests += self._as_request(event)
                        unanswered += event.message_finished
                    case Ping():
                        reply += self._connection.send(event.response())
                    case CloseConnection():  # the client's, or for what is no frame
                        reply += self._connection.send(event.response())
                        break
        # Besides: the one that is answered, and the handshake or the one before it, whose answer may have arrived.
        if unanswered > MAX_WAITING + 2:
            reply += self.close(f"More than {MAX_WAITING} messages wait to be answered.", 429)
        return bytes(requests), bytes(reply)

    def _as_request(self, event: TextMessage | BytesMessage) -> bytes:
        data = event.data.encode() if isinstance(event.data, str) else bytes(event.data)
        begin = b"" if self._is_within_message else self._head
        self._is_within_message = not event.message_finished
        chunk = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        return begin + chunk + (b"0\r\n\r\n" if event.message_finished else b"")

    def messages(self, answer: bytes) -> bytes:
        """Return the messages that whole events of an answer are, or the whole of one without events."""
        with self._guard:
            return b"" if self.is_closed else b"".join(map(self._connection.send, _messages_in(answer)))

    def close(self, reason: str, status: int | None = None) -> bytes:
        """Return the end of the connection; nothing if it was ended before.

        `status` is what a request would be answered with for this reason; None if it has nothing to do with one.
        """
        code = _CLOSE_CODES.get(status, CloseReason.POLICY_VIOLATION)
        event = CloseConnection(code, reason.encode()[:_MAX_REASON_BYTES].decode(errors="ignore"))
        with self._guard:
            return b"" if self.is_closed else self._connection.send(event)


def _messages_in(answer: bytes) -> Iterator[Event]:
    if answer.startswith(b"{"):
        yield TextMessage(answer.decode().rstrip("\n"))
    yield from map(TextMessage, data_of_events(answer))
