"""Answers whose conversation has gone on without them, after a Stop of which Dify tells its plugins nothing.

The plugin ends the connection to the server for those, and for no answer that somebody may be reading.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
from typing import TYPE_CHECKING, Any, Self

import pytest
from daemon import PluginError, PluginProcess
from dify_view import assistant, text_of, user
from raw_server import DONE, STREAM, at_an_unused_port, event, read_request, status

if TYPE_CHECKING:
    from collections.abc import Iterator

THINKING = "They ask about the sea, so I tell of its salt and of its size."
ANSWER = "The sea is the body of salt water that covers most of the Earth."
SYSTEM = {"role": "system", "content": "Be brief."}
GOING_ON = user("And a lake?")


class Stream:
    """One answer of the server, sent as the test says it."""

    def __init__(self, connection: socket.socket, body: dict[str, Any]) -> None:
        self.body = body
        self.left = threading.Event()
        self._connection = connection
        threading.Thread(target=self._watch, daemon=True).start()

    def say(self, **delta: str) -> None:
        self._connection.sendall(event(delta))

    def finish(self) -> None:
        self._connection.sendall(DONE)
        self._connection.shutdown(socket.SHUT_WR)

    def _watch(self) -> None:
        try:
            while self._connection.recv(65_536):
                pass
        except OSError:
            pass
        self.left.set()


class ChatServer:
    """Answers chats as the test says: `next` is the next one that has come."""

    def __init__(self) -> None:
        self._socket = at_an_unused_port(socket.create_server)
        self._streams: queue.Queue[Stream] = queue.Queue()
        self._connections: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def credentials(self) -> dict[str, str]:
        return {
            "endpoint_url": f"http://127.0.0.1:{self._socket.getsockname()[1]}",
            "server_kind": "mlx-backend",
        }

    def next(self) -> Stream:
        return self._streams.get(timeout=60)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(30)
        for each in (self._socket, *self._connections):
            each.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self._connections.append(connection)
            request = read_request(connection)
            if not request.startswith(b"POST /v1/chat"):
                connection.sendall(status("404 Not Found"))
                connection.shutdown(socket.SHUT_WR)
                continue
            connection.sendall(STREAM)
            self._streams.put(Stream(connection, json.loads(request.partition(b"\r\n\r\n")[2])))


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer() as server:
        yield server


class Talk:
    """An answer that runs: what of it was shown, and how it ends."""

    def __init__(
        self, plugin: PluginProcess, server: ChatServer, *messages: dict[str, Any], **sender: Any
    ) -> None:
        self._chunks = plugin.invoke(list(messages), credentials=server.credentials, **sender)
        self.stream = server.next()
        self.shown = ""

    def says(self, words: str, **delta: str) -> None:
        """Have the server say it, and read on until Dify is shown it."""
        self.stream.say(**delta)
        while words not in self.shown:
            self.shown += next(self._chunks)["delta"]["message"]["content"]

    def rest(self) -> str:
        return text_of(list(self._chunks))


@pytest.fixture
def question(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A question that no other test asks: the plugin remembers what its process has answered."""
    return user(f"What is the sea? ({request.node.nodeid})")


def begun(
    plugin: PluginProcess, server: ChatServer, *messages: dict[str, Any], answers: bool = True, **sender: Any
) -> Talk:
    talk = Talk(plugin, server, *messages, **sender)
    talk.says(THINKING, reasoning_content=THINKING)
    if answers:
        talk.says(ANSWER, content=ANSWER)
    return talk


def ask(plugin: PluginProcess, server: ChatServer, *messages: dict[str, Any], **sender: Any) -> None:
    """Ask something, and read the answer to its end."""
    talk = Talk(plugin, server, *messages, **sender)
    talk.stream.say(content="Paris.")
    talk.stream.finish()
    assert talk.rest() == "Paris."


def assert_ended(talk: Talk) -> None:
    talk.stream.say(content=" It")
    assert talk.stream.left.wait(60)
    with pytest.raises(PluginError, match="its conversation has gone on without it"):
        talk.rest()


def assert_read_to_its_end(talk: Talk) -> None:
    talk.says(" It is deep.", content=" It is deep.")
    talk.stream.finish()
    assert talk.rest() == ""


@pytest.mark.parametrize("answers", [True, False], ids=["while answering", "while thinking"])
def test_a_stopped_answer_ends_when_its_user_goes_on(
    plugin: PluginProcess, server: ChatServer, question: dict[str, Any], answers: bool
) -> None:
    stopped = begun(plugin, server, SYSTEM, question, answers=answers, app_id="app")
    shown = stopped.shown.strip()  # so Dify keeps it
    ask(plugin, server, SYSTEM, question, assistant(shown), GOING_ON, app_id="app")
    assert_ended(stopped)


