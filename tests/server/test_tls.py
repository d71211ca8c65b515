"""HTTPS as clients use it, and what a client does that speaks TLS badly, slowly or not at all.

The certificates in certificates/ are of a test's own authority, for localhost and 127.0.0.1, for a hundred years.
"""

from __future__ import annotations

import itertools
import json
import select
import shutil
import socket
import ssl
import threading
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from openai import DefaultHttpxClient, OpenAI
from running_server import HELLO, RunningServer, served
from scripted_engine import ScriptedEngine
from scripted_server import ANSWER
from single_model import SingleModelRegistry

from mlx_backend.chat.service import Service
from mlx_backend.registry.errors import ConfigurationError
from mlx_backend.server.port_check import port_in_use
from mlx_backend.server.receive_limits import ReceiveLimits
from mlx_backend.server.tls import TlsContext, TlsSocket, tls_of
from mlx_backend.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

FILES = Path(__file__).parent / "certificates"
CERTIFICATE, KEY = FILES / "server.pem", FILES / "server.key"
TRUST = ssl.create_default_context(cafile=str(FILES / "ca.pem"))
BODY = json.dumps({"messages": HELLO}).encode()
CHAT = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
)
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextmanager
def https(engine: ScriptedEngine, tls: TlsContext | None = None, **limits: Any) -> Iterator[RunningServer]:
    settings = Settings(port=0, max_queue=4, max_concurrent=4, keepalive_seconds=0.05)
    allowed = ReceiveLimits(**{"max_body_bytes": settings.max_body_bytes, **limits})
    with (
        engine,
        served(
            SingleModelRegistry(Service(engine)), settings, allowed, tls or TlsContext(CERTIFICATE, KEY)
        ) as server,
    ):
        yield server


def connected(stack: ExitStack, server: RunningServer) -> ssl.SSLSocket:
    plain = socket.create_connection(server.address, timeout=60)
    return stack.enter_context(TRUST.wrap_socket(plain, server_hostname="localhost"))


def answer(connection: Any) -> tuple[int, bytes]:
    """One response, by its length."""
    with connection.makefile("rb") as read:
        status = int(read.readline().split()[1])
        length = 0
        while (line := read.readline()) not in (b"\r\n", b""):
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        return status, read.read(length)


def test_a_second_server_on_its_port_names_it_with_its_model() -> None:
    with https(ScriptedEngine(lambda _: ANSWER, model_id="the-demo")) as server:
        said = port_in_use("0.0.0.0", server.address[1])
    assert f"an mlx-backend with the-demo answers at {server.url} already" in (said or "")


def test_the_official_client_chats_whole_and_streamed() -> None:
    with https(ScriptedEngine(lambda _: ANSWER)) as server, DefaultHttpxClient(verify=TRUST) as http:
        assert server.url.startswith("https://127.0.0.1:")
        client = OpenAI(base_url=f"{server.url}/v1", api_key="-", http_client=http)
        messages: Any = HELLO
        whole = client.chat.completions.create(model="default", messages=messages)
        assert whole.choices[0].message.content == "The capital is Paris."
        stream: Any = client.chat.completions.create(model="default", messages=messages, stream=True)
        parts = [chunk.choices[0].delta.content or "" for chunk in stream]
        assert "".join(parts) == "The capital is Paris."


def test_a_client_that_does_not_trust_the_certificate_is_the_one_to_say_so() -> None:
    with https(ScriptedEngine(lambda _: ANSWER)) as server, httpx.Client() as http:
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            http.get(f"{server.url}/health")
        assert httpx.get(f"{server.url}/health", verify=TRUST).status_code == 200


@pytest.mark.parametrize("length", [0, 4_000_000])
def test_who_speaks_plain_http_is_told_to_write_https(length: int) -> None:
    with https(ScriptedEngine(lambda _: ANSWER)) as server, socket.create_connection(server.address) as plain:
        plain.sendall(b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % length + bytes(length))
        status, body = answer(plain)
        assert status == 400
        assert json.loads(body)["error"]["message"] == (
            "This server speaks HTTPS: begin its address with https://."
        )


