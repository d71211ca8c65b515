"""The HTTP client: one request to an OpenAI-compatible server, its answer as JSON, its failures as sentences.

Knows neither Dify nor channels, and no kinds of servers; failures are `upstream.errors`. The answer to a chat is
always read as a stream of chunks; a server that answers with one JSON object gives a stream of one. Closing the
iterator closes the connection, which is how a server learns that its client has left.

A server that sends `Retry-After` (it is loading the model, or its queue is full) gets the request again, for as long
as a silent one would be waited for.

The only module that opens connections. `send` follows no redirects, and bounds what Python's http.client does not: how
often a server says `100 Continue` before it answers, how many trailers follow a body, and how long a head or the size
of a chunk may take that comes a byte at a time. `iter_body` unpacks a body in pieces of bounded size.
"""

from __future__ import annotations

import math
import time
import zlib
from contextlib import contextmanager, suppress
from hashlib import sha256
from http.client import HTTPException, HTTPResponse, RemoteDisconnected
from itertools import chain
from typing import TYPE_CHECKING, Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import DecodeError, HTTPError, InvalidHeader, NameResolutionError, ReadTimeoutError
from urllib3.util import Retry

from dify_mlx_provider.upstream import sse
from dify_mlx_provider.upstream.errors import (
    NoSuchEndpoint,
    Refused,
    ServerError,
    Unavailable,
    Unreachable,
    from_error_object,
    from_status,
    unknown_host,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping
    from io import BufferedReader

    from dify_mlx_provider.upstream.credentials import Credentials

MAX_RETRY_WAIT = 300.0
"""Seconds spent waiting between retries of one request; Dify gives a call up after 600."""

MIN_RETRY_DELAY = 0.5
"""Seconds."""

MIN_SECRET_LENGTH = 4
"""Characters. A shorter key is no secret, and parts of words would be taken for it."""

MAX_ERROR_BYTES = 65_536
"""Bytes of an error's body that are read."""

MAX_ERROR_SECONDS = 30.0
"""Seconds that an error's body is read for."""

MAX_HEAD_BYTES = 256 * 1024
"""Bytes of lines with nothing of the body in between, such as all heads before it; a usual head has a few hundred."""

MAX_HEAD_SECONDS = 30.0
"""Seconds from the first byte of such lines to the next of the body."""

MAX_ANSWER_SECONDS = 3600.0
"""Seconds from an answer's beginning to its end; Dify gives a call up after 600, unless it was set up otherwise."""

MAX_COMMENT_SECONDS = 600.0
"""Seconds of a stream in which nothing comes but comments, as while a request waits in a queue."""

PIECE_BYTES = 65_536
"""Bytes of a body that are unpacked at once."""

_ZLIB_OR_GZIP = 32 + zlib.MAX_WBITS


class OpenAIClient:
    """Talks to one server. `sleep` waits some seconds between retries."""

    def __init__(self, credentials: Credentials, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._credentials = credentials
        self._sleep = sleep

    def models(self) -> list[str]:
        """Return the ids of the models the server serves."""
        try:
            return [str(model["id"]) for model in self._parse_body(self._send("GET", "/models"))["data"]]
        except (KeyError, TypeError) as error:
            raise self._not_openai() from error

    def post_json(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a request that a model answers with one JSON value; return the value."""
        answer = self._parse_body(self._send_with_retries(path, body))
        if isinstance(answer, dict) and "error" in answer:
            return {**answer, "error": self._without_key(answer["error"])}
        return answer

    def chat(self, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Send a chat request; return its chunks. What fails before the first chunk is raised here, not later."""
        return self._chunks(self._send_with_retries("/chat/completions", body))

    # urllib3's Retry counts attempts and has no limit on the time they take together, retries only three statuses,
    # and fails on a Retry-After that it cannot parse. So the loop is ours, and only dates are parsed by Retry.
    def _send_with_retries(self, path: str, body: Mapping[str, Any]) -> requests.Response:
        """Send a request, again while the server sends Retry-After. The response's body is not read yet."""
        time_left = min(self._credentials.timeout, MAX_RETRY_WAIT)
        while True:
            try:
                return self._send("POST", path, body)
            except ServerError as error:
                delay = max(error.retry_after or 0.0, MIN_RETRY_DELAY)
                if error.retry_after is None or delay > time_left:
                    raise
            time_left -= delay
            self._sleep(delay)

    def _parse_body(self, response: requests.Response) -> Any:
        with response, self._reading():
            try:
                return sse.parse_body(self._within(iter_body(response)))
            except sse.MalformedBody as error:
                raise self._not_openai() from error

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Say in a sentence why an answer could not be read to its end."""
        try:
            yield
        except (ReadTimeoutError, requests.exceptions.Timeout) as error:
            raise self._timed_out() from error
        except (HTTPError, requests.exceptions.RequestException, OSError) as error:
            raise self._broke_off() from error

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> requests.Response:
        url = self._credentials.base_url + path
        try:
            timeout = (self._credentials.connect_timeout, self._credentials.timeout)
            key, conversation = self._credentials.api_key, _conversation(body or {})
            response = send(method, url, key=key, timeout=timeout, json=body, conversation=conversation)
        except requests.exceptions.ConnectTimeout as error:
            raise self._no_server() from error
        except requests.exceptions.Timeout as error:
            # A server without TLS may wait for the rest of what it takes for a request.
            in_handshake = any("handshake" in str(each) for each in _raised_from(error))
            raise (self._tls_failed() if in_handshake else self._timed_out()) from error
        except requests.exceptions.SSLError as error:
            raise self._tls_failed() from error
        except (requests.exceptions.ConnectionError, requests.exceptions.InvalidURL) as error:
            raise self._connection_error(error) from error
        except (requests.exceptions.RequestException, HTTPError, ValueError) as error:
            raise Unreachable(f"{url} cannot be used: {type(error).__name__}.") from error
        if response.status_code >= 300:
            with response:
                raise self._status_error(response)
        return response

    # -- the answer --------------------------------------------------------------------------------

    def _chunks(self, response: requests.Response) -> Generator[dict[str, Any], None, None]:
        with response, self._reading():
            pieces = self._within(iter_body(response))
            is_named_event_stream = "text/event-stream" in response.headers.get("Content-Type", "")
            try:
                beginning = b""
                if not is_named_event_stream:
                    beginning = sse.skip_blank(pieces)
                    if not sse.is_event_stream(beginning):
                        yield self._as_chunk(sse.parse_body(chain([beginning], pieces)))
                        return
                yield from self._events(chain([beginning], pieces))
            except sse.MalformedBody as error:
                raise (self._broke_off() if is_named_event_stream else self._not_openai()) from error

    def _within(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the pieces of an answer. Raises Unavailable for one that has no end."""
        began = time.monotonic()
        for piece in pieces:
            if time.monotonic() - began > MAX_ANSWER_SECONDS:
                raise self._endless(f"has sent one answer for {MAX_ANSWER_SECONDS:g} seconds")
            yield piece

    def _events(self, pieces: Iterator[bytes]) -> Iterator[dict[str, Any]]:
        finished = False
        heard = time.monotonic()

        def attended() -> Iterator[bytes]:
            for piece in pieces:
                yield piece
                if time.monotonic() - heard > MAX_COMMENT_SECONDS:
                    raise self._endless(f"has sent nothing but comments for {MAX_COMMENT_SECONDS:g} seconds")

        try:
            for chunk in sse.iter_events(attended()):
                heard = time.monotonic()
                if chunk is sse.DONE:
                    return
                if not isinstance(chunk, dict):
                    raise self._not_openai()
                if error := _error_in(chunk):
                    raise from_error_object(self._without_key(error))
                choices = chunk.get("choices")
                finished = finished or any(
                    isinstance(choice, dict) and choice.get("finish_reason")
                    for choice in (choices if isinstance(choices, list) else ())
                )
                yield chunk
                # Dify's SDK runs all calls in one thread, by gevent. A call whose server is faster than the plugin
                # never waits for it, and would starve the other calls.
                time.sleep(0)
        except (sse.MalformedBody, HTTPError, requests.exceptions.RequestException, OSError):
            if finished:
                return  # only the end of the stream was missing
            raise
        if not finished:
            raise self._broke_off()

    def _as_chunk(self, answer: Any) -> dict[str, Any]:
        """Return a whole completion as the one chunk of a stream."""
        if isinstance(answer, dict) and (error := _error_in(answer)):
            raise from_error_object(self._without_key(error))
        if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list):
            raise self._not_openai()
        choices = [
            {**choice, "delta": choice.get("message") or {}}
            for choice in answer["choices"]
            if isinstance(choice, dict)
        ]
        return {**answer, "choices": choices}

    def _connection_error(self, error: Exception) -> ServerError:
        """Why there was no answer: an unknown host, no server, or one that does not speak HTTP."""
        for cause in _causes(error):
            match cause:
                case NameResolutionError():
                    return unknown_host(self._credentials.base_url)
                case RemoteDisconnected() | ConnectionResetError() | BrokenPipeError():
                    return Unreachable(
                        f"no answer at {self._credentials.base_url}: the connection was closed instead. Check that "
                        "`mlx-backend` runs there, and look at its log."
                    )
                case HTTPException():
                    return self._not_openai()
        return self._no_server()

    def _without_key(self, said: Any) -> Any:
        """Return what a server says without our key: some repeat the headers of a request in their errors."""
        key = self._credentials.api_key
        if len(key) < MIN_SECRET_LENGTH:
            return said
        try:
            return _replaced(said, key)
        except RecursionError:
            return None

    # -- errors ------------------------------------------------------------------------------------

    def _no_server(self) -> Unreachable:
        return Unreachable(
            f"no server at {self._credentials.base_url}: start it with `mlx-backend`, or, if it runs, let Dify reach "
            "it. From Dify in Docker the address is http://host.docker.internal:8080/v1; with Docker on Linux, from "
            "another machine, or if the container still cannot connect, start the server with --host 0.0.0.0 and a key."
        )

    def _tls_failed(self) -> Unreachable:
        return Unreachable(
            f"no secure connection to {self._credentials.base_url}: the server does not speak https there, or its "
            "certificate is not trusted. An mlx-backend without a certificate is reached with http://."
        )

    def _timed_out(self) -> Unavailable:
        return Unavailable(
            f"the server at {self._credentials.base_url} sent nothing for {self._credentials.timeout:g} seconds. "
            "If the model needs longer, raise the timeout in the credentials."
        )

    def _endless(self, what: str) -> Unavailable:
        return Unavailable(
            f"the server at {self._credentials.base_url} {what}. The request was stopped. Look at the server's log."
        )

    def _broke_off(self) -> Unavailable:
        return Unavailable(
            f"the answer of the server at {self._credentials.base_url} broke off. Its log says why."
        )

    def _not_openai(self) -> Refused:
        return Refused(
            f"what answers at {self._credentials.base_url} is not an OpenAI-compatible server. Check the address; "
            "it usually ends in /v1."
        )

    def _status_error(self, response: requests.Response) -> ServerError:
        beginning = b""
        deadline = time.monotonic() + MAX_ERROR_SECONDS
        with suppress(HTTPError, requests.exceptions.RequestException, OSError):
            for piece in iter_body(response):
                beginning += piece
                if len(beginning) > MAX_ERROR_BYTES or time.monotonic() > deadline:
                    break
        error = from_status(
            response.status_code,
            self._without_key(sse.parse_json(beginning.decode("utf-8", "replace"))),
            address=self._credentials.base_url,
            location=self._without_key(response.headers.get("Location")),
        )
        error = error or NoSuchEndpoint(str(self._not_openai()))
        return error.with_retry_after(_parse_retry_after(response.headers.get("Retry-After")))


def _replaced(value: Any, secret: str) -> Any:
    match value:
        case str():
            return value.replace(secret, "…")
        case dict():
            return {name: _replaced(each, secret) for name, each in value.items()}
        case list():
            return [_replaced(each, secret) for each in value]
        case _:
            return value


def _error_in(chunk: Mapping[str, Any]) -> Any:
    """The error in a chunk: in the field `error`, or the chunk itself, as servers send it in an `event: error`."""
    if chunk.get("error"):
        return chunk["error"]
    if "choices" not in chunk and isinstance(chunk.get("message"), str):
        return chunk
    return None


def _causes(error: BaseException) -> Iterator[object]:
    """Yield an error and what is wrapped in it."""
    yield error
    for inner in (*error.args, getattr(error, "reason", None)):
        if isinstance(inner, BaseException):
            yield from _causes(inner)


def _parse_retry_after(header: str | None) -> float | None:
    """Return the seconds of a Retry-After header, which may be a date; None without a valid one."""
    if not header:
        return None
    with suppress(ValueError):
        seconds = float(header)  # a fraction, which some servers send, is not valid to urllib3
        return seconds if 0 <= seconds < math.inf else None
    try:
        return float(Retry().parse_retry_after(header))
    except (InvalidHeader, ValueError, OverflowError):
        return None


# -- connections -------------------------------------------------------------------------------------------


def _conversation(body: Mapping[str, Any]) -> str:
    """Return a name for a request's conversation, by which a proxy finds the machine that has read it before.

    The system prompt may hold other documents in each turn; what was asked first stays.
    """
    asked = (message for message in body.get("messages", ()) if message["role"] == "user")
    first = next(asked, None)
    return sha256(repr(first).encode()).hexdigest()[:32] if first else ""


def send(
    method: str,
    url: str,
    *,
    key: str,
    timeout: tuple[float, float],
    json: Mapping[str, Any] | None = None,
    conversation: str = "",
) -> requests.Response:
    """Send a request with our key. Raises what `requests.request` does; an endless head is a ConnectionError.

    `conversation` is a name for what is continued; `timeout` is for connecting and for each read, in seconds. The
    body of the response is not read yet: `iter_body`.
    """

    def sign(request: requests.PreparedRequest) -> requests.PreparedRequest:
        if key:
            request.headers["Authorization"] = f"Bearer {key}"
        return request

    with requests.Session() as session:
        for scheme in ("http://", "https://"):
            session.mount(scheme, _Adapter())
        return session.request(
            method,
            url,
            json=json,
            headers={
                "Accept": "text/event-stream, application/json",
                "Accept-Encoding": "gzip",
                **({"X-Session-Id": conversation} if conversation else {}),
            },
            auth=sign,  # without one, requests would take a key from the user's .netrc
            timeout=timeout,
            stream=True,
            allow_redirects=False,
        )


class EndlessHead(HTTPException):
    """Lines that belong to no body do not end."""


def is_endless(error: BaseException) -> bool:
    """Whether an error was raised because of an EndlessHead."""
    return any(isinstance(each, EndlessHead) for each in _raised_from(error))


def _raised_from(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those from which it was raised."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


class _Stream:
    """What http.client reads from: lines (heads, sizes of chunks, trailers) within limits, and bodies."""

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


class _BoundedConnection(HTTPConnection):
    response_class = _Response


class _BoundedTLSConnection(HTTPSConnection):
    response_class = _Response


class _Pool(HTTPConnectionPool):
    ConnectionCls = _BoundedConnection


class _TLSPool(HTTPSConnectionPool):
    ConnectionCls = _BoundedTLSConnection


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


def iter_body(response: requests.Response) -> Iterator[bytes]:
    """Yield the body as it arrives; requests would wait for the end of a body of known size.

    One layer of gzip or deflate is unpacked, `PIECE_BYTES` at a time: urllib3 would unpack any number of layers, and a
    few kilobytes then become gigabytes. Raises urllib3's DecodeError for what is packed otherwise, or badly.
    """
    packed = _received(response)
    encodings = [name.strip().lower() for name in (response.headers.get("Content-Encoding") or "").split(",")]
    encodings = [name for name in encodings if name not in ("", "identity")]
    if not encodings:
        yield from packed
        return
    if len(encodings) > 1 or encodings[0] not in ("gzip", "x-gzip", "deflate"):
        raise DecodeError(f"a body packed as {', '.join(encodings)[:100]}")
    yield from _unpacked(packed)


def _received(response: requests.Response) -> Iterator[bytes]:
    while piece := response.raw.read1(PIECE_BYTES, decode_content=False):
        yield piece


def _unpacked(pieces: Iterator[bytes]) -> Iterator[bytes]:
    unpacker = zlib.decompressobj(_ZLIB_OR_GZIP)
    try:
        for received in pieces:
            rest = received
            while rest:
                if unpacker.eof:  # gzip allows one member after another
                    unpacker = zlib.decompressobj(_ZLIB_OR_GZIP)
                if piece := unpacker.decompress(rest, PIECE_BYTES):
                    yield piece
                rest = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail
    except zlib.error as error:
        raise DecodeError(str(error)) from error
    if not unpacker.eof:
        raise DecodeError("a packed body without its end")
