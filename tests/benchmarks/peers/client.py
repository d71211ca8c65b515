"""What a client does: send requests, read streams, disconnect. Times are taken here."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.peers.systems import Message, RunningServer

TEXT_FIELDS = ("content", "reasoning_content", "reasoning")


class NoAnswer(Exception):
    """The server refused the request, reset the connection, or sent nothing that can be read."""


def user_message(text: str) -> list[Message]:
    """Return a chat of one message."""
    return [{"role": "user", "content": text}]


def _post(server: RunningServer, body: dict[str, Any], timeout: float) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout)
    data = json.dumps({"model": server.model, "temperature": 0, **body})
    connection.request("POST", "/v1/chat/completions", data, {"Content-Type": "application/json"})
    return connection


def complete(
    server: RunningServer, messages: list[Message], timeout: float = 300, **fields: Any
) -> dict[str, Any]:
    """Send a request that is not streamed; return the reply."""
    try:
        connection = _post(server, {"messages": messages, **fields}, timeout)
        with contextlib.closing(connection):
            response = connection.getresponse()
            data = response.read()
        if response.status != 200:
            raise NoAnswer(f"{response.status}: {data[:200]!r}")
        reply: dict[str, Any] = json.loads(data)
    except (OSError, http.client.HTTPException, ValueError) as problem:
        raise NoAnswer(str(problem)) from problem
    return reply


def stream_events(
    server: RunningServer, messages: list[Message], timeout: float = 300, **fields: Any
) -> Iterator[tuple[float, dict[str, Any]]]:
    """Stream a reply: every event with the time it was read. Closing the iterator disconnects."""
    try:
        connection = _post(server, {"messages": messages, "stream": True, **fields}, timeout)
        with contextlib.closing(connection):
            response = connection.getresponse()
            if response.status != 200:
                raise NoAnswer(f"{response.status}: {response.read()[:200]!r}")
            rest = b""
            with contextlib.closing(response):
                while data := response.read1(65536):
                    now = time.perf_counter()
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        if line.startswith(b"data: {"):
                            yield now, json.loads(line[6:])
    except (OSError, http.client.HTTPException, ValueError) as problem:
        raise NoAnswer(str(problem)) from problem


def has_output(event: dict[str, Any]) -> bool:
    """Whether the event carries text, or the end."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("finish_reason") or any(delta.get(name) for name in TEXT_FIELDS):
            return True
    return False


def text_of(reply: dict[str, Any]) -> str:
    """Return all of a reply's text, reasoning included."""
    message = reply["choices"][0]["message"]
    return "|".join(str(message.get(name) or "") for name in TEXT_FIELDS)


def content_of(reply: dict[str, Any]) -> str:
    """Return the answer of a reply."""
    return str(reply["choices"][0]["message"].get("content") or "")


def streamed_content(server: RunningServer, messages: list[Message], **fields: Any) -> str:
    """Return the content of a streamed reply."""
    parts = []
    for _, event in stream_events(server, messages, **fields):
        for choice in event.get("choices") or ():
            parts.append((choice.get("delta") or {}).get("content") or "")
    return "".join(parts)


def first_token(server: RunningServer, messages: list[Message], **fields: Any) -> float:
    """Return the seconds from sending to the first token of a reply of one token."""
    started = time.perf_counter()
    first = None
    for at, event in stream_events(server, messages, max_tokens=1, **fields):
        if first is None and has_output(event):
            first = at - started
    if first is None:
        raise NoAnswer("a stream without a token")
    return first


def time_concurrent(
    server: RunningServer, messages: list[Message], streams: int, tokens: int, stream: bool
) -> float:
    """Return the seconds that this many equal requests take at once, each with all its tokens."""

    def one(_: int) -> int:
        fields: dict[str, Any] = {"max_tokens": tokens}
        if not stream:
            return int(complete(server, messages, **fields)["usage"]["completion_tokens"])
        try:
            connection = _post(
                server,
                {"messages": messages, "stream": True, "stream_options": {"include_usage": True}, **fields},
                300,
            )
            with contextlib.closing(connection):
                data = connection.getresponse().read()
            line = next(line for line in reversed(data.split(b"\n")) if b'"completion_tokens"' in line)
            return int(json.loads(line[6:])["usage"]["completion_tokens"])
        except (OSError, http.client.HTTPException, StopIteration) as problem:
            raise NoAnswer(str(problem)) from problem

    with ThreadPoolExecutor(streams) as pool:
        started = time.perf_counter()
        produced = list(pool.map(one, range(streams)))
        seconds = time.perf_counter() - started
    if produced != [tokens] * streams:
        raise NoAnswer(f"{produced} tokens")
    return seconds


@contextlib.contextmanager
def background_streams(
    server: RunningServer, messages: list[Message], streams: int, **fields: Any
) -> Iterator[None]:
    """Keep this many streams running; one that ends is started again."""
    fields.setdefault("max_tokens", 3000)
    stop = threading.Event()
    running = threading.Semaphore(0)

    def one() -> None:
        has_started = False
        while not stop.is_set():
            for _, event in stream_events(server, messages, **fields):
                if stop.is_set():
                    break
                if not has_started and has_output(event):
                    has_started = True
                    running.release()

    with ThreadPoolExecutor(max(streams, 1)) as pool:
        jobs = [pool.submit(one) for _ in range(streams)]
        for _ in range(streams):
            if not running.acquire(timeout=60):
                stop.set()
                raise NoAnswer("the streams did not start")
        try:
            yield
        finally:
            stop.set()
        for job in jobs:
            job.result()
