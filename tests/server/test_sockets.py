"""The whole server over real sockets: disconnects, queues, keepalives and malformed requests."""

from __future__ import annotations

import http.client
import io
import json
import re
import socket
import threading
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest
from running_server import HELLO, running
from scripted_engine import ScriptedEngine, Transcript
from waitress.channel import HTTPChannel

from mlx_backend import __version__
from mlx_backend.errors import EngineError
from mlx_backend.server.wsgi_server import _Channel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mlx_backend.engine.base import EngineItem, GenerationRequest, GenerationTimes, Queued
    from mlx_backend.engine.jobs import Generation

LONG = "<|channel|>final<|message|>" + "word " * 2000 + "<|return|>"
USER_BODY = {"messages": HELLO}
ANSWER = "<|channel|>final<|message|>Paris.<|return|>"


def read_until(connection: socket.socket, mark: bytes, data: bytes = b"") -> bytes:
    """Receive until the mark is in the data, which may hold some already."""
    while mark not in data:
        piece = connection.recv(4096)
        assert piece, f"the connection ended before {mark!r}: {data!r}"
        data += piece
    return data


class TranscriptQueue:
    """Transcripts in order; `wait` until the engine has started the next one."""

    def __init__(self, *scripts: str | Transcript) -> None:
        self._scripts = iter(scripts)
        self._begun = threading.Semaphore(0)

    def __call__(self, _prompt: str) -> str | Transcript:
        self._begun.release()
        return next(self._scripts)

    def wait(self) -> None:
        assert self._begun.acquire(timeout=60)


def close_quietly(connection: socket.socket) -> None:
    connection.close()


def close_with_a_reset(connection: socket.socket) -> None:
    linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    connection.close()


@pytest.mark.parametrize("leave", [close_quietly, close_with_a_reset])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("prefill", [0, 1000], ids=["decoding", "reading the prompt"])
def test_a_client_that_disconnects_frees_the_engine(
    leave: Callable[[socket.socket], None], stream: bool, prefill: int
) -> None:
    scripts = TranscriptQueue(Transcript(text=LONG, prefill=prefill), ANSWER)
    with ScriptedEngine(scripts, gated=True, max_concurrent=1) as engine, running(engine) as server:
        connection = server.send({"messages": HELLO, "stream": stream})
        scripts.wait()
        engine.advance(3)
        leave(connection)
        assert engine.requests[0].cancelled.wait(60)
        engine.advance(100)
        assert server.chat()["choices"][0]["message"]["content"] == "Paris."


# -- clients that only send no more ---------------------------------------------------------------------------


