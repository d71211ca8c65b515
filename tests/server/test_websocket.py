"""/v1/responses over a WebSocket, through real sockets; what holds for requests holds for messages."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import ExitStack, contextmanager
from http.client import HTTPResponse
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest
import running_server
import werkzeug
from openai.types.responses import ResponsesServerEvent
from pydantic import TypeAdapter
from running_server import RunningServer, running
from scripted_engine import ScriptedEngine
from scripted_server import ANSWER
from single_model import SingleModelRegistry
from werkzeug.test import EnvironBuilder
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Message,
    Ping,
    Pong,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)

from mlx_backend.chat.model_settings import ModelSettings
from mlx_backend.chat.service import Service
from mlx_backend.server.connection_limits import ConnectionLimits
from mlx_backend.server.request_tasks import RequestTask
from mlx_backend.server.websocket import MAX_WAITING, WebSocket
from mlx_backend.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATH = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)


class Client:
    """A WebSocket, of which events are received one by one."""

    def __init__(self, server: RunningServer, path: str = PATH, **headers: str) -> None:
        self.socket = socket.create_connection(server.address, timeout=60)
        self._frames = WSConnection(ConnectionType.CLIENT)
        self._events: list[Event] = []
        host = headers.pop("host", "127.0.0.1")
        extra = [(name.encode(), value.encode()) for name, value in headers.items()]
        self.send(Request(host=host, target=path, extra_headers=extra))

    def send(self, *events: Event) -> None:
        self.socket.sendall(b"".join(map(self._frames.send, events)))

    def create(self, *, store: bool = False, **fields: Any) -> None:
        self.send(TextMessage(json.dumps({"type": "response.create", "store": store, **fields})))

    def receive(self) -> Event:
        while not self._events:
            data = self.socket.recv(65_536)
            self._frames.receive_data(data or None)
            self._events += self._frames.events()
        return self._events.pop(0)

    def event(self) -> dict[str, Any]:
        """The next message, which OpenAI's client can read."""
        text = ""
        while True:
            received = self.receive()
            assert isinstance(received, TextMessage), received
            text += received.data
            if received.message_finished:
                EVENT.validate_json(text)
                event: dict[str, Any] = json.loads(text)
                return event

    def last(self) -> dict[str, Any]:
        """The event that the answer to a message ends with."""
        while (event := self.event())["type"] not in ("response.completed", "response.failed", "error"):
            pass
        return event

    def created(self, **fields: Any) -> dict[str, Any]:
        """The response to a message."""
        self.create(**fields)
        response: dict[str, Any] = self.last()["response"]
        return response

    def refused(self, **fields: Any) -> tuple[int, str | None]:
        self.create(**fields)
        error = self.last()
        return error["status"], error["error"]["code"]


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    """`connect(server, …)` opens a WebSocket that is closed at the end."""
    with ExitStack() as stack:

        def connected(server: RunningServer, **options: str) -> Client:
            client = Client(server, **options)
            stack.callback(client.socket.close)
            assert isinstance(client.receive(), AcceptConnection)
            return client

        yield connected


@contextmanager
def serving(**options: Any) -> Iterator[tuple[ScriptedEngine, RunningServer]]:
    gated = options.pop("gated", False)
    with ScriptedEngine(lambda _: ANSWER, gated=gated) as engine, running(engine, **options) as server:
        yield engine, server


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[ScriptedEngine, RunningServer]]:
    with serving() as both:
        yield both


@pytest.fixture
def server(served: tuple[ScriptedEngine, RunningServer]) -> RunningServer:
    return served[1]


type Connect = Callable[..., Client]


def test_the_events_of_a_response_are_messages(connect: Connect, server: RunningServer) -> None:
    client = connect(server)
    client.create(input="hello")
    events = [client.event() for _ in range(3)]
    while events[-1]["type"] != "response.completed":
        events.append(client.event())
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created"


def test_the_last_response_is_gone_on_from_once_and_only_on_its_connection(
    connect: Connect, served: tuple[ScriptedEngine, RunningServer]
) -> None:
    engine, server = served
    client = connect(server)
    first = client.created(input="Remember cobalt.")
    second = client.created(input="What was it?", previous_response_id=first["id"])
    assert "Remember cobalt." in engine.requests[-1].prompt
    gone = (404, "previous_response_not_found")
    assert client.refused(input="x", previous_response_id=first["id"]) == gone
    assert connect(server).refused(input="x", previous_response_id=second["id"]) == gone


@pytest.mark.parametrize(
    "wrong",
    [
        {"input": [{"type": "function_call_output", "call_id": "call_1", "output": "to nothing"}]},
        {"input": [{"type": "teapot"}]},
        {"input": "x", "background": True},
        {"input": "x", "type": "response.steer"},
    ],
)
def test_what_fails_leaves_nothing_to_go_on_from(
    connect: Connect, server: RunningServer, wrong: dict[str, Any]
) -> None:
    client = connect(server)
    first = client.created(input="hello")
    assert client.refused(previous_response_id=first["id"], **wrong)[0] == 400
    assert client.refused(input="x", previous_response_id=first["id"])[1] == "previous_response_not_found"


