"""The attacks of bench_attacks.py, each a program of its own: what a hostile or broken client does to a server.

    python tests/benchmarks/attacks.py NAME PORT SECONDS

Makes its requests, prints `ready`, waits for a line on standard input, attacks, and prints a JSON object: how many of
its requests ended with which status, and after how many seconds the last one did. It goes on until its requests are
answered, and at most SECONDS. Its addresses are 127.0.0.2 and up, which Linux has without more.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import socket
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

CHAT = "/v1/chat/completions"
ADDRESS = "127.0.0.2"
MEGABYTE = 1_000_000


@dataclass
class Target:
    """The server, until when it is attacked, and what it has answered."""

    port: int
    until: float
    answers: Counter[str]
    last: float = 0.0

    @property
    def seconds_left(self) -> float:
        return self.until - time.monotonic()

    def connect(self, address: str = ADDRESS, receive_buffer: int | None = None) -> socket.socket:
        connection = socket.socket()
        connection.settimeout(max(0.1, self.seconds_left))
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.bind((address, 0))
        connection.connect(("127.0.0.1", self.port))
        return connection

    def note(self, answer: object) -> None:
        self.answers[str(answer)] += 1
        self.last = time.monotonic()

    def post(self, path: str, body: bytes) -> None:
        """Send one request and note the status of its answer."""
        if self.seconds_left <= 0:
            self.note("not sent")
            return
        connection = HTTPConnection("127.0.0.1", self.port, source_address=(ADDRESS, 0))
        connection.timeout = self.seconds_left
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read()
            self.note(response.status)
        except TimeoutError:
            self.note("no answer")
        except (OSError, HTTPException) as error:
            self.note(type(error).__name__)
        finally:
            connection.close()


type Attack = Callable[[Target], None]


def chat(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 8, **fields}


def head_of(body: bytes, path: str = CHAT) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()


def requests(at_once: int, bodies: Sequence[Any], path: str = CHAT) -> Attack:
    """Send these requests, so many at once."""
    encoded = [json.dumps(body).encode() for body in bodies]

    def attack(target: Target) -> None:
        waiting = iter(encoded)
        lock = threading.Lock()

        def send() -> None:
            while True:
                with lock:
                    body = next(waiting, None)
                if body is None:
                    return
                target.post(path, body)

        in_threads(at_once, send)

    return attack


def in_threads(count: int, call: Callable[[], None]) -> None:
    threads = [threading.Thread(target=call, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# -- connections --------------------------------------------------------------------------------------------


def slow_senders() -> Attack:
    """320 requests of which a byte comes every second."""
    body = json.dumps(chat("hello " * 100)).encode()

    def attack(target: Target) -> None:
        connections = [target.connect() for _ in range(320)]
        for connection in connections:
            connection.sendall(head_of(body))
        for at in range(len(body)):
            for connection in list(connections):
                try:
                    connection.send(body[at : at + 1])
                    connection.setblocking(False)
                    if answer := connection.recv(12):
                        target.note(answer[9:].decode())
                        connections.remove(connection)
                except BlockingIOError:
                    connection.setblocking(True)
                except OSError as error:
                    target.note(type(error).__name__)
                    connections.remove(connection)
            if not connections or target.seconds_left < 1:
                break
            time.sleep(1)
        target.answers["still sending"] += len(connections)

    return attack


def slow_readers() -> Attack:
    """320 long streams of which a byte is read every second."""
    body = json.dumps(
        {"prompt": "<|start|>assistant<|channel|>final<|message|>one", "max_tokens": 4000, "stream": True}
        | {"logprobs": 5, "temperature": 1.5, "logit_bias": {str(token): -100 for token in END_TOKENS}}
    ).encode()

    def attack(target: Target) -> None:
        connections = [target.connect(receive_buffer=2048) for _ in range(320)]
        for connection in connections:
            with suppress(OSError):
                connection.sendall(head_of(body, "/v1/completions") + body)
        begun: set[socket.socket] = set()
        while connections and target.seconds_left > 1:
            for connection in list(connections):
                connection.setblocking(False)
                try:
                    piece = connection.recv(1)
                except BlockingIOError:
                    continue
                except OSError:
                    piece = b""
                if piece:
                    begun.add(connection)
                else:
                    target.note("ended by the server")
                    connections.remove(connection)
            time.sleep(1)
        target.answers["still being read"] += len(begun & set(connections))
        target.answers["not begun"] += len(set(connections) - begun)

    return attack


def sockets(*addresses: str) -> Attack:
    """2,500 connections that send the beginning of a request and no more."""

    def attack(target: Target) -> None:
        held: list[socket.socket] = []
        addressed = itertools.cycle(addresses)
        for _ in range(2500):
            try:
                connection = target.connect(next(addressed))
                connection.sendall(b"GET /health HTTP/1.1\r\n")
            except OSError as error:
                target.note(type(error).__name__)
                continue
            held.append(connection)
            if target.seconds_left < 1:
                break
        target.answers["opened"] = len(held)
        while held and target.seconds_left > 1:
            for connection in list(held):
                connection.setblocking(False)
                try:
                    answer = connection.recv(12)[9:].decode() or "closed"
                except BlockingIOError:
                    continue
                except OSError as error:
                    answer = type(error).__name__
                target.note(answer)
                held.remove(connection)
            time.sleep(1)
        target.answers["still open"] = len(held)

    return attack


def leavers() -> Attack:
    """200 clients that open a stream, leave at once, and come again."""
    body = json.dumps(chat("Tell me a long story.", stream=True, max_tokens=500)).encode()
    request = head_of(body) + body

    def attack(target: Target) -> None:
        def leave() -> None:
            while target.seconds_left > 0:
                try:
                    with target.connect() as connection:
                        connection.sendall(request)
                    target.note("left")
                except OSError as error:
                    target.note(type(error).__name__)
                time.sleep(0.5)

        in_threads(200, leave)

    return attack


def log_lines() -> Attack:
    """3,000 small requests that are refused, each of which is logged; nobody reads the log."""
    return requests(8, [{"messages": [], "user": str(at)} for at in range(3000)])


# -- requests -----------------------------------------------------------------------------------------------


def words(size: int, start: int = 0) -> str:
    """Text of so many characters."""
    pieces = (f"word{start + at} of a long text, " for at in itertools.count())
    parts: list[str] = []
    length = 0
    while length < size:
        parts.append(next(pieces))
        length += len(parts[-1])
    return "".join(parts)[:size]


def tool(at: int, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"tool_{at}", "parameters": parameters}}


def many_tools() -> dict[str, Any]:
    text = {"type": "string", "description": "a value"}
    schema = {"type": "object", "properties": {f"field_{at}": text for at in range(5)}}
    return chat("hello", tools=[tool(at, schema) for at in range(5000)], tool_choice="required")


def intersections(start: int) -> dict[str, Any]:
    def schema(seed: int) -> dict[str, Any]:
        patterns = [{"pattern": f"^(a|b)*a(a|b){{{at + seed % 7}}}$"} for at in range(29)]
        return {"type": "object", "properties": {f"x{seed}": {"type": "string", "allOf": patterns}}}

    return chat("hello", tools=[tool(at, schema(start + at)) for at in range(30)], tool_choice="required")


def tool_messages(count: int) -> Iterator[dict[str, Any]]:
    yield {"role": "user", "content": "Go."}
    for at in range(count // 2):
        call = {"id": f"call_{at}", "type": "function"}
        call["function"] = {"name": "look", "arguments": '{"at": 1}'}  # type: ignore[assignment]  # JSON
        yield {"role": "assistant", "content": None, "tool_calls": [call]}
        yield {"role": "tool", "tool_call_id": f"call_{at}", "content": "nothing"}


def choices(seed: int) -> list[str]:
    return [f"choice {seed} {at:04} {words(170, at)}" for at in range(1000)]


def dialogue(count: int) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[at % 2], "content": "hello"} for at in range(count + 1)]


END_TOKENS: list[int] = json.loads(os.environ.get("END_TOKENS", "[]"))

ATTACKS: dict[str, Callable[[], Attack]] = {
    "slow senders": slow_senders,
    "slow readers": slow_readers,
    "leavers": leavers,
    "sockets, one address": lambda: sockets(ADDRESS),
    "sockets, ten addresses": lambda: sockets(*(f"127.0.0.{at}" for at in range(2, 12))),
    "log unread": log_lines,
    "long chats": lambda: requests(10, [chat(words(4 * MEGABYTE, at)) for at in range(10)]),
    "template arguments": lambda: requests(
        20, [chat("hello", chat_template_kwargs={"x": f"{at}" * 3_950_000}) for at in range(10, 30)]
    ),
    "choices": lambda: requests(20, [chat("hello", guided_choice=choices(at)) for at in range(20)]),
    "effort lines": lambda: requests(
        2,
        [
            {
                "messages": [
                    {"role": "system", "content": "Reasoning: high\n" * 480_000},
                    *chat("hi")["messages"],
                ]
            }
        ]
        * 2,
    ),
    "messages": lambda: requests(2, [{"messages": dialogue(50_000), "max_tokens": 8}] * 2),
    "tool messages": lambda: requests(2, [{"messages": [*tool_messages(8_000)], "max_tokens": 8}] * 2),
    "tools": lambda: requests(2, [many_tools()] * 2),
    "markers": lambda: requests(2, [chat("</think>" * 900_000)] * 2),
    "tokenize": lambda: requests(
        4, [{"prompt": "word of a text " * 520_000, "return_token_strs": True}] * 4, "/v1/tokenize"
    ),
    "tokenize, allowed": lambda: requests(
        4, [{"prompt": " the" * 262_000, "return_token_strs": True}] * 8, "/v1/tokenize"
    ),
    "detokenize": lambda: requests(
        4, [{"tokens": [at % 1000 for at in range(1 << 20)]}] * 8, "/v1/detokenize"
    ),
    "allOf": lambda: requests(2, [intersections(at) for at in (0, 30)]),
}


def main() -> None:
    name, port, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    attack = ATTACKS[name]()
    print("ready", flush=True)
    sys.stdin.readline()
    started = time.monotonic()
    target = Target(port, started + seconds, Counter())
    attack(target)
    seconds = (target.last or time.monotonic()) - started
    print(json.dumps({"answers": target.answers, "seconds": seconds}), flush=True)
    os._exit(0)  # threads that still wait are not waited for


if __name__ == "__main__":
    main()