class Received:
    """What was received, as http.client takes it."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def response_in(data: bytes) -> tuple[int, str]:
    response = http.client.HTTPResponse(Received(data))  # type: ignore[arg-type]
    response.begin()
    return response.status, response.read().decode()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("prefill", [0, 1000], ids=["decoding", "reading the prompt"])
def test_a_client_that_sends_no_more_gets_its_whole_answer(stream: bool, prefill: int) -> None:
    script = Transcript(text=ANSWER, prefill=prefill)
    with ScriptedEngine([script], gated=True) as engine, running(engine) as server:
        connection = server.send({"messages": HELLO, "stream": stream})
        engine.advance(3)
        connection.shutdown(socket.SHUT_WR)
        # What it gets at once is what it would get in any case: a letter of the head, or a zero before a length.
        data = read_until(connection, b"\n\n\r\n0") if stream else connection.recv(2)
        engine.advance(2000)
        while piece := connection.recv(65536):
            data += piece
        status, body = response_in(data)
        connection.close()
    assert status == 200
    if stream:
        deltas = [json.loads(each.removeprefix("data: ")) for each in body.split("\n\n")[:-2]]
        assert "".join(each["choices"][0]["delta"].get("content", "") for each in deltas) == "Paris."
        assert body.endswith("data: [DONE]\n\n")
    else:
        assert json.loads(body)["choices"][0]["message"]["content"] == "Paris."


@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", [200]),
        (b"GET /health HTTP/1.0\r\n\r\n", [200]),
        (b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n", [404]),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3, [200] * 3),
        (b"GET /health HTTP/2.0\r\nHost: localhost\r\n\r\n", [505]),
        (b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}", [400]),
    ],
)
def test_so_does_one_that_is_answered_at_once(sent: bytes, statuses: list[int]) -> None:
    with ScriptedEngine([]) as engine, running(engine) as server:
        for _ in range(5):
            with socket.create_connection(server.address, timeout=60) as connection:
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                data = b""
                while piece := connection.recv(65536):
                    data += piece
            assert [int(each[:3]) for each in re.split(rb"HTTP/1\.[01] ", data)[1:]] == statuses
            assert data.startswith(b"HTTP/1.")


def test_so_does_one_whose_earlier_answer_is_still_being_put_away(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, is_away = threading.Event(), threading.Event()
    answer, put_away = HTTPChannel.service, _Channel.service

    def answer_slowly(channel: HTTPChannel) -> None:
        is_first = len(channel.requests) == 2
        answer(channel)
        if is_first:
            assert streams.wait(60)

    def note(channel: _Channel) -> None:
        put_away(channel)
        is_away.set()

    monkeypatch.setattr(HTTPChannel, "service", answer_slowly)
    monkeypatch.setattr(_Channel, "service", note)
    body = json.dumps({"messages": HELLO, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with (
        ScriptedEngine([ANSWER], gated=True) as engine,
        running(engine) as server,
        socket.create_connection(server.address, timeout=60) as connection,
    ):
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + head.encode() + body)
        connection.shutdown(socket.SHUT_WR)
        read_until(connection, b"\n\n\r\n0")
        streams.set()
        assert is_away.wait(60)
        assert connection.recv(1) == b"0"


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_one_that_leaves_later_frees_the_engine(stream: bool) -> None:
    scripts = TranscriptQueue(LONG)
    with ScriptedEngine(scripts, gated=True) as engine, running(engine) as server:
        connection = server.send({"messages": HELLO, "stream": stream})
        scripts.wait()
        connection.shutdown(socket.SHUT_WR)
        read_until(connection, b"\n\n\r\n0" if stream else b"H")
        connection.close()
        assert engine.requests[0].cancelled.wait(60)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_one_that_leaves_behind_a_proxy_that_passes_ends_on_frees_it_too(stream: bool) -> None:
    scripts = TranscriptQueue(LONG)
    with (
        ScriptedEngine(scripts, gated=True) as engine,
        running(engine) as server,
        socket.create_server(("127.0.0.1", 0)) as proxy,
    ):
        client = socket.create_connection(proxy.getsockname(), timeout=60)
        near, _ = proxy.accept()
        far = server.send({"messages": HELLO, "stream": stream})
        scripts.wait()

        def pass_on(source: socket.socket, target: socket.socket) -> None:
            with suppress(OSError):
                while piece := source.recv(65536):
                    target.sendall(piece)
                target.shutdown(socket.SHUT_WR)
                return
            for each in (source, target):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

        threads = [threading.Thread(target=pass_on, args=ends) for ends in ((near, far), (far, near))]
        for thread in threads:
            thread.start()
        client.close()
        assert engine.requests[0].cancelled.wait(60)
        for thread in threads:
            thread.join()
        near.close()
        far.close()


class WatchedGeneration:
    """A generation whose close can be waited for."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self.closed = threading.Event()

    def __iter__(self) -> Iterator[EngineItem]:
        return iter(self._generation)

    def notify(self, on_item: Callable[[], None]) -> None:
        self._generation.notify(on_item)

    def next(self, timeout: float | None = None) -> EngineItem | None:
        return self._generation.next(timeout)

    def times(self) -> GenerationTimes:
        return self._generation.times()

    def queued(self) -> Queued | None:
        return self._generation.queued()

    def close(self) -> None:
        self._generation.close()
        self.closed.set()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_queued_request_whose_client_disconnects_is_never_started(stream: bool) -> None:
    submitted: SimpleQueue[WatchedGeneration] = SimpleQueue()

    class Engine(ScriptedEngine):
        def generate(self, request: GenerationRequest) -> Generation:
            generation = WatchedGeneration(super().generate(request))
            submitted.put(generation)
            return generation  # type: ignore[return-value]  # it does what a generation does

    scripts = TranscriptQueue(LONG, ANSWER)
    with Engine(scripts, gated=True, max_concurrent=1) as engine, running(engine) as server:
        first = server.send({"messages": HELLO, "stream": True})
        submitted.get(timeout=60)
        scripts.wait()
        waiting = server.send({"messages": HELLO, "stream": stream})
        second = submitted.get(timeout=60)
        waiting.close()
        assert second.closed.wait(60)
        first.close()
        assert engine.requests[0].cancelled.wait(60)
        engine.advance(100)
        server.chat()
        assert len(engine.requests) == 2


