"""A reply whose conversation has gone on without it, over real sockets: it is ended, and no other is."""

from __future__ import annotations

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from running_server import HELLO, RunningServer, running
from scripted_engine import ScriptedEngine

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

SAID = "The sea is the body of salt water that covers most of the Earth. "
LONG = "<|channel|>analysis<|message|>I think about the sea and about its salt.<|end|><|start|>assistant{}<|return|>"
SEA = LONG.format(f"<|channel|>final<|message|>{SAID * 40}")
ANSWER = "<|channel|>final<|message|>Paris.<|return|>"
NEXT = {"role": "user", "content": "And a lake?"}


def quoting(text: str) -> list[dict[str, Any]]:
    return [*HELLO, {"role": "assistant", "content": text}, NEXT]


class Engine(ScriptedEngine):
    """Answers the question at length, and whatever goes on from it in a word; takes no step by itself."""

    def __init__(self) -> None:
        self._begun = threading.Semaphore(0)
        super().__init__(self._script, gated=True)

    def _script(self, prompt: str) -> str:
        self._begun.release()
        return ANSWER if "And a lake?" in prompt else SEA

    def advance_next(self, steps: int) -> None:
        """Wait until the next request has been started, and take so many steps."""
        assert self._begun.acquire(timeout=60)
        self.advance(steps)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


def read_to(connection: socket.socket, words: str) -> bytes:
    """Receive until the words have come, in pieces of however many tokens."""
    data = b""
    while words not in _text(data):
        piece = connection.recv(65_536)
        assert piece, f"the connection ended: {data[-300:]!r}"
        data += piece
    return data


def _text(data: bytes) -> str:
    events = [
        line[6:] for line in data.decode().splitlines() if line.startswith("data: {") and line.endswith("}")
    ]
    deltas = [choice["delta"] for event in events for choice in json.loads(event).get("choices", ())]
    return "".join(delta.get("content") or delta.get("reasoning_content") or "" for delta in deltas)


def read_to_the_end(connection: socket.socket) -> str:
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        piece = connection.recv(65_536)
        assert piece, "the connection ended before its last chunk"
        data += piece
    return data.decode()


def shown(server: RunningServer, engine: Engine, words: str, **fields: Any) -> socket.socket:
    """A reply that runs, and has said these words."""
    connection = server.send({"messages": HELLO, "stream": True, "user": "Ada", **fields})
    engine.advance_next(120)
    read_to(connection, words)
    return connection


def ask(server: RunningServer, engine: Engine, messages: list[dict[str, Any]], **fields: Any) -> str:
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(server.chat, messages, **{"user": "Ada", **fields})
        engine.advance_next(200)
        content: str = reply.result()["choices"][0]["message"]["content"]
        return content


@pytest.mark.parametrize(
    "quoted",
    [
        SAID,
        f"<think>\nI think about the sea and about its salt.\n</think>\n\n{SAID}",
        "<think>\nI think about the sea and about its",
    ],
    ids=["answer", "answer with its thinking", "stopped while thinking"],
)
def test_a_request_that_goes_on_from_a_running_reply_ends_it(
    engine: Engine, quoted: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with running(engine) as server, shown(server, engine, f"{SAID}The sea") as connection:
        assert ask(server, engine, quoting(quoted)) == "Paris."
        assert engine.requests[0].cancelled.is_set()
        rest = read_to_the_end(connection)
        assert '"code": "superseded"' in rest.replace('":"', '": "')
        assert "the conversation has gone on without it" in rest
    assert any("nobody is waiting for" in record.message for record in caplog.records)
    assert any(record.message.endswith("finish=superseded") for record in caplog.records)


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        (quoting(""), {}),
        (quoting("The sea is the body"), {}),
        (quoting("A lake is a body of water, but without any salt."), {}),
        (quoting(SAID), {"user": "somebody else"}),
        ([{"role": "system", "content": "Be brief."}, *quoting(SAID)], {}),
    ],
    ids=["empty", "short", "other words", "another user", "other instructions"],
)
def test_a_reply_that_may_be_read_is_never_ended(
    engine: Engine, messages: list[dict[str, Any]], fields: dict[str, Any]
) -> None:
    with running(engine) as server, shown(server, engine, f"{SAID}The sea") as connection:
        ask(server, engine, messages, **fields)
        assert not engine.requests[0].cancelled.is_set()
        engine.advance(2000)
        assert "data: [DONE]" in read_to_the_end(connection)


def test_without_users_nobody_can_say_whose_reply_it_was(engine: Engine) -> None:
    with (
        running(engine) as server,
        shown(server, engine, f"{SAID}The sea", user=None) as connection,
    ):
        ask(server, engine, quoting(SAID), user=None)
        assert not engine.requests[0].cancelled.is_set()
        engine.advance(2000)
        assert "data: [DONE]" in read_to_the_end(connection)


def test_the_same_question_again_ends_nothing(engine: Engine) -> None:
    with running(engine) as server, ExitStack() as stack:
        connections = [stack.enter_context(shown(server, engine, f"{SAID}The sea")) for _ in range(3)]
        engine.advance(2000)
        for connection in connections:
            assert "data: [DONE]" in read_to_the_end(connection)


def test_of_two_replies_with_the_same_words_none_is_ended(engine: Engine) -> None:
    """Two people began alike, and one of them goes on: nobody can say from whose reply."""
    with running(engine) as server, ExitStack() as stack:
        connections = [stack.enter_context(shown(server, engine, f"{SAID}The sea")) for _ in range(2)]
        ask(server, engine, quoting(SAID))
        assert engine.cancelled == []
        engine.advance(2000)
        for connection in connections:
            assert "data: [DONE]" in read_to_the_end(connection)


def test_a_reply_that_is_not_streamed_is_not_ended(engine: Engine) -> None:
    with running(engine) as server, ThreadPoolExecutor(1) as pool:
        whole = pool.submit(server.chat, user="Ada")
        engine.advance_next(120)
        ask(server, engine, quoting(SAID))
        engine.advance(2000)
        assert whole.result()["choices"][0]["message"]["content"].startswith(SAID)
