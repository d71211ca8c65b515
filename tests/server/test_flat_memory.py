"""A server that has filled its caches holds as much after ever new requests as before them.

Counted is what the process has allocated and not freed, beside MLX's buffers: Python's objects too, which come from
malloc here. What malloc keeps for itself is not part of it, nor is time: `make soak` looks at the process as a whole.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from embedding_models import write_roberta

from mlx_backend.demo import MODEL_PATH

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLED_SERVER = Path(__file__).parents[1] / "soak" / "sampled_server.py"
WARM_UP, ROUNDS = 2, 3
MAX_GROWTH = 512 << 10  # bytes in all rounds; each sends more than that

has_mallinfo = sys.platform.startswith("linux") and os.confstr("CS_GNU_LIBC_VERSION")
pytestmark = pytest.mark.skipif(not has_mallinfo, reason="only glibc says how much it has given out")


class SampledServer:
    """A server, with the address of its API, that tells what it holds."""

    def __init__(self, process: subprocess.Popen[str], port: int, samples: Path) -> None:
        self._process = process
        self._samples = samples
        self.port = port

    def post(self, path: str, expected: int = 200, **body: Any) -> None:
        request = Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode())
        try:
            with urlopen(request, timeout=120) as response:
                status, answer = response.status, response.read()
        except HTTPError as error:
            status, answer = error.code, error.read()
        assert status == expected, answer

    def chat(self, content: str = "Hi", **fields: Any) -> None:
        messages = [{"role": "user", "content": content}]
        self.post("/v1/chat/completions", messages=messages, max_tokens=1, **fields)

    def leave(self) -> None:
        """Ask for a stream, and leave when it begins."""
        body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True}).encode()
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            connection.recv(100)

    def live_bytes(self) -> int:
        """What it has allocated, without MLX's buffers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "sampled\n"
        sample = json.loads(self._samples.read_text().splitlines()[-1])
        live: int = sample["malloc_used"] - sample["mlx_active"] - sample["mlx_cache"]
        return live


@contextmanager
def sampled_server(folder: Path) -> Iterator[SampledServer]:
    samples = folder / "samples.jsonl"
    command = [sys.executable, str(SAMPLED_SERVER), str(samples), "0", "serve", "--port", "0"]
    options = ["--memory-gb", "0.1", "--cache-gb", "0", "--no-prewarm", "--log-level", "error"]
    process = subprocess.Popen(
        [*command, *options, "--model", str(MODEL_PATH), "--embedding-model", str(folder / "embedder")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONMALLOC": "malloc", "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    port = 0
    try:
        for line in process.stdout:
            if line.startswith("Listening on "):
                port = int(line.split()[-1].rpartition(":")[2])
            if line.startswith("  Try: "):
                break
        yield SampledServer(process, port, samples)
    finally:
        process.kill()
        process.communicate()


def send_what_nobody_has_sent_before(server: SampledServer, number: int) -> None:
    for each in range(6):
        name = f"n{number}_{each}"
        properties = {f"{name}_{at}": {"type": "string"} for at in range(8)}
        schema = {"type": "object", "properties": properties}
        wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        server.chat(response_format=wanted)
        if each % 3:
            continue
        server.chat(chat_template_kwargs={name: "x" * 20_000})
        tools = [{"type": "function", "function": {"name": name, "parameters": schema}}]
        server.chat(tools=tools, tool_choice="required")
        server.chat(f"{name} " + "river stone " * 10_000, expected=400)  # tokenised, and too long
        server.post("/v1/embeddings", model="embedder", input=[name, "river"], truncate=True)
        server.leave()
    server.chat()


def test_what_a_server_holds_stays_the_same_whatever_new_is_sent(tmp_path: Path) -> None:
    write_roberta(tmp_path / "embedder")
    with sampled_server(tmp_path) as server:
        held = []
        for number in range(WARM_UP + ROUNDS):
            send_what_nobody_has_sent_before(server, number)
            held.append(server.live_bytes())
    assert held[-1] - held[WARM_UP - 1] < MAX_GROWTH, held