@pytest.mark.parametrize("app_id", ["app", None], ids=["of an app", "of Dify 1.14"])
def test_so_it_does_in_a_plain_chat_where_dify_names_no_user(
    plugin: PluginProcess, server: ChatServer, question: dict[str, Any], app_id: str | None
) -> None:
    nobody: dict[str, Any] = {"app_id": app_id, "user_id": ""}
    stopped = begun(plugin, server, SYSTEM, question, **nobody)
    ask(plugin, server, SYSTEM, question, assistant(stopped.shown.strip()), GOING_ON, **nobody)
    assert_ended(stopped)


def test_nor_is_one_of_two_people_whom_dify_does_not_tell_apart(
    plugin: PluginProcess, server: ChatServer, question: dict[str, Any]
) -> None:
    """Both have asked the same and read the same; one of them goes on."""
    nobody: dict[str, Any] = {"app_id": "app", "user_id": ""}
    first, second = (begun(plugin, server, question, **nobody) for _ in range(2))
    first.stream.finish()
    assert first.rest() == ""
    ask(plugin, server, question, assistant(first.shown.strip()), GOING_ON, **nobody)
    assert_read_to_its_end(second)


def test_a_separated_nodes_answer_comes_back_without_its_thinking(
    plugin: PluginProcess, server: ChatServer, question: dict[str, Any]
) -> None:
    stopped = begun(plugin, server, question, app_id="app")
    ask(plugin, server, question, assistant(ANSWER[:50]), GOING_ON, app_id="app")
    assert_ended(stopped)


def test_instructions_that_dify_fills_anew_do_not_matter_within_an_app(
    plugin: PluginProcess, server: ChatServer, question: dict[str, Any]
) -> None:
    stopped = begun(plugin, server, SYSTEM, question, app_id="app")
    other = {"role": "system", "content": "Be brief. Context: a lake is smaller."}
    ask(plugin, server, other, question, assistant(stopped.shown), GOING_ON, app_id="app")
    assert_ended(stopped)


def test_without_an_app_the_instructions_must_be_the_same(
    plugin: PluginProcess, server: ChatServer, question: dict[str, Any]
) -> None:
    stopped = begun(plugin, server, SYSTEM, question)
    other = {"role": "system", "content": "Be verbose."}
    ask(plugin, server, other, question, assistant(stopped.shown), GOING_ON)
    stopped.says(" It", content=" It")
    ask(plugin, server, SYSTEM, question, assistant(stopped.shown), GOING_ON)
    assert_ended(stopped)


@pytest.mark.parametrize(
    ("shown", "sender"),
    [
        (None, {}),
        ("", {}),
        ("<think>\nThey ask", {}),
        (f"<think>\n{THINKING}\n</think>\n\nA lake is smaller.", {}),
        (f"<think>\n{THINKING}\n</think>\n\n{ANSWER}", {"app_id": "another app"}),
        (f"<think>\n{THINKING}\n</think>\n\n{ANSWER}", {"user_id": "another user"}),
    ],
    ids=["the same again", "stopped at once", "a few words", "other words", "another app", "another user"],
)
def test_an_answer_that_somebody_may_be_reading_is_never_ended(
    plugin: PluginProcess,
    server: ChatServer,
    question: dict[str, Any],
    shown: str | None,
    sender: dict[str, str],
) -> None:
    running = begun(plugin, server, question, app_id="app")
    later = [] if shown is None else [assistant(shown), GOING_ON]
    ask(plugin, server, question, *later, **{"app_id": "app", **sender})
    assert_read_to_its_end(running)


def test_parallel_nodes_that_say_the_same_are_never_ended(
    plugin: PluginProcess, server: ChatServer, question: dict[str, Any]
) -> None:
    nodes = [begun(plugin, server, question, app_id="app") for _ in range(2)]
    ask(plugin, server, question, assistant(nodes[0].shown), GOING_ON, app_id="app")
    for node in nodes:
        assert_read_to_its_end(node)


def test_a_node_that_goes_on_from_a_finished_one_does_not_end_a_third(
    plugin: PluginProcess, server: ChatServer, question: dict[str, Any]
) -> None:
    """The first was limited to these words; another says the same, and more."""
    first, other = (begun(plugin, server, question, app_id="app") for _ in range(2))
    first.stream.finish()
    assert first.rest() == ""
    ask(plugin, server, question, assistant(first.shown), GOING_ON, app_id="app")
    assert_read_to_its_end(other)


def test_the_real_server_is_freed(plugin: PluginProcess, credentials: dict[str, str]) -> None:
    """With Dify's request for a stopped answer: the second one is answered, whatever has become of the first."""
    request = user("Count to 30.")
    stopped = plugin.invoke([request], credentials=credentials, app_id="app")
    shown = "".join(next(stopped)["delta"]["message"]["content"] for _ in range(12))
    later = [request, assistant(shown.strip()), user("What is the capital of France?")]
    answer = text_of(list(plugin.invoke(later, credentials=credentials, app_id="app")))
    assert answer.endswith("The capital of France is Paris.")
