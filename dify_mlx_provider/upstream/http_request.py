"""One HTTP request: its body is streamed, redirects are not followed, and what is not body is bounded in the answer.

The only module that opens connections. Python's http.client bounds a header's length and how many there are. It does
not bound how often a server says `100 Continue` before it answers, how many trailers follow a body, nor how long a head
or the size of a chunk may take that comes a byte at a time. Knows nothing of what is in a body.
"""

from __future__ import annotations

import time
from http.client import HTTPException, HTTPResponse
from typing import TYPE_CHECKING, Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

if TYPE_CHECKING:
    from io import BufferedReader

MAX_HEAD_BYTES = 256 * 1024
"""Bytes of lines with nothing of the body in between, such as all heads before it; a usual head has a few hundred."""

MAX_HEAD_SECONDS = 30.0
"""From the first byte of such lines to the next of the body."""


def send(method: str, url: str, *, timeout: tuple[float, float], **arguments: Any) -> requests.Response:
    """Send a request. Raises what `requests.request` does; an endless head is a ConnectionError.

    `timeout` is for connecting and for each read, in seconds; `arguments` are `json`, `headers` and `auth` as there.
    """
    with requests.Session() as session:
        for scheme in ("http://", "https://"):
            session.mount(scheme, _Adapter())
        return session.request(method, url, timeout=timeout, stream=True, allow_redirects=False, **arguments)


class EndlessHead(HTTPException):
    """Lines that belong to no body do not end."""


def is_endless(error: BaseException) -> bool:
    """Whether an error was raised because of an EndlessHead."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, EndlessHead):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


class _Stream:
    """What http.client reads from: lines (heads, sizes of chunks, trailers), and bodies."""

    def __init__(self, stream: BufferedReader) -> None:
        self._stream = stream
        self._left = MAX_HEAD_BYTES
        self._deadline: float | None = None

    def begin(self) -> None:
        """Allow as much as ever for the lines that follow; they may be long in coming."""
        self._left = MAX_HEAD_BYTES
        self._deadline = None

    def readline(self, limit: int) -> bytes:
        """Return a line with its end, or its first `limit` bytes."""
        line = b""
        while len(line) < limit and not line.endswith(b"\n"):
            available = self._stream.peek(1)  # at most one read of the socket, which has a timeout
            now = time.monotonic()
            self._deadline = self._deadline or now + MAX_HEAD_SECONDS
            end = available.find(b"\n") + 1 or len(available)
            piece = self._stream.read(min(end, limit - len(line)))
            self._left -= len(piece)
            if not piece:
                break
            if self._left < 0 or now > self._deadline:
                raise EndlessHead
            line += piece
        return line

    def read1(self, size: int) -> bytes:
        """Return some of the body, as it arrives."""
        self.begin()
        return self._stream.read1(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Response(HTTPResponse):
    fp: Any

    def begin(self) -> None:
        """Read the head."""
        stream = self.fp = _Stream(self.fp)
        super().begin()
        stream.begin()


class _Connection(HTTPConnection):
    response_class = _Response


class _TLSConnection(HTTPSConnection):
    response_class = _Response


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _TLSPool(HTTPSConnectionPool):
    ConnectionCls = _TLSConnection


_POOLS = {"http": _Pool, "https": _TLSPool}


class _Adapter(HTTPAdapter):
    def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
        """Make the pools of direct connections."""
        super().init_poolmanager(*arguments, **options)
        self.poolmanager.pool_classes_by_scheme = _POOLS

    def proxy_manager_for(self, *arguments: Any, **options: Any) -> Any:
        """Return the pools of connections through a proxy."""
        manager = super().proxy_manager_for(*arguments, **options)
        manager.pool_classes_by_scheme = _POOLS
        return manager