def test_what_is_stored_is_gone_on_from_anywhere(connect: Connect, server: RunningServer) -> None:
    first = connect(server).created(input="hello", store=True)
    assert connect(server).created(input="and?", previous_response_id=first["id"])["status"] == "completed"
    assert server.call(f"{PATH}/{first['id']}")[0] == 200


def test_a_conversation_can_be_read_before_it_is_answered(
    connect: Connect, served: tuple[ScriptedEngine, RunningServer]
) -> None:
    engine, server = served
    client = connect(server)
    read = client.created(generate=False, input=[{"role": "developer", "content": "Be brief."}])
    assert (read["status"], read["output"]) == ("completed", [])
    assert client.created(input="hello", previous_response_id=read["id"])["output"]
    assert "Be brief." in engine.requests[-1].prompt


def test_a_message_comes_in_any_number_of_frames_with_pings_between(
    connect: Connect, server: RunningServer
) -> None:
    client = connect(server)
    text = json.dumps({"type": "response.create", "input": "Was möchtest du?"}, ensure_ascii=False)
    pieces: list[Message[Any]] = [TextMessage(each, message_finished=False) for each in text]
    client.send(*pieces, Ping(b"still there?"), TextMessage(""))
    assert client.receive() == Pong(b"still there?")
    assert client.last()["type"] == "response.completed"
    client.send(BytesMessage(text.encode()))
    assert client.last()["type"] == "response.completed"


@pytest.mark.parametrize("sent", ["{", "[]", "", "\0", '{"input": "hello"}', '{"type": "response.create"}'])
def test_what_is_no_message_is_refused_and_the_next_answered(
    connect: Connect, server: RunningServer, sent: str
) -> None:
    client = connect(server)
    client.send(TextMessage(sent))
    assert client.last()["status"] == 400
    assert client.created(input="hello")["status"] == "completed"


def test_a_reply_that_is_not_to_be_streamed_is_refused_with_what_to_do(
    connect: Connect, server: RunningServer
) -> None:
    client = connect(server)
    client.create(input="hello", stream=False)
    error = client.last()["error"]
    assert (error["param"], error["code"]) == ("stream", "unsupported_value")
    assert error["message"].endswith("a WebSocket sends each reply as events. Leave it out.")


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"origin": "https://elsewhere.example"}, 403),
        ({"host": "elsewhere.example"}, 403),
        ({"authorization": "Bearer wrong"}, 401),
        ({"path": "/v1/chat/completions"}, 405),
        ({"path": "/v1/models"}, 400),
        ({"path": "/v1/nothing"}, 404),
    ],
)
def test_a_handshake_is_refused_as_a_request_would_be(options: dict[str, str], status: int) -> None:
    settings = {"api_key": "right"} if "authorization" in options else {}
    with serving(**settings) as (_, server):
        client = Client(server, **options)
        refused, body = client.receive(), client.receive()
        assert isinstance(refused, RejectConnection)
        assert refused.status_code == status
        assert isinstance(body, RejectData)
        assert json.loads(bytes(body.data))["error"]["message"]
        client.socket.close()


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_request_that_only_names_a_websocket_is_refused(server: RunningServer, method: str) -> None:
    head = f"{method} {PATH} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    with socket.create_connection(server.address, timeout=60) as connection:
        connection.sendall(head.encode())
        answer = HTTPResponse(connection)
        answer.begin()
        assert answer.status == 400
        assert b"no handshake" in answer.read()


def test_a_handshake_of_another_version_is_told_which_one_is_spoken(server: RunningServer) -> None:
    head = (
        f"GET {PATH} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 8\r\n\r\n"
    )
    with socket.create_connection(server.address, timeout=60) as connection:
        connection.sendall(head.encode())
        answer = HTTPResponse(connection)
        answer.begin()
        assert (answer.status, answer.headers["Sec-WebSocket-Version"]) == (426, "13")
        assert "speaks version 13 of WebSockets, not '8'" in json.load(answer)["error"]["message"]


def test_without_an_upgrade_it_is_said_that_there_is_a_websocket(server: RunningServer) -> None:
    status, body = server.call(PATH)
    assert status == 405
    assert "it accepts POST, and a WebSocket" in body["error"]["message"]
    assert "WebSocket" not in server.call("/v1/chat/completions")[1]["error"]["message"]


@pytest.mark.parametrize("says_so", [True, False])
def test_a_client_that_leaves_ends_its_reply(connect: Connect, *, says_so: bool) -> None:
    with serving(gated=True) as (_, server):
        client = connect(server)
        client.create(input="hello")
        assert client.event()["type"] == "response.created"
        if says_so:
            client.send(CloseConnection(1000))
            while not isinstance(client.receive(), CloseConnection):
                pass
        client.socket.close()
        assert server.app.in_flight.wait_until_idle(30)