def test_a_full_queue_is_a_503_with_retry_after() -> None:
    with (
        ScriptedEngine(lambda _: LONG, gated=True, max_concurrent=1, max_waiting=1) as engine,
        running(engine, max_concurrent=1, max_queue=1) as server,
    ):
        connections = [server.send({"messages": HELLO, "stream": True}) for _ in range(2)]
        for connection in connections:
            read_until(connection, b'"role"')
        status, body = server.call("/v1/chat/completions", {"messages": HELLO})
        assert status == 503
        assert body["error"]["code"] == "queue_full"
        assert f"try again in {body['error']['retry_after']} s." in body["error"]["message"]
        # Full or not, these are answered.
        assert server.call("/health")[0] == 200
        assert server.call("/v1/models")[0] == 200
        for connection in connections:
            connection.close()


def test_a_stream_begins_before_its_first_token() -> None:
    with ScriptedEngine([ANSWER], gated=True) as engine, running(engine) as server:
        connection = server.send({"messages": HELLO, "stream": True})
        head = read_until(connection, b'"role"')
        assert b"text/event-stream" in head
        engine.advance(100)
        assert b'{"content":"Par"}' in read_until(connection, b"[DONE]")
        connection.close()


@pytest.mark.parametrize("prefill", [0, 1000], ids=["queued", "reading the prompt"])
def test_silence_is_filled_with_keepalives(prefill: int) -> None:
    script = Transcript(text=ANSWER, prefill=prefill)
    with (
        ScriptedEngine([script], gated=True) as engine,
        running(engine, keepalive_seconds=0.01) as server,
    ):
        connection = server.send({"messages": HELLO, "stream": True})
        read_until(connection, b": keepalive")
        engine.advance(2000)
        assert b'{"content":"Par"}' in read_until(connection, b"[DONE]")
        connection.close()


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/chat/completions", b": keepalive queued 2\n\n"),
        ("/v1/messages", b'data: {"type":"ping","queue_position":2}'),
        ("/v1/responses", b'"queue_position":2'),
        ("/api/chat", b'"queue_position":2'),
    ],
)
def test_who_waits_is_told_which_place_in_the_queue_it_has(path: str, told: bytes) -> None:
    with (
        ScriptedEngine([LONG] * 3, gated=True, max_concurrent=1) as engine,
        running(engine, keepalive_seconds=0.01) as server,
        ExitStack() as stack,
    ):
        engine.advance(4)
        bodies: list[tuple[str, dict[str, Any]]] = [("/v1/chat/completions", {"messages": HELLO})] * 2
        bodies.append((path, {"messages": HELLO, "input": "Hello", "max_tokens": 9}))
        for (where, body), first in zip(bodies, (b'"role"', b'"role"', told), strict=True):
            connection = server.send({**body, "stream": True}, path=where)
            stack.callback(connection.close)
            read_until(connection, first)


def test_64_clients_at_once_each_get_their_own_answer() -> None:
    def echo(prompt: str) -> str:
        word = prompt.rpartition("number ")[2].partition("<")[0]
        return f"<|channel|>final<|message|>You are number {word}<|return|>"

    with ScriptedEngine(echo) as engine, running(engine) as server, ThreadPoolExecutor(64) as clients:

        def answer_to(number: int) -> str:
            message = [{"role": "user", "content": f"number {number}"}]
            if number % 2:
                content: str = server.chat(message)["choices"][0]["message"]["content"]
                return content
            deltas = [chunk["choices"][0]["delta"] for chunk in server.chunks(message)]
            return "".join(delta.get("content", "") for delta in deltas)

        assert list(clients.map(answer_to, range(64))) == [f"You are number {n}" for n in range(64)]


def test_a_big_body_is_refused_and_the_refusal_arrives() -> None:
    with ScriptedEngine([]) as engine, running(engine, max_body_bytes=1 << 20, max_images_bytes=0) as server:
        status, body = server.call("/v1/chat/completions", b" " * (10 << 20))
        assert status == 413
        assert "larger than 1 MB" in body["error"]["message"]