def test_large_bodies_and_replies_cross_many_records() -> None:
    text = "word " * 100_000
    with https(ScriptedEngine(lambda _: ANSWER)) as server, httpx.Client(verify=TRUST, timeout=60) as http:
        answered = http.post(f"{server.url}/tokenize", json={"prompt": text, "return_token_strs": True})
        assert answered.status_code == 200
        assert answered.json()["count"] > 100_000


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_records_that_arrive_in_pieces_of_any_size_are_put_together(size: int) -> None:
    with https(ScriptedEngine(lambda _: ANSWER)) as server, ExitStack() as stack:
        raw = stack.enter_context(socket.create_connection(server.address, timeout=60))
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = TRUST.wrap_bio(incoming, outgoing, server_hostname="localhost")

        def flush() -> None:
            data = outgoing.read()
            for at in range(0, len(data), size):
                raw.sendall(data[at : at + size])

        def until_done(step: Any) -> Any:
            while True:
                try:
                    done = step()
                except ssl.SSLWantReadError:
                    flush()
                    incoming.write(raw.recv(65536))
                else:
                    flush()
                    return done

        until_done(client.do_handshake)
        client.write(CHAT)
        assert until_done(lambda: client.read(65536)).startswith(b"HTTP/1.1 200")


def test_requests_sent_ahead_are_answered_in_their_order() -> None:
    with https(ScriptedEngine(lambda _: ANSWER)) as server, ExitStack() as stack:
        connection = connected(stack, server)
        connection.sendall(HEALTH + CHAT)
        connection.sendall(HEALTH)  # in a record of its own, while the others are answered
        data = b""
        while data.count(b'"server":"mlx-backend"') < 2:
            data += connection.recv(65536)
        assert data.count(b" 200 OK") == 3
        assert data.index(b'"server"') < data.index(b'"choices"') < data.rindex(b'"server"')


@pytest.mark.parametrize("polite", [True, False])
def test_a_client_that_leaves_is_noticed_at_once(polite: bool) -> None:
    engine = ScriptedEngine(lambda _: ANSWER, gated=True)
    with https(engine) as server:
        plain = socket.create_connection(server.address, timeout=60)
        connection = TRUST.wrap_socket(plain, server_hostname="localhost")
        connection.sendall(CHAT)
        while not engine.status().running:
            pass
        if polite:
            connection.settimeout(0.0)
            with suppress(ssl.SSLError, OSError):
                connection.unwrap()  # says goodbye
        connection.close()
        engine.advance(1)
        while engine.status().running:  # the engine is free, although nothing can be written yet
            engine.advance(1)


def test_a_slow_handshake_is_ended_and_keeps_nobody_waiting() -> None:
    with (
        https(ScriptedEngine(lambda _: ANSWER), head_seconds=0.2, idle_seconds=60) as server,
        ExitStack() as stack,
    ):
        hello = ssl.MemoryBIO()
        client = TRUST.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost")
        with suppress(ssl.SSLWantReadError):
            client.do_handshake()
        first = hello.read()
        slow = [stack.enter_context(socket.create_connection(server.address, timeout=60)) for _ in range(40)]
        for each in slow:
            each.sendall(first[:20])
        fast = connected(stack, server)
        fast.sendall(HEALTH)
        assert answer(fast)[0] == 200
        for each in slow:
            with suppress(ConnectionResetError):
                assert each.recv(1) == b""


def test_garbage_in_place_of_a_handshake_ends_that_connection_alone() -> None:
    with https(ScriptedEngine(lambda _: ANSWER)) as server, ExitStack() as stack:
        bad = stack.enter_context(socket.create_connection(server.address, timeout=60))
        bad.sendall(b"\x16\x03\x01\x00\x05hello" + bytes(100))
        with suppress(ConnectionResetError):
            while bad.recv(4096):
                pass
        good = connected(stack, server)
        good.sendall(CHAT)
        assert answer(good)[0] == 200


def test_a_worker_waits_for_a_slow_reader_and_no_longer_than_it_may() -> None:
    here, there = socket.socketpair()
    for each in (here, there):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server = TlsContext(CERTIFICATE, KEY).wrap(here)
    received: list[bytes] = []

    def handshake_and_read() -> None:
        with TRUST.wrap_socket(there, server_hostname="localhost") as client:
            while piece := client.recv(65536):
                received.append(piece)

    thread = threading.Thread(target=handshake_and_read)
    thread.start()
    while server.is_handshaking:
        with suppress(BlockingIOError):
            server.recv(1)
    server.settimeout(60)
    payload, sent = bytes(range(256)) * 8000, 0
    while sent < len(payload):
        sent += server.send(payload[sent:])
    server.shutdown(socket.SHUT_WR)
    thread.join()
    assert b"".join(received) == payload
    server.close()

    here, there = socket.socketpair()
    with there:
        stuck = TlsContext(CERTIFICATE, KEY).wrap(here)
        with suppress(ssl.SSLError, BlockingIOError):
            stuck.recv(1)
        stuck.settimeout(0.01)
        stuck._unsent = bytes(10_000_000)  # nobody reads
        with pytest.raises(TimeoutError):
            stuck._flush(wait=True)
        stuck._unsent = b""
        stuck.close()