def test_a_message_that_is_too_large_is_refused_and_ends_the_connection(connect: Connect) -> None:
    with serving(max_body_bytes=1000, max_images_bytes=0) as (_, server):
        client = connect(server)
        assert client.refused(input="x" * 2000)[0] == 413
        closed = client.receive()
        assert isinstance(closed, CloseConnection)
        assert closed.code == 1009


def test_as_many_messages_as_may_wait_are_answered_in_their_order(
    connect: Connect, served: tuple[ScriptedEngine, RunningServer]
) -> None:
    client = connect(served[1])
    texts = [f"message {number}" for number in range(1 + MAX_WAITING)]
    client.send(*[TextMessage(json.dumps({"type": "response.create", "input": text})) for text in texts])
    assert [client.last()["type"] for _ in texts] == ["response.completed"] * len(texts)
    prompts = [request.prompt for request in served[0].requests[-len(texts) :]]
    assert all(text in prompt for text, prompt in zip(texts, prompts, strict=True))


def test_the_handshake_does_not_count_as_a_message_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is there a moment before the server forgets it."""
    goes_on = threading.Event()
    finish = RequestTask.finish

    def finish_late(task: RequestTask) -> None:
        finish(task)
        goes_on.wait(60)

    monkeypatch.setattr(RequestTask, "finish", finish_late)
    with serving() as (_, server):
        client = Client(server)
        assert isinstance(client.receive(), AcceptConnection)
        message = TextMessage('{"type": "response.create", "input": "x"}')
        client.send(*[message] * (1 + MAX_WAITING), Ping())
        assert isinstance(client.receive(), Pong)
        goes_on.set()
        assert [client.last()["type"] for _ in range(1 + MAX_WAITING)] == ["response.completed"] * (
            1 + MAX_WAITING
        )
        client.socket.close()


def test_nothing_is_received_once_the_connection_was_closed() -> None:
    client = WSConnection(ConnectionType.CLIENT)
    handshake = client.send(Request(host="h", target=PATH)).decode()
    headers = dict(line.split(": ", 1) for line in handshake.split("\r\n")[1:-2])
    environ = EnvironBuilder(PATH, headers=list(headers.items())).get_environ() | {"REQUEST_URI": PATH}
    websocket = WebSocket(werkzeug.Request(environ), MagicMock())
    client.receive_data(websocket.accepted + websocket.close("The message is too large."))
    assert [type(event) for event in client.events()] == [AcceptConnection, CloseConnection]
    assert websocket.receive(client.send(CloseConnection(1009)), 1) == (b"", b"")


def test_only_so_many_messages_may_wait(connect: Connect) -> None:
    with serving(gated=True) as (_, server):
        client = connect(server)
        client.send(*[TextMessage('{"type": "response.create", "input": "x"}')] * (MAX_WAITING + 3))
        while not isinstance(closed := client.receive(), CloseConnection):
            pass
        assert closed.code == 1008
        assert server.app.in_flight.wait_until_idle(30)


def end_of(client: Client) -> CloseConnection:
    """What the server ends the connection with."""
    while not isinstance(closed := client.receive(), CloseConnection):
        pass
    return closed


@contextmanager
def limited(**limits: Any) -> Iterator[RunningServer]:
    with ScriptedEngine([]) as engine:
        models = SingleModelRegistry(Service(engine, ModelSettings.of(server=Settings())))
        with running_server.served(models, Settings(port=0), ConnectionLimits(1000, **limits)) as server:
            yield server


def test_a_connection_that_is_idle_is_closed(connect: Connect) -> None:
    with limited(websocket_idle_seconds=0.01) as server:
        assert end_of(connect(server)).code == 1001


@pytest.mark.parametrize("is_within_message", [False, True])
def test_a_connection_that_makes_room_for_another_is_told_to_try_again(
    connect: Connect, *, is_within_message: bool
) -> None:
    with limited(max_connections=2) as server:
        first, _ = clients = [connect(server) for _ in range(2)]
        if is_within_message:
            for client in clients:
                client.send(TextMessage("{", message_finished=False), Ping())
                assert client.receive() == Pong()
        while any(channel.is_answering for channel in [*server.server.active_channels.values()]):
            pass  # a handshake's answer arrives a moment before the server has forgotten it
        elsewhere = ("127.0.0.2", 0)  # whose network has fewer connections
        with socket.create_connection(server.address, 60, elsewhere) as another:
            another.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert another.recv(12) == b"HTTP/1.1 200"
        assert end_of(first).code == 1013


@pytest.mark.parametrize("is_answering", [False, True])
def test_a_server_that_stops_says_so(connect: Connect, *, is_answering: bool) -> None:
    with serving(gated=True) as (_, server):
        client = connect(server)
        if is_answering:
            client.create(input="hello")
            assert client.event()["type"] == "response.created"
            server.server.shutdown_seconds = 0
        stopping = threading.Thread(target=server.server.stop)
        stopping.start()
        end = end_of(client)
        assert (end.code, end.reason) == (1001, "The server is shutting down.")
        stopping.join()