@pytest.mark.parametrize("slash", [b"/", rb"\/"], ids=["as it is", "escaped"])
def test_images_have_a_limit_of_their_own(slash: bytes) -> None:
    def body(image: int, text: int = 0) -> bytes:
        url = b'"data:image%spng;base64,%s"' % (slash, b"A" * image)
        message = b'{"role": "user", "content": [{"type": "image_url", "image_url": %s}]}' % url
        return b'{"messages": [%s], "user": "%s"}' % (message, b"x" * text)

    with (
        ScriptedEngine([]) as engine,
        running(engine, max_body_bytes=100_000, max_images_bytes=3 << 20) as server,
    ):
        for sent, status, says in (
            (body(2 << 20), 400, "This model cannot see images"),
            (body(3 << 20), 413, "its images take 3.1 MB, and this server's limit is 3 MB (--max-images-mb)"),
            (body(2 << 20, 100_000), 413, "larger than 100000 bytes without its images"),
            (body(0, 100_000), 413, "larger than 100000 bytes without its images"),
        ):
            answered, answer = server.call("/v1/chat/completions", sent)
            assert (answered, says in answer["error"]["message"]) == (status, True), answer


IMAGE = "data:image/png;base64," + "A" * 150_000
BARE = "iVBORw0KGgo" + "A" * 150_000
CHAT_PART = {"type": "image_url", "image_url": {"url": IMAGE}}
INPUT_PART = {"type": "input_image", "image_url": IMAGE}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BARE}}


def of_user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def of_tool(content: Any) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return [
        of_user("Hi"),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": content},
    ]


def result_item(output: Any) -> list[dict[str, Any]]:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    return [call, {"type": "function_call_output", "call_id": "c1", "output": output}]


WHERE_IMAGES_STAND: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [of_user([CHAT_PART])]}),
    ("/v1/chat/completions", {"messages": [of_user([INPUT_PART])]}),
    ("/v1/chat/completions", {"messages": of_tool(IMAGE)}),
    ("/v1/chat/completions", {"messages": of_tool([CHAT_PART])}),
    ("/v1/chat/completions", {"messages": of_tool(json.dumps({"screenshot": BARE}))}),
    ("/v1/responses", {"input": [of_user([INPUT_PART])]}),
    ("/v1/responses", {"input": result_item([INPUT_PART])}),
    ("/v1/responses", {"input": result_item(IMAGE)}),
    ("/v1/messages", {"messages": [of_user([BLOCK])]}),
    ("/v1/messages/count_tokens", {"messages": [of_user([BLOCK])]}),
    (
        "/v1/messages",
        {"messages": [of_user([{"type": "document", "source": {"type": "content", "content": [BLOCK]}}])]},
    ),
    ("/api/chat", {"messages": [of_user("What?", images=[BARE])]}),
    ("/api/generate", {"prompt": "What?", "images": [BARE]}),
]
WHERE_NONE_STANDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [of_user("Hi")], "metadata": {"a": IMAGE}}),
    ("/v1/chat/completions", {"messages": [of_user("Hi")], "metadata": {IMAGE: "a"}}),
    ("/v1/chat/completions", {"messages": [of_user("Hi", name=IMAGE)]}),
    ("/v1/chat/completions", {"messages": [of_user(IMAGE)]}),
    ("/v1/chat/completions", {"messages": [of_user([{"type": "text", "text": IMAGE}])]}),
    ("/v1/chat/completions", {"messages": of_tool("data:image/" + "Hi. " * 40_000)}),
    ("/v1/chat/completions", {"messages": [of_user("Hi")], "user": ["data:image/png;base64,AA"] * 6000}),
    ("/v1/completions", {"prompt": IMAGE}),
    ("/v1/responses", {"input": IMAGE}),
    ("/v1/responses", {"input": "Hi", "instructions": BARE}),
    ("/v1/messages", {"messages": [of_user("Hi")], "system": IMAGE}),
    ("/api/chat", {"messages": [of_user("Hi")], "options": {"images": [BARE]}}),
    ("/api/generate", {"prompt": IMAGE}),
    ("/v1/embeddings", {"input": IMAGE}),
    ("/v1/rerank", {"query": "Hi", "documents": [IMAGE]}),
    ("/v1/tokenize", {"prompt": IMAGE}),
]


