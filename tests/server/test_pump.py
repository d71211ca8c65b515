"""One thread writes every answer that waits for an engine, and no client that reads slowly holds it up."""

from __future__ import annotations

import json
import re
import socket
import threading
from contextlib import ExitStack
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest
from running_server import HELLO, running, served
from scripted_engine import ScriptedEngine
from single_model import SingleModelRegistry

from mlx_backend.chat.reply import Reply
from mlx_backend.chat.service import Service
from mlx_backend.server.pump import MAX_PIECES, Pump, Writer
from mlx_backend.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlx_backend.chat.reply import ReplyEvent
    from mlx_backend.engine.base import TokenDelta

WORDS = 2000
LONG = "<|channel|>final<|message|>" + "word " * WORDS + "<|return|>"


@pytest.fixture
def writer() -> Iterator[Writer]:
    writer = Writer()
    writer.start()
    yield writer
    writer.stop(60)


class Source:
    """Yields what was put, nothing while there is none, and raises or ends with what was put last."""

    def __init__(self) -> None:
        self.put: SimpleQueue[str | Exception | None] = SimpleQueue()
        self.ran_dry = threading.Semaphore(0)

    def __iter__(self) -> Iterator[str]:
        while True:
            if self.put.empty():
                self.ran_dry.release()
                yield ""
                continue
            match self.put.get():
                case None:
                    return
                case Exception() as error:
                    raise error
                case piece:
                    yield piece


def test_what_comes_together_is_moved_together_and_what_ends_the_source_ends_the_wait(writer: Writer) -> None:
    source, moved = Source(), SimpleQueue[list[str]]()
    pump = Pump(writer)
    worker = threading.Thread(target=lambda: pump.run(iter(source), moved.put))
    worker.start()
    assert source.ran_dry.acquire(timeout=60)
    for pieces in (["a"], ["b", "c"]):
        for piece in pieces:
            source.put.put(piece)
        pump.resume()
        assert moved.get(timeout=60) == pieces
        assert source.ran_dry.acquire(timeout=60)
    source.put.put(None)
    pump.resume()
    worker.join(60)
    assert not worker.is_alive()
    pump.resume()  # too late: it does nothing
    assert moved.empty()


def test_what_the_source_or_the_sink_raises_is_raised_where_the_end_is_waited_for(writer: Writer) -> None:
    source, pump = Source(), Pump(writer)
    source.put.put(ValueError("of the source"))
    with pytest.raises(ValueError, match="of the source"):
        pump.run(iter(source), list)
    source.put.put("a")
    with pytest.raises(ZeroDivisionError):
        pump.run(iter(source), lambda _: 1 / 0)
    source.put.put(None)
    pump.run(iter(source), list)  # and it may be used again


def test_who_has_much_to_move_lets_others_go_first_in_between() -> None:
    writer, moved = Writer(), list[str]()
    workers = []
    for name, count in (("many", MAX_PIECES + 1), ("one", 1)):
        source = iter([name] * count)
        pump = Pump(writer)
        workers.append(threading.Thread(target=pump.run, args=(source, moved.extend)))
        workers[-1].start()
        while writer._resumed.qsize() < len(workers):
            pass
    writer.start()
    for worker in workers:
        worker.join(60)
    writer.stop(60)
    assert moved == ["many"] * MAX_PIECES + ["one", "many"]


@pytest.mark.parametrize("stream", [True, False], ids=["streams", "whole"])
def test_the_tokens_of_all_clients_are_handled_by_one_thread(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled: set[str] = set()
    take = Reply._token

    def noted(reply: Reply, delta: TokenDelta) -> list[ReplyEvent]:
        handled.add(threading.current_thread().name)
        return take(reply, delta)

    waiting: list[Pump] = []
    run = Pump.run

    def begun(pump: Pump, *arguments: Any) -> None:
        waiting.append(pump)
        run(pump, *arguments)

    monkeypatch.setattr(Reply, "_token", noted)
    monkeypatch.setattr(Pump, "run", begun)
    answer = "<|channel|>final<|message|>Paris is the capital.<|return|>"
    with (
        ScriptedEngine(lambda _: answer, gated=True) as engine,
        running(engine) as server,
        ExitStack() as stack,
    ):
        clients = [server.send({"messages": HELLO, "stream": stream}) for _ in range(8)]
        for each in clients:
            stack.callback(each.close)
        while len(waiting) < len(clients):  # until then a worker writes what there is
            pass
        engine.advance(100)
        for each in clients:
            data = b""
            while b"stop" not in data:
                data += each.recv(65536)
    assert handled == {"writer"}


def test_a_client_that_does_not_read_its_stream_holds_up_no_other() -> None:
    with ScriptedEngine(
        lambda prompt: LONG if "long" in prompt else "<|channel|>final<|message|>A<|return|>"
    ) as engine:
        settings = Settings(port=0, max_queue=4, temperature=0.0)
        with (
            served(SingleModelRegistry(Service(engine)), settings, send_buffer=4096) as server,
            socket.socket() as deaf,
        ):
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            deaf.settimeout(60)
            deaf.connect(server.address)
            body = json.dumps({"messages": [{"role": "user", "content": "long"}], "stream": True}).encode()
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            deaf.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            channels = server.server.active_channels
            while not any(each.total_outbufs_len >= 256 * 1024 for each in [*channels.values()]):
                pass
            assert server.chat()["choices"][0]["message"]["content"] == "A"
            data = b""
            while piece := deaf.recv(65536):
                data += piece
    assert b"[DONE]" in data
    contents = re.findall(rb'"content":"([^"]*)"', data)
    assert b"".join(contents) == b"word " * WORDS
