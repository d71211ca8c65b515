"""The mixed load of a soak test: what clients of all kinds do, well-behaved or not. Knows HTTP; measures nothing."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

WORDS = (
    "river",
    "the",
    "of",
    "seven",
    "light",
    "Oslo",
    "green",
    "and",
    "to",
    "count",
    "東京",
    "why",
    "stone",
    "42",
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
BAD_BODIES = (
    b"{",
    b"[]",
    b"\xff\xfe",
    b'{"messages": 5}',
    b'{"messages": [{"role": "nobody"}]}',
    b'{"messages": [], "n": 7}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -5}',
    b'{"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "banana"}',
    b'{"model": "nobody", "messages": [{"role": "user", "content": "x"}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "guided_regex": "("}',
)


class Client(threading.Thread):
    """One client after another, until `stop` is set. `done` counts what it did, `wrong` what should not have come."""

    def __init__(self, address: tuple[str, int], seed: int, stop: threading.Event) -> None:
        super().__init__(name=f"client-{seed}", daemon=True)
        self.done: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self._address = address
        self._random = random.Random(seed)
        self._stopped = stop
        self._history: list[dict[str, Any]] = []
        self._kinds: list[tuple[int, Callable[[], None]]] = [
            (6, self.chat),
            (6, self.streamed_chat),
            (4, self.conversation),
            (3, self.tools),
            (2, self.structured),
            (1, self.new_template_arguments),
            (3, self.leave),
            (2, self.leave_before_the_first_token),
            (3, self.bad_request),
            (1, self.half_a_request),
            (1, self.long_prompt),
            (1, self.too_long_prompt),
            (4, self.embeddings),
            (2, self.tokenize),
            (1, self.completion),
            (2, self.listings),
            (3, self.responses),
            (3, self.anthropic_messages),
            (2, self.ollama_chat),
        ]

    def run(self) -> None:
        """Do one thing after another."""
        weights = [weight for weight, _ in self._kinds]
        while not self._stopped.is_set():
            [(_, kind)] = self._random.choices(self._kinds, weights)
            try:
                kind()
                self.done[kind.__name__] += 1
            except (OSError, http.client.HTTPException, ValueError) as error:
                if not self._stopped.is_set():
                    self.wrong[f"{kind.__name__}: {type(error).__name__}: {error}"[:200]] += 1

    # What clients do.

    def chat(self) -> None:
        """Ask, and wait for the whole answer."""
        self._expect(self._chat(self._messages()), 200)

    def streamed_chat(self) -> None:
        """Ask, and read the stream to its end."""
        status, data = self._chat(
            self._messages(), stream=True, reasoning_effort=self._random.choice(("low", "high"))
        )
        self._expect((status, data), 200)
        if not data.endswith(b"data: [DONE]\n\n"):
            raise ValueError(f"a stream ended with {data[-80:]!r}")

    def conversation(self) -> None:
        """Go on with the conversation of before, or begin a new one."""
        if len(self._history) > 8:
            self._history = []
        self._history.append({"role": "user", "content": self._text(6)})
        status, data = self._chat(self._history)
        if status == 400:  # the context is full
            self._history = []
            return
        self._expect((status, data), 200)
        self._history.append(json.loads(data)["choices"][0]["message"])

    def tools(self) -> None:
        """Offer a tool, and sometimes insist on it."""
        choice = self._random.choice(("auto", "required"))
        self._expect(self._chat(self._messages(), tools=TOOLS, tool_choice=choice), 200)

    def structured(self) -> None:
        """Want JSON of a schema that no one has sent before."""
        name = f"n{self._random.getrandbits(64):x}"
        schema = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
        wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        self._expect(self._chat(self._messages(), response_format=wanted), 200)

    def new_template_arguments(self) -> None:
        """Give the chat template an argument that no one has given before."""
        arguments = {f"a{self._random.getrandbits(64):x}": "x" * self._random.randrange(20_000)}
        self._expect(self._chat(self._messages(), chat_template_kwargs=arguments), 200)

    def leave(self) -> None:
        """Leave in mid-stream."""
        with self._sent("/v1/chat/completions", {"messages": self._messages(), "stream": True}) as connection:
            connection.recv(self._random.randrange(1, 2000))

    def leave_before_the_first_token(self) -> None:
        """Leave at once."""
        self._sent("/v1/chat/completions", {"messages": self._messages()}).close()

    def bad_request(self) -> None:
        """Send what is refused."""
        status, _ = self._post("/v1/chat/completions", self._random.choice(BAD_BODIES))
        if status not in (400, 404):
            raise ValueError(f"a bad request got {status}")

    def half_a_request(self) -> None:
        """Send the beginning of a request."""
        with socket.create_connection(self._address, timeout=60) as connection:
            connection.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: soak\r\nContent-Length: 500\r\n\r\n{"
            )

    def long_prompt(self) -> None:
        """Ask something that takes most of the context."""
        self._expect(self._chat(self._messages(self._random.randrange(200, 260))), 200, 400)

    def too_long_prompt(self) -> None:
        """Ask far more than the context holds."""
        self._expect(self._chat(self._messages(20_000)), 400)

    def embeddings(self) -> None:
        """Turn texts into vectors."""
        texts = [self._text(self._random.randrange(1, 30)) for _ in range(self._random.randrange(1, 9))]
        body = {"model": "embedder", "input": texts, "truncate": True}
        self._expect(self._post("/v1/embeddings", json.dumps(body).encode()), 200)

    def tokenize(self) -> None:
        """Count tokens."""
        self._expect(self._post("/v1/tokenize", json.dumps({"messages": self._messages()}).encode()), 200)

    def completion(self) -> None:
        """Continue a text."""
        body = {"model": "second", "prompt": self._text(8), "max_tokens": 40}
        self._expect(self._post("/v1/completions", json.dumps(body).encode()), 200)

    def responses(self) -> None:
        """Ask as agents do: have the answer kept, go on from it, and have both forgotten."""
        previous: list[str] = []
        for stream in (False, True):
            body = {"model": "first", "input": self._text(8), "max_output_tokens": 40, "stream": stream}
            body |= {"previous_response_id": previous[-1]} if previous else {}
            status, data = self._post("/v1/responses", json.dumps(body).encode())
            self._expect((status, data), 200)
            answer = json.loads(data.rpartition(b"data: ")[2])
            previous.append((answer.get("response") or answer)["id"])
        for name in previous:
            self._expect(self._post(f"/v1/responses/{name}", b"", "DELETE"), 200)

    def anthropic_messages(self) -> None:
        """Ask as Claude's clients do, with a prefix to cache; now and then read the stream."""
        text = {"type": "text", "text": self._text(20), "cache_control": {"type": "ephemeral"}}
        messages = [{"role": "user", "content": [text]}]
        body = {"model": "second", "messages": messages, "max_tokens": 40}
        self._expect(self._post("/v1/messages/count_tokens", json.dumps(body).encode()), 200)
        body["stream"] = self._random.random() < 0.5
        status, data = self._post("/v1/messages", json.dumps(body).encode())
        self._expect((status, data), 200)
        if body["stream"] and b"message_stop" not in data[-100:]:
            raise ValueError(f"a stream ended with {data[-80:]!r}")

    def ollama_chat(self) -> None:
        """Ask as Ollama's clients do."""
        body = {"model": "first", "messages": self._messages(), "options": {"num_predict": 40}}
        status, data = self._post("/api/chat", json.dumps(body).encode())
        self._expect((status, data), 200)
        if b'"done":true' not in data.replace(b" ", b""):
            raise ValueError(f"a stream ended with {data[-80:]!r}")

    def listings(self) -> None:
        """Read what the server says of itself, over one connection."""
        connection = http.client.HTTPConnection(*self._address, timeout=120)
        try:
            for path in ("/health", "/v1/models", "/metrics", "/activity", "/", "/nowhere"):
                connection.request("GET", path)
                with connection.getresponse() as response:
                    data = response.read()
                self._expect((response.status, data), 404 if path == "/nowhere" else 200)
        finally:
            connection.close()

    # How they do it.

    def _text(self, words: int) -> str:
        return " ".join(self._random.choices(WORDS, k=words))

    def _messages(self, words: int = 12) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self._text(words)}]

    def _chat(self, messages: list[dict[str, Any]], **fields: Any) -> tuple[int, bytes]:
        model = self._random.choice(("first", "second"))
        body = {"model": model, "messages": messages, "max_tokens": self._random.randrange(5, 120), **fields}
        return self._post("/v1/chat/completions", json.dumps(body).encode())

    def _post(self, path: str, body: bytes, method: str = "POST") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(*self._address, timeout=120)
        try:
            connection.request(method, path, body)
            with connection.getresponse() as response:
                return response.status, response.read()
        finally:
            connection.close()

    def _sent(self, path: str, body: dict[str, Any]) -> socket.socket:
        data = json.dumps(body).encode()
        connection = socket.create_connection(self._address, timeout=60)
        connection.sendall(
            b"POST %s HTTP/1.1\r\nHost: soak\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(data))
            + data
        )
        return connection

    def _expect(self, answer: tuple[int, bytes], *statuses: int) -> None:
        if answer[0] not in statuses:
            raise ValueError(f"status {answer[0]}: {answer[1][:120]!r}")
