"""How requests are received over real sockets: slow, endless, refused and too many senders harm nobody else."""

from __future__ import annotations

import errno
import gzip
import ipaddress
import json
import os
import socket
import ssl
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from running_server import HELLO, RunningServer, served
from scripted_engine import ScriptedEngine
from scripted_server import ANSWER
from single_model import SingleModelRegistry
from waitress.channel import HTTPChannel

from mlx_backend.chat.service import Service
from mlx_backend.server.auth import TrustedProxies
from mlx_backend.server.connection_limits import ConnectionLimits
from mlx_backend.server.wsgi_server import SPARE_THREADS, Server
from mlx_backend.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
BODY = json.dumps({"messages": HELLO}).encode()
WHOLE = CHAT + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Started:
    """A server on the scripted engine with limits of its own, and connections that are closed with it."""

    def __init__(self, stack: ExitStack, server: RunningServer) -> None:
        self._stack = stack
        self.server = server

    def connect(self, *sent: bytes) -> socket.socket:
        connection = self._stack.enter_context(socket.create_connection(self.server.address, timeout=60))
        for each in sent:
            connection.sendall(each)
        return connection


def start(stack: ExitStack, *, settings: dict[str, Any] | None = None, **limits: Any) -> Started:
    engine = stack.enter_context(ScriptedEngine(lambda _: ANSWER))
    chosen = Settings(port=0, max_queue=4, max_concurrent=4, **(settings or {}))
    allowed = ConnectionLimits(**{"max_body_bytes": chosen.max_body_bytes, **limits})
    server = stack.enter_context(served(SingleModelRegistry(Service(engine)), chosen, allowed))
    return Started(stack, server)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def answer(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body of the next response; the connection may go on."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        if not piece:
            raise ConnectionError(f"the connection ended within {data!r}")
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(length - len(body))
    return int(head.split(b" ")[1]), body


def message(connection: socket.socket) -> tuple[int, str]:
    status, body = answer(connection)
    return status, json.loads(body)["error"]["message"]


def test_a_connection_goes_on_after_a_stream(stack: ExitStack) -> None:
    connection = start(stack).connect()
    body = json.dumps({"messages": HELLO, "stream": True}).encode()
    for _ in range(3):
        connection.sendall(CHAT + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        data = b""
        while not data.endswith(b"\r\n0\r\n\r\n"):
            piece = connection.recv(65536)
            assert piece, f"the connection ended after {data!r}"
            data += piece
        head = data.partition(b"\r\n\r\n")[0].lower()
        assert b"transfer-encoding: chunked" in head
        assert b"connection:" not in head
    connection.sendall(HEALTH)
    assert answer(connection)[0] == 200


def test_a_stream_closes_the_connection_of_a_client_that_wants_it_closed(stack: ExitStack) -> None:
    connection = start(stack).connect()
    body = json.dumps({"messages": HELLO, "stream": True}).encode()
    connection.sendall(CHAT + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    data = b""
    while piece := connection.recv(65536):
        data += piece
    assert data.endswith(b"\r\n0\r\n\r\n")


def test_a_client_that_speaks_https_is_told_at_once(stack: ExitStack) -> None:
    started = start(stack)
    with pytest.raises(ssl.SSLError, match=r"(?i)wrong.version.number"):
        ssl.create_default_context().wrap_socket(started.connect(), server_hostname="localhost")
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
    assert message(started.connect(hello)) == (
        400,
        "This address speaks http, not https: write http:// in the URL.",
    )


def test_hundreds_of_unfinished_requests_keep_nobody_else_waiting(stack: ExitStack) -> None:
    started = start(stack)
    for _ in range(160):  # ten times the server's threads
        started.connect(b"POST /v1/chat/completions HT")
        started.connect(CHAT + b'Content-Length: 5000\r\n\r\n{"mess')
    assert started.server.call("/health")[0] == 200
    assert started.server.chat()["choices"][0]["finish_reason"] == "stop"


def test_a_request_that_comes_a_byte_at_a_time_is_answered(stack: ExitStack) -> None:
    connection = start(stack).connect(*(bytes([byte]) for byte in WHOLE))
    assert answer(connection)[0] == 200


@pytest.mark.parametrize(
    ("limit", "sent", "part"),
    [
        ("head_seconds", b"POST /v1/ch", "head"),
        ("stalled_seconds", CHAT + b"Content-Length: 50\r\n\r\n{", "body"),
    ],
)
def test_a_request_that_does_not_go_on_is_a_408(stack: ExitStack, limit: str, sent: bytes, part: str) -> None:
    limits: dict[str, Any] = {limit: 0.1}
    started = start(stack, **limits)
    assert message(started.connect(sent)) == (408, f"The {part} of the request did not arrive in time.")


def test_a_connection_that_says_nothing_is_closed(stack: ExitStack) -> None:
    assert start(stack, idle_seconds=0.1).connect().recv(1) == b""


@pytest.mark.parametrize("expect", [b"", b"Expect: 100-continue\r\n"], ids=["", "asks first"])
@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (b"Content-Length: 1001\r\n", 413),
        (b"Content-Length: x\r\n", 400),
        (b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", 400),
    ],
    ids=["too long", "no length", "two lengths"],
)
def test_what_is_refused_for_its_head_is_refused_before_its_body_is_sent(
    stack: ExitStack, expect: bytes, fields: bytes, status: int
) -> None:
    started = start(stack, settings={"max_body_bytes": 1000, "max_images_bytes": 0})
    connection = started.connect(CHAT + expect + fields + b"\r\n")
    assert answer(connection)[0] == status
    assert connection.recv(1) == b""


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_what_is_ambiguous_or_endless_is_refused_however_it_is_split(stack: ExitStack, size: int) -> None:
    started = start(stack, max_head_bytes=900)
    for sent, status in (
        (b"NONSENSE\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nBad Name: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nName : b\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
        (CHAT + b"Content-Length: -1\r\n\r\n", 400),
        (CHAT + b"Content-Length: 1, 2\r\n\r\n", 400),
        (CHAT + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (CHAT + b"Content-Length: +1\r\n\r\n", 400),
        (CHAT + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (CHAT + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (CHAT + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", 400),
        (CHAT + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n", 400),
        (CHAT + b"Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n", 400),
        (CHAT + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 10_000, 400),
        (CHAT + b"X-Long: " + b"x" * 1000 + b"\r\n\r\n", 431),
        (b"GET /" + b"x" * 1000, 431),
    ):
        connection = started.connect()
        with suppress(ConnectionError):  # it may be refused before all of it was sent
            for at in range(0, len(sent), size):
                connection.sendall(sent[at : at + size])
        answered, text = message(connection)
        assert (answered, "x" * 100 in text) == (status, False), sent[:200]


def test_a_large_body_in_usual_chunks_is_taken(stack: ExitStack) -> None:
    filler = b" " * 64
    body = b"40\r\n%s\r\n" % filler * 3000 + b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    assert answer(start(stack).connect(CHAT + b"Transfer-Encoding: chunked\r\n\r\n" + body))[0] == 200


def test_a_client_that_asks_first_and_has_no_body_is_answered(stack: ExitStack) -> None:
    connection = start(stack).connect(HEALTH[:-2] + b"Expect: 100-continue\r\n\r\n")
    assert answer(connection)[0] == 200


def test_an_error_of_http_in_answer_to_head_has_no_body(stack: ExitStack) -> None:
    connection = start(stack).connect(b"HEAD / HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n")
    data = b""
    while piece := connection.recv(65536):
        data += piece
    assert data.startswith(b"HTTP/1.1 400 ")
    assert data.endswith(b"\r\n\r\n")


def test_a_connection_whose_check_fails_is_closed_and_the_others_go_on(
    stack: ExitStack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = start(stack)
    broken, whole = started.connect(HEALTH), started.connect(HEALTH)
    assert (answer(broken)[0], answer(whole)[0]) == (200, 200)
    address = broken.getsockname()
    channel = next(each for each in started.server.server.active_channels.values() if each.addr == address)
    monkeypatch.setattr(channel, "check", lambda _: 1 / 0)
    assert broken.recv(1) == b""
    assert "ZeroDivisionError" in caplog.text
    whole.sendall(HEALTH)
    assert answer(whole)[0] == 200


class Popped(list[Any]):
    """Requests of which a worker removes the last one as soon as the loop has seen that there is one."""

    def __bool__(self) -> bool:
        had_one = len(self) > 0
        self.clear()
        return had_one


def test_a_request_may_be_answered_while_its_connection_is_checked(stack: ExitStack) -> None:
    started = start(stack)
    connection = started.connect()
    while not (channels := list(started.server.server.active_channels.values())):
        pass
    (channel,) = channels
    channel.requests = Popped([None])
    channel.check(0.0)
    channel.requests = []
    connection.sendall(HEALTH)
    assert answer(connection)[0] == 200


def test_a_connection_that_was_closed_for_another_of_the_same_moment_is_not_read(
    stack: ExitStack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = start(stack)
    server = started.server.server
    connections = started.connect(HEALTH), started.connect(HEALTH)
    assert [answer(each)[0] for each in connections] == [200, 200]
    channels = list(server.active_channels.values())
    receive = HTTPChannel.handle_read

    def handle_read(channel: HTTPChannel) -> None:
        for each in channels:
            if each is not channel:
                each.handle_close()
        receive(channel)

    monkeypatch.setattr(HTTPChannel, "handle_read", handle_read)
    is_held, have_sent = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        have_sent.wait(60)

    server.trigger.pull_trigger(hold)  # in the loop
    assert is_held.wait(60)
    for each in connections:
        each.sendall(HEALTH)
    have_sent.set()
    answers = []
    for each in connections:
        with suppress(ConnectionError):
            answers.append(answer(each)[0])
    assert answers == [200]
    assert "uncaptured" not in caplog.text


def test_a_client_that_asks_first_is_told_to_go_on(stack: ExitStack) -> None:
    connection = start(stack).connect(
        CHAT + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY)
    )
    assert connection.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.sendall(BODY)
    assert answer(connection)[0] == 200


def test_requests_sent_ahead_are_answered_in_their_order(stack: ExitStack) -> None:
    connection = start(stack).connect(HEALTH + WHOLE + HEALTH)
    data = b""
    while data.count(b'"server":"mlx-backend"') < 2:
        data += connection.recv(65536)
    assert data.count(b" 200 OK") == 3
    assert data.index(b'"server"') < data.index(b'"choices"') < data.rindex(b'"server"')


def test_too_many_connections_of_one_address_are_refused_with_a_sentence(stack: ExitStack) -> None:
    started = start(stack, max_connections_of_address=3)
    first, *_ = [started.connect(b"G") for _ in range(3)]
    status, text = message(started.connect())
    assert status == 503
    assert text == "There are too many connections from 127.0.0.1; close some first."
    first.close()
    status = 503
    while status == 503:  # until the server has seen that the first has gone
        with suppress(ConnectionError):
            status, _ = answer(started.connect(HEALTH))


def test_an_idle_connection_makes_room_for_a_new_one(stack: ExitStack) -> None:
    started = start(stack, max_connections=2, max_connections_of_address=9)
    idle, busy = started.connect(), started.connect(b"GET /heal")
    assert answer(started.connect(HEALTH))[0] == 200
    assert idle.recv(1) == b""
    busy.sendall(b"th HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer(busy)[0] == 200


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.1 alone is an address of the loopback here")
def test_addresses_with_many_connections_keep_nobody_else_out(stack: ExitStack) -> None:
    started = start(stack, max_connections=4, max_connections_of_address=3)
    hostile = []
    for address in ("127.0.0.2", "127.0.0.3") * 2:
        connection = stack.enter_context(socket.socket())
        connection.bind((address, 0))
        connection.settimeout(60)
        connection.connect(started.server.address)
        connection.sendall(b"GET /heal")
        hostile.append(connection)
    channels = started.server.server.active_channels
    while len(channels) < len(hostile) or any(each.request is None for each in channels.values()):
        pass
    assert answer(started.connect(HEALTH))[0] == 200
    assert message(hostile[0]) == (503, "There are too many connections to this server; try again later.")
    hostile[1].sendall(b"th HTTP/1.1\r\nHost: localhost\r\n\r\n")  # the others stay
    assert answer(hostile[1])[0] == 200


def test_bodies_that_are_too_much_together_are_refused(stack: ExitStack) -> None:
    started = start(stack, max_held_bytes=100_000)
    head = CHAT + b"Content-Length: 1000000\r\n\r\n"
    waiting = started.connect(head + b"x" * 60_000)
    status, text = message(started.connect(head + b"x" * 60_000))
    assert (status, text) == (503, "Too many large requests are arriving at once; try again later.")
    waiting.close()
    while (status := started.server.call("/v1/chat/completions", {"messages": HELLO})[0]) == 503:
        pass  # until the server has noticed
    assert status == 200


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_compressed_bodies_are_counted_as_what_they_become(stack: ExitStack) -> None:
    started = start(stack, settings={"max_body_bytes": 1 << 20}, max_held_bytes=1 << 20)
    bodies = [gzip.compress(BODY[:-1] + b" " * size + b"}") for size in (300_000, 900_000)]
    head = CHAT + b"Content-Encoding: gzip\r\n"
    allowed, too_much = (head + b"Content-Length: %d\r\n\r\n" % len(body) + body for body in bodies)
    connection = started.connect()
    for body, status in [(allowed, 200), (allowed, 200), (too_much, 503)]:  # each is let go before the next
        connection.sendall(body)
        assert answer(connection)[0] == status


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_body_is_let_go_when_its_answer_is_sent(stack: ExitStack) -> None:
    started = start(stack)
    body = b'"%s"' % (b"x" * 1_000_000)
    request = CHAT + b"Content-Length: %d\r\n\r\n" % len(body) + body
    assert answer(started.connect(request))[0] == 400
    before = resident_bytes()
    for _ in range(200):  # each connection stays open: together they have sent 200 MB
        assert answer(started.connect(request))[0] == 400
    assert len(started.server.server.active_channels) >= 200
    assert resident_bytes() - before < 50 << 20


def test_clients_that_ask_ahead_and_read_no_answer_hold_up_no_worker(
    stack: ExitStack,
) -> None:
    engine = stack.enter_context(ScriptedEngine(lambda _: ANSWER))
    settings = Settings(port=0, max_queue=1, max_concurrent=1)
    server = stack.enter_context(served(SingleModelRegistry(Service(engine)), settings, send_buffer=32_768))
    deaf = []
    for _ in range(2 + SPARE_THREADS):  # as many as there are workers
        connection = stack.enter_context(socket.socket())
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(server.address)
        connection.sendall(HEALTH * 600)
        deaf.append(connection)
    while sum(bool(each.total_outbufs_len) for each in server.server.active_channels.values()) < len(deaf):
        assert server.call("/health")[0] == 200
    assert server.chat()["choices"][0]["finish_reason"] == "stop"
    deaf[0].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    read = b""
    while piece := deaf[0].recv(65536):  # a client that reads gets every answer, in order
        read += piece
    assert read.count(b" 200 OK") == 601


def test_a_client_that_does_not_read_its_answers_is_given_up(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    engine = stack.enter_context(ScriptedEngine(lambda _: ANSWER))
    limits = ConnectionLimits(max_body_bytes=1000, unread_seconds=0.1)
    models = SingleModelRegistry(Service(engine))
    server = stack.enter_context(served(models, Settings(port=0, max_queue=1), limits, send_buffer=4096))
    deaf = stack.enter_context(socket.socket())
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    deaf.connect(server.address)
    deaf.sendall(HEALTH * 300)
    while "reads its answer too slowly" not in caplog.text:
        assert server.call("/health")[0] == 200
    with suppress(ConnectionError):
        while deaf.recv(65536):
            pass


def deaf_client(
    stack: ExitStack, server: RunningServer, sent: bytes, address: str = "127.0.0.1"
) -> socket.socket:
    """Connect from this address, with room for little that is not read."""
    connection = stack.enter_context(socket.socket())
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.bind((address, 0))
    connection.settimeout(60)
    connection.connect(server.address)
    connection.sendall(sent)
    return connection


def wait_until_unread(server: RunningServer, count: int) -> None:
    while sum(each.total_outbufs_len for each in [*server.server.active_channels.values()]) < count:
        pass


PAGE = b"GET /page/highlight.js HTTP/1.1\r\nHost: localhost\r\n\r\n"


def read_all(connection: socket.socket) -> bytes:
    data = b""
    with suppress(ConnectionError):
        while piece := connection.recv(65536):
            data += piece
    return data


@pytest.mark.skipif(sys.platform != "linux", reason="all of 127.0.0.0/8 is this machine on Linux alone")
def test_large_answers_that_a_client_does_not_read_are_bounded_for_it_and_no_other(stack: ExitStack) -> None:
    models = SingleModelRegistry(Service(stack.enter_context(ScriptedEngine(lambda _: ANSWER))))
    limits = ConnectionLimits(max_body_bytes=1000, max_held_bytes=600_000)
    server = stack.enter_context(served(models, Settings(port=0), limits, send_buffer=4096))
    closing = PAGE[:-2] + b"Connection: close\r\n\r\n"
    deaf = [deaf_client(stack, server, closing) for _ in range(2)]  # 258 KB
    wait_until_unread(server, 200_000)
    refused = json.loads(read_all(deaf_client(stack, server, closing)).partition(b"\r\n\r\n")[2])
    assert refused["error"]["message"].startswith(
        "The answer has 1 MB. With those that you have not read yet"
    )
    assert b" 200 OK" in read_all(deaf_client(stack, server, closing, "127.0.0.2"))
    assert b" 200 OK" in read_all(
        deaf_client(stack, server, HEALTH.replace(b"Host", b"Connection: close\r\nHost"))
    )
    assert len(read_all(deaf[0])) > 129_000
    assert b" 200 OK" in read_all(deaf_client(stack, server, closing))


def test_a_stream_of_which_too_much_is_not_read_is_closed(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    engine = stack.enter_context(ScriptedEngine(lambda _: "<|channel|>final<|message|>" + "word " * 5000))
    limits = ConnectionLimits(max_body_bytes=1000, max_held_bytes=400_000)
    server = stack.enter_context(
        served(SingleModelRegistry(Service(engine)), Settings(port=0), limits, send_buffer=4096)
    )
    body = json.dumps({"messages": HELLO, "stream": True}).encode()
    deaf = deaf_client(stack, server, CHAT + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    while "answers is not read: a connection is closed" not in caplog.text:
        assert server.call("/health")[0] == 200
    assert b"[DONE]" not in read_all(deaf)


@pytest.mark.parametrize(
    ("one", "other", "is_one_client"),
    [
        ("2001:db8::1", "2001:db8::2", True),  # one network, and so one owner
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("192.0.2.1", "::ffff:192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("10.0.0.1", "10.0.0.1", False),  # a proxy, which has many clients
    ],
)
def test_connections_are_counted_by_whose_they_are(
    stack: ExitStack, one: str, other: str, is_one_client: bool
) -> None:
    proxies = TrustedProxies((ipaddress.ip_network("10.0.0.0/8"),))
    network_of = start(stack, trusted_proxies=proxies).server.server.network_of
    assert (network_of(one) == network_of(other) != "") is is_one_client


def test_a_system_without_files_makes_clients_wait_and_the_log_says_it_once(
    stack: ExitStack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_backend.server.wsgi_server._RETRY_ACCEPT_SECONDS", 0.01)
    started = start(stack)
    relief, attempts = threading.Event(), []
    accept = Server.accept

    def exhausted(server: Server) -> Any:
        attempts.append(server)
        if not relief.is_set():
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(server)

    monkeypatch.setattr(Server, "accept", exhausted)
    connection = started.connect(HEALTH)
    while len(attempts) < 5:
        pass
    relief.set()
    assert answer(connection)[0] == 200
    assert [each.message for each in caplog.records] == [
        "New connections have to wait: the system refuses them (Too many open files)."
    ]
