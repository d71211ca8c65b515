"""One HTTP/1.1 request among the bytes of a connection: its head, its body's end, and whether it is well formed.

h11 parses; what is ambiguous (two lengths, a length below zero, no Host) is refused and not interpreted. The request
comes out again with its body's length stated, however the client framed it, so that what parses it next never
waits for a client. Knows no socket, no time, and nothing of what a request asks for.
"""

from __future__ import annotations

from dataclasses import dataclass

import h11

FREE_CHUNKS = 1024
MIN_CHUNK_BYTES = 64
"""A chunk costs as much as some kilobytes of body: beyond the free ones they must carry so much on average."""

_TOO_LONG = "The head of the request is too long."
_FORWARDED_FOR = b"x-forwarded-for"
_FRAMING_HEADERS = {b"content-length", b"transfer-encoding", b"expect"}


class FramingError(Exception):
    """What arrived is not a well-formed request. `status` is that of the response."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(frozen=True, slots=True)
class RequestHead:
    """Request line and headers. Header names are lower case, in the order sent; a name may occur several times."""

    method: str
    target: str
    version: str
    headers: tuple[tuple[bytes, bytes], ...]
    content_length: int | None
    """None for a body in chunks; 0 where no body was announced."""
    expects_continue: bool

    def to_bytes(self, body_length: int) -> bytes:
        """Return the head as it is sent for a body of so many bytes."""
        lines = [f"{self.method} {self.target} HTTP/{self.version}".encode("latin-1")]
        lines += [name + b": " + value for name, value in self.headers if name not in _FRAMING_HEADERS]
        lines += [b"Content-Length: %d" % body_length] if body_length or self.content_length != 0 else []
        return b"\r\n".join([*lines, b"", b""])


class RequestFraming:
    """Feed it what a connection receives; `head`, `body_bytes` and `is_complete` say how far the request has come.

    A body in chunks is unpacked. Bytes beyond the request's end belong to the next one: see `rest`.
    """

    def __init__(self, max_head_bytes: int) -> None:
        self.head: RequestHead | None = None
        self.body_bytes = 0
        self.is_complete = False
        self.has_begun = False
        self._max_head_bytes = max_head_bytes
        self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=max_head_bytes)
        self._body: list[bytes] = []
        self._rest = b""
        self._chunks = 0

    def feed(self, piece: bytes) -> None:
        """Take the next bytes. Raises FramingError; nothing may be fed after that."""
        if not self.has_begun:
            piece = piece.lstrip(b"\r\n")  # RFC 9112 2.2: old clients send an empty line behind a body
        if not piece:  # to h11 it would be the end of the connection
            return
        self.has_begun = True
        if self.head is None or self.head.content_length is None:
            self._parse(piece)
        else:
            self._append(piece)

    def rest(self) -> bytes:
        """Return what followed a complete request."""
        return self._rest

    def take(self) -> bytes:
        """Return head and body, and forget the body.

        The head states the length that the client announced, or of a body in chunks how long it has become.
        """
        assert self.head is not None
        announced = self.head.content_length
        head = self.head.to_bytes(self.body_bytes if announced is None else announced)
        body, self._body = self._body, []
        return b"".join([head, *body])

    def _parse(self, piece: bytes) -> None:
        try:
            self._parser.receive_data(piece)
            while (event := self._parser.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                match event:
                    case h11.Request():
                        self.head = _head(event, self._max_head_bytes)
                        if self.head.content_length is not None:
                            self._append(bytes(self._parser.trailing_data[0]))
                            return
                    case h11.Data():
                        self._add_chunk(event)
                    case h11.EndOfMessage():
                        self.is_complete = True
                        self._rest = bytes(self._parser.trailing_data[0])
        except h11.RemoteProtocolError as error:
            raise FramingError(*_explained(error, self.head is None)) from None

    def _append(self, piece: bytes) -> None:
        """Take bytes of a body whose length is known."""
        assert self.head is not None
        assert self.head.content_length is not None
        missing = self.head.content_length - self.body_bytes
        piece, more = (piece[:missing], piece[missing:]) if len(piece) > missing else (piece, b"")
        if piece:
            self._body.append(piece)
            self.body_bytes += len(piece)
        self._rest += more
        self.is_complete = self.body_bytes == self.head.content_length

    def _add_chunk(self, chunk: h11.Data) -> None:
        self._chunks += chunk.chunk_start
        self._body.append(bytes(chunk.data))
        self.body_bytes += len(chunk.data)
        if self._chunks > FREE_CHUNKS + self.body_bytes // MIN_CHUNK_BYTES:
            raise FramingError(
                400,
                f"The body comes in too many chunks of less than {MIN_CHUNK_BYTES} bytes; send larger ones.",
            )


def _head(request: h11.Request, max_bytes: int) -> RequestHead:
    headers = _distinct([(bytes(name), bytes(value)) for name, value in request.headers])
    # h11 bounds only a head that has not ended yet.
    if len(request.target) + sum(len(name) + len(value) + 4 for name, value in headers) > max_bytes:
        raise FramingError(431, _TOO_LONG)
    names = [name for name, _ in headers]
    if b"transfer-encoding" in names and b"content-length" in names:
        raise FramingError(400, "A request has a Content-Length or a Transfer-Encoding, not both.")
    version = request.http_version.decode("ascii")
    if version not in ("1.0", "1.1"):
        raise FramingError(505, f"HTTP/{version} is not supported; send HTTP/1.1.")
    length = next((int(value) for name, value in headers if name == b"content-length"), 0)
    return RequestHead(
        method=request.method.decode("ascii"),
        target=request.target.decode("latin-1"),
        version=version,
        headers=headers,
        content_length=None if b"transfer-encoding" in names else length,
        expects_continue=any(
            name == b"expect" and value.lower() == b"100-continue" for name, value in headers
        ),
    )


def _distinct(headers: list[tuple[bytes, bytes]]) -> tuple[tuple[bytes, bytes], ...]:
    """Return headers whose names mean one thing to everybody.

    WSGI takes `x_forwarded_for` for `X-Forwarded-For`, and a proxy in front does not: such names are left out, as nginx
    does. A list that came in several headers is one (RFC 9110, 5.3): WSGI would keep the last part.
    """
    lists = [value for name, value in headers if name == _FORWARDED_FOR]
    kept = [(name, value) for name, value in headers if b"_" not in name and name != _FORWARDED_FOR]
    return tuple([*kept, (_FORWARDED_FOR, b", ".join(lists))] if lists else kept)


def _explained(error: h11.RemoteProtocolError, in_head: bool) -> tuple[int, str]:
    status = error.error_status_hint
    if status == 431:
        return 431, _TOO_LONG
    text = str(error).partition(": bytearray")[0].rstrip(":. ")  # what was sent is not repeated
    return status, f"The request is not well formed ({'head' if in_head else 'body'}): {text}."