@pytest.fixture(scope="module")
def small_texts() -> Iterator[Any]:
    with (
        ScriptedEngine([]) as engine,
        running(engine, max_body_bytes=100_000, max_images_bytes=3 << 20) as server,
    ):
        yield server


@pytest.mark.parametrize(("path", "body"), WHERE_IMAGES_STAND, ids=range(len(WHERE_IMAGES_STAND)))
def test_where_images_may_stand_they_have_their_limit(
    small_texts: Any, path: str, body: dict[str, Any]
) -> None:
    status, answer = small_texts.call(path, json.dumps({"max_tokens": 1, "stream": False, **body}).encode())
    assert status != 413, answer


@pytest.mark.parametrize(("path", "body"), WHERE_NONE_STANDS, ids=range(len(WHERE_NONE_STANDS)))
def test_anywhere_else_an_image_is_a_text(small_texts: Any, path: str, body: dict[str, Any]) -> None:
    status, answer = small_texts.call(path, json.dumps({"max_tokens": 1, "stream": False, **body}).encode())
    assert status == 413
    assert "larger than 100000 bytes without its images" in json.dumps(answer)


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"NONSENSE\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", b"431"),
        (b"GET /a HTTP/9.9\r\nHost: localhost\r\n\r\n", b"505"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n{}   ", b"400"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n\r\n", b"400"),
        (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            + chunked(b" " * 200_000),
            b"413",
        ),
        (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            b"400",
        ),
    ],
    ids=range(8),
)
def test_broken_requests_get_an_error_object(request_bytes: bytes, status: bytes) -> None:
    with (
        ScriptedEngine([]) as engine,
        running(engine, max_body_bytes=100_000, max_images_bytes=0) as server,
    ):
        with socket.create_connection(server.address, timeout=60) as connection:
            connection.sendall(request_bytes)
            head, _, body = read_until(connection, b"}}").partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 " + status)
        assert f"\r\nServer: mlx-backend/{__version__}".encode() in head
        assert json.loads(body)["error"]["message"]
        assert server.call("/health")[0] == 200


def test_every_response_names_the_server_and_its_version() -> None:
    with ScriptedEngine([ANSWER]) as engine, running(engine) as server:
        for path, body in (("/health", None), ("/v1/models", None), ("/v1/chat/completions", USER_BODY)):
            with server.open(path, body) as response:
                assert response.headers.get_all("Server") == [f"mlx-backend/{__version__}"], path
        with pytest.raises(urllib.error.HTTPError) as raised:
            server.open("/nowhere")
        assert raised.value.headers["Server"] == f"mlx-backend/{__version__}"
        raised.value.close()


def test_a_client_that_sends_no_host_is_served() -> None:
    with (
        ScriptedEngine([]) as engine,
        running(engine) as server,
        socket.create_connection(server.address, timeout=60) as connection,
    ):
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert b" 200 OK" in read_until(connection, b"}]}")


