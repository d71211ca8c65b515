"""Bytes of a connection and of a server's answer: however they are split, answered and read in order."""

from __future__ import annotations

import json
import re
import socket
import threading
from contextlib import suppress
from itertools import cycle, pairwise
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from werkzeug import Request
from werkzeug.test import EnvironBuilder
from wsproto import ConnectionType, WSConnection
from wsproto.events import BytesMessage, CloseConnection, Ping, TextMessage
from wsproto.events import Request as WebSocketRequest
from wsproto.utilities import LocalProtocolError

from dify_mlx_provider.upstream.sse import DONE, MalformedBody, iter_events, parse_body
from mlx_backend.server.connection_limits import ConnectionLimits
from mlx_backend.server.websocket import WebSocket
from mlx_backend.server.wsgi_server import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

LINES = [
    *(
        b"POST / HTTP/1.1\r\n",
        b"GET /v1 HTTP/1.0\r\n",
        b"HEAD / HTTP/1.1\r\n",
        b"Host: h\r\n",
        b"\r\n",
        b"\n",
        b"\r",
    ),
    *(b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Content-Length: 5, 5\r\n", b"Content-Length"),
    *(b"Content-Length: 99999\r\n", b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip\r\n"),
    *(
        b"5\r\nabcde\r\n",
        b"0\r\n\r\n",
        b"ffffffffffffffff\r\n",
        b"5;x=y\r\n",
        b"abcde",
        b"X: \x00\r\n",
        b" : \r\n",
    ),
    *(
        b"Expect: 100-continue\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01",
        b"Connection: close\r\n",
    ),
]
SENT = st.builds(
    lambda first, rest: first + b"".join(rest),
    st.sampled_from([b"", b"POST / HTTP/1.1\r\nHost: h\r\n"]),
    st.lists(st.one_of(st.sampled_from(LINES), st.binary(max_size=6)), max_size=12),
)
REFUSED = {400, 408, 413, 431, 501, 505}


class Echo:
    """An application that answers with the length of the body."""

    def __call__(self, environ: Any, start_response: Any) -> list[bytes]:
        body = b"%d" % len(environ["wsgi.input"].read())
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else body]

    def error_body(self, _status: int, message: str) -> bytes:
        return message.encode()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    limits = ConnectionLimits(
        1000, 900, idle_seconds=0.05, head_seconds=0.05, stalled_seconds=0.05, discard_seconds=0.05
    )
    server = Server("127.0.0.1", 0, Echo(), requests=1, limits=limits)
    server.check_seconds = 0.01
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield server
    server.stop()
    thread.join()


@examples(5)
@given(data=SENT, cuts=st.lists(st.integers(0, 200), max_size=4))
def test_whatever_is_sent_has_an_end_and_a_refusal_is_the_last_answer(
    server: Server, data: bytes, cuts: list[int]
) -> None:
    places = sorted(min(cut, len(data)) for cut in cuts)
    answered = b""
    address = server.effective_host, server.effective_port
    with socket.create_connection(address, timeout=60) as connection, suppress(ConnectionError):
        for start, end in pairwise([0, *places, len(data)]):
            connection.sendall(data[start:end])
        while piece := connection.recv(65536):
            answered += piece
    statuses = [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d+)", answered)]
    final = [status for status in statuses if status != 100]
    assert set(final[:-1]) <= {200}
    assert set(final[-1:]) <= {200, *REFUSED}


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=6)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


def events(pieces: list[bytes]) -> list[Any]:
    found: list[Any] = []
    try:
        found.extend(iter_events(pieces))
    except MalformedBody:
        found.append("malformed")
    return found


@examples(3)
@given(
    values=st.lists(JSON, max_size=5),
    end=st.sampled_from(["\n\n", "\r\n\r\n", "\r\r", "\n: a comment\n\n", "\nevent: x\nid: 5\n\n"]),
    begin=st.sampled_from(["data:", "data: ", ": hello\n\ndata: ", "\ufeffdata: "]),
    cuts=st.lists(st.integers(0, 500), max_size=6),
)
def test_events_that_are_well_formed_are_read_whatever_ends_their_lines(
    values: list[Any], end: str, begin: str, cuts: list[int]
) -> None:
    texts = [json.dumps(value, ensure_ascii=at % 2 == 0) for at, value in enumerate(values)]
    body = "".join(
        begin.lstrip("\ufeff" if at else "") + text + end for at, text in enumerate([*texts, "[DONE]"])
    )
    data = body.encode("utf-8", "replace")
    places = sorted(min(cut, len(data)) for cut in cuts)
    parts = [data[start:stop] for start, stop in pairwise([0, *places, len(data)])]
    expected = [json.loads(text.encode("utf-8", "replace")) for text in texts]
    assert events([data]) == events(parts) == [*expected, DONE]


@examples(5)
@given(
    lines=st.lists(
        st.one_of(
            st.binary(max_size=8),
            st.sampled_from(
                [
                    b"data: ",
                    b"data: {",
                    b"}",
                    b"\n",
                    b"\r",
                    b"[DONE]",
                    b"data: [DONE]\n\n",
                    b'{"a":',
                    b"1}",
                    b":\n",
                ]
            ),
        ),
        max_size=12,
    )
)
def test_any_bytes_are_events_or_malformed_and_the_same_a_byte_at_a_time(lines: list[bytes]) -> None:
    data = b"".join(lines)
    assert events([data]) == events([bytes([byte]) for byte in data])
    with suppress(MalformedBody):
        parse_body([data])


FRAMES = st.one_of(
    st.binary(max_size=12),
    st.builds(TextMessage, st.text(max_size=9), message_finished=st.booleans()),
    st.builds(BytesMessage, st.binary(max_size=9), message_finished=st.booleans()),
    st.builds(Ping, st.binary(max_size=9)),
    st.builds(CloseConnection, st.sampled_from([1000, 1005, 1011]), st.none()),
)


@examples(4)
@given(st.lists(FRAMES, max_size=8), st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_frames_of_a_websocket_are_whole_requests_or_its_end(sent: list[Any], sizes: list[int]) -> None:
    """However they are split; and what is no frame ends it."""
    client = WSConnection(ConnectionType.CLIENT)
    handshake = client.send(WebSocketRequest(host="h", target="/v1/responses"))
    head = dict(line.split(": ", 1) for line in handshake.decode().split("\r\n")[1:-2])
    environ = EnvironBuilder("/v1/responses", headers=list(head.items())).get_environ()
    websocket = WebSocket(Request({**environ, "REQUEST_URI": "/v1/responses"}), MagicMock())
    client.receive_data(websocket.accepted)
    data = bytearray()
    for event in sent:
        with suppress(LocalProtocolError, ValueError, TypeError):  # what a client cannot send
            data += event if isinstance(event, bytes) else client.send(event)
    requests = bytearray()
    at = 0
    for size in cycle(sizes):
        if at >= len(data) or websocket.is_closed:
            break
        more, _ = websocket.receive(bytes(data[at : at + size]), 0)
        requests += more
        at += size
    for request in bytes(requests).split(b"POST /v1/responses HTTP/1.1\r\n")[1:-1]:
        assert request.endswith(b"0\r\n\r\n")