def test_a_reader_that_takes_a_little_now_and_then_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each wait is short; all of them together are not."""
    clock = itertools.count(step=1.5)
    here, there = socket.socketpair()

    class Reader:
        """Takes something whenever it is waited for."""

        def register(self, *_: Any) -> None:
            pass

        def poll(self, _milliseconds: float) -> bool:
            return bool(there.recv(65536))

    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server = TlsContext(CERTIFICATE, KEY).wrap(here)
    monkeypatch.setattr("mlx_backend.server.tls.time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr("mlx_backend.server.tls.select", SimpleNamespace(poll=Reader, POLLOUT=select.POLLOUT))
    with there:
        server.settimeout(4)
        server._unsent = bytes(10_000_000)
        with pytest.raises(TimeoutError):
            server._flush(wait=True)
        assert 0 < len(server._unsent) < 10_000_000
        server._unsent = b""
        server.close()


def test_a_certificate_is_read_again_for_new_connections_and_a_broken_one_keeps_the_old(
    tmp_path: Path,
) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    shutil.copy(CERTIFICATE, certificate)
    shutil.copy(KEY, key)
    tls = TlsContext(certificate, key)
    with https(ScriptedEngine(lambda _: ANSWER), tls) as server, ExitStack() as stack:

        def certificate_of(connection: ssl.SSLSocket) -> bytes:
            return ssl.DER_cert_to_PEM_cert(connection.getpeercert(binary_form=True) or b"").encode()

        old = connected(stack, server)
        shutil.copy(FILES / "other.pem", certificate)
        with pytest.raises(ConfigurationError, match="they do not belong together"):
            tls.reload()
        assert certificate_of(connected(stack, server)) == CERTIFICATE.read_bytes()
        shutil.copy(FILES / "other.key", key)
        tls.reload()
        assert certificate_of(connected(stack, server)) == (FILES / "other.pem").read_bytes()
        old.sendall(HEALTH)
        assert answer(old)[0] == 200


def test_certificate_and_key_may_be_one_file(tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes(CERTIFICATE.read_bytes() + KEY.read_bytes())
    assert tls_of(Settings(tls_cert=both)) is not None
    assert tls_of(Settings()) is None


@pytest.mark.parametrize(
    ("certificate", "key", "says"),
    [
        (FILES / "none.pem", KEY, "There is no file '.*none.pem'"),
        (CERTIFICATE, FILES / "none.key", "There is no file '.*none.key'"),
        (FILES, KEY, "certificates cannot be read: Is a directory"),
        (Path("x" * 300), KEY, "x cannot be read: File name too long"),  # as a folder that nobody may search
        (CERTIFICATE, FILES / "other.key", "they do not belong together"),
        (CERTIFICATE, None, "a certificate and its key in PEM are needed"),
        (CERTIFICATE, FILES / "encrypted.key", r"encrypted.key is encrypted; decrypt it with `openssl pkey`"),
        (None, KEY, "--tls-key needs the certificate that belongs to it: --tls-cert"),
    ],
)
def test_files_that_cannot_be_used_are_one_sentence(
    certificate: Path | None, key: Path | None, says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        tls_of(Settings(tls_cert=certificate, tls_key=key))


@pytest.mark.parametrize("size", [1, 3, 65536])
def test_a_peek_takes_nothing_and_hides_nothing(size: int) -> None:
    here, there = socket.socketpair()
    server = TlsContext(CERTIFICATE, KEY).wrap(here)
    assert isinstance(server, TlsSocket)
    thread = threading.Thread(target=_say_hello, args=(there,))
    thread.start()
    peeked = b""
    while not peeked:
        with suppress(BlockingIOError):
            peeked = server.recv(1, socket.MSG_PEEK)
    assert peeked == b"h"
    read = server.recv(size)  # no selector says that there is more, so all of it comes
    assert read == b"hello"[:size]
    assert size > 5 or server.recv(65536) == b"hello"[size:]
    server.close()
    thread.join()


def _say_hello(there: socket.socket) -> None:
    with TRUST.wrap_socket(there, server_hostname="localhost") as client:
        client.sendall(b"hello")
        with suppress(OSError):
            client.recv(1)