@pytest.mark.parametrize(
    ("how", "stream"), [("left", True), ("failed", True), ("failed", False), ("cut", True), ("cut", False)]
)
def test_the_log_gives_the_cost_of_a_reply_that_was_cut_or_failed(
    how: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    failure = EngineError("The model lost its thread.") if how == "failed" else None
    script = Transcript(text="<|channel|>final<|message|>" + "word " * 3, failure=failure)
    caplog.set_level("INFO", "mlx_backend.requests")
    with ScriptedEngine([script], gated=True) as engine, running(engine) as server:
        stop = {"stop": ["d w"]} if how == "cut" else {}
        with server.send({"messages": HELLO, "stream": stream, **stop}) as connection:
            engine.advance(7)
            seen = read_until(connection, b'"content":"') if stream else b""
            if how == "left":
                connection.close()
                assert engine.requests[0].cancelled.wait(60)
            else:
                engine.advance(99)
                done = b"[DONE]" if stream else b'"finish_reason"'
                read_until(connection, done if how == "cut" else b"thread.", seen)
    [line] = [each for each in caplog.messages if "finish=" in each]
    found = re.search(r"completion=(\d+) .*? ([\d.]+) tok/s queue=([\d.]+)s", line)
    assert found, line
    assert int(found[1]) > 3
    assert float(found[2]) > 0
    assert line.endswith({"left": "client left", "failed": "error", "cut": "stop"}[how])


def test_the_log_says_how_long_a_disconnected_client_was_queued(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mlx_backend.requests")
    with (
        ScriptedEngine([LONG], gated=True, max_concurrent=1) as engine,
        running(engine, keepalive_seconds=0.05) as server,
    ):
        first = server.send({"messages": HELLO, "stream": True})
        engine.advance(4)
        read_until(first, b'"role"')
        waiting = server.send({"messages": HELLO, "stream": True})
        read_until(waiting, b": keepalive")
        waiting.close()
        while not [each for each in caplog.messages if "client left" in each]:
            pass
        first.close()
    line = next(each for each in caplog.messages if "client left" in each)
    found = re.search(r"completion=0 .* queue=([\d.]+)s", line)
    assert found, line
    assert float(found[1]) >= 0.05


def test_a_users_request_goes_before_a_title_that_came_earlier() -> None:
    with (
        ScriptedEngine(lambda _: ANSWER, gated=True, max_concurrent=1) as engine,
        running(engine) as server,
    ):

        def waiting() -> int:
            count: int = server.call("/health")[1]["models"][0]["waiting"]
            return count

        title = {"priority": 1, "answer_reserve": 9, "max_tokens": 50}
        requests: list[dict[str, Any]] = [{}, title, {"stream": True}]
        sent = []
        for at, fields in enumerate(requests):
            sent.append(server.send({"messages": [{"role": "user", "content": f"number {at}"}], **fields}))
            while len(engine.requests) < 1 or waiting() < at:
                pass
        engine.advance(1000)
        for connection in sent:
            read_until(connection, b'"finish_reason":"stop"')
            connection.close()
        order = [each.prompt.partition("number ")[2][:1] for each in engine.requests]
        assert order == ["0", "2", "1"]


def test_a_chunked_body_is_accepted() -> None:
    body = json.dumps({"messages": HELLO}).encode()
    with (
        ScriptedEngine([ANSWER]) as engine,
        running(engine) as server,
        socket.create_connection(server.address, timeout=60) as connection,
    ):
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head + chunked(body))
        assert b"200 OK" in read_until(connection, b"Paris.")


def test_a_body_that_ends_too_early_harms_no_other_request() -> None:
    with ScriptedEngine([ANSWER]) as engine, running(engine) as server:
        with socket.create_connection(server.address, timeout=60) as connection:
            connection.sendall(
                b'POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{"mess'
            )
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(4096) == b""
        assert server.chat()["choices"][0]["finish_reason"] == "stop"


def test_a_connection_is_reused() -> None:
    with ScriptedEngine(lambda _: ANSWER) as engine, running(engine) as server:
        body = json.dumps({"messages": HELLO}).encode()
        request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
            + body
        )
        with socket.create_connection(server.address, timeout=60) as connection:
            for _ in range(3):
                connection.sendall(request)
                assert b"200 OK" in read_until(connection, b"predicted_per_second")


def test_an_error_in_mid_stream_is_an_event_and_the_end() -> None:
    def scripts(_: str) -> Transcript:
        return Transcript(text="<|channel|>final<|message|>Pa", failure=RuntimeError("the batch broke"))

    with ScriptedEngine(scripts) as engine, running(engine) as server:
        with server.open("/v1/chat/completions", {"messages": HELLO, "stream": True}) as response:
            events = response.read().decode().split("\n\n")
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "engine_failed"
        assert events[-1] == ""
        while server.call("/health")[0] == 503:  # it is getting up again
            pass
        assert server.call("/health")[1]["status"] == "ok"


def test_a_server_ends_the_connections_that_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    engine = ScriptedEngine([LONG], gated=True)
    with running(engine) as server:
        connection = server.send({"messages": HELLO, "stream": True})
        engine.advance(20)
        read_until(connection, b"data: ")
        monkeypatch.setattr(server.server, "shutdown_seconds", 0.1)
    with connection:
        while connection.recv(4096):
            pass
    assert not [each.name for each in set(threading.enumerate()) - before if each.name != "time-limits"]
