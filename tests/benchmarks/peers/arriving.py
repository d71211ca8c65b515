"""Clients that keep sending new prompts and leave at the first token, until standard input ends.

    python arriving.py PORT CLIENTS FIELDS

Writes a line when all have begun, and then how many first tokens there were.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import threading
import time
from typing import Any

SYLLABLES = (
    "ba",
    "de",
    "fi",
    "go",
    "lu",
    "mo",
    "ne",
    "ra",
    "si",
    "ber",
    "dal",
    "fon",
    "gin",
    "lup",
    "mar",
    "nes",
    "pol",
)
MAX_WORDS = 300
SECONDS = 15.0
"""How long a client waits for a first token."""


def arrive(port: int, fields: dict[str, Any], seed: int, done: threading.Event, tokens: list[int]) -> None:
    """Send one prompt after the other."""
    words = random.Random(seed)
    while not done.is_set():
        text = " ".join("".join(words.choices(SYLLABLES, k=2)) for _ in range(words.randint(20, MAX_WORDS)))
        body = {"messages": [{"role": "user", "content": text}], "stream": True, **fields}
        data = json.dumps(body).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
                connection.sendall(head.encode() + data)
                tokens[0] += _has_token(connection, time.monotonic() + SECONDS)
        except OSError:
            time.sleep(0.1)  # refused


def _has_token(connection: socket.socket, deadline: float) -> bool:
    """Wait for a delta with text."""
    seen = b""
    while time.monotonic() < deadline and (data := connection.recv(65536)):
        seen += data
        for line in seen.split(b"\n"):
            if not line.startswith(b"data: {"):
                continue
            try:
                choices = json.loads(line[6:]).get("choices") or [{}]
            except ValueError:  # half of it
                continue
            if any(
                (choices[0].get("delta") or {}).get(name)
                for name in ("content", "reasoning_content", "reasoning")
            ):
                return True
    return False


def main() -> None:
    """Have them arrive."""
    port, count, fields = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    done, tokens = threading.Event(), [0]
    threads = [
        threading.Thread(target=arrive, args=(port, fields, seed, done, tokens), daemon=True)
        for seed in range(count)
    ]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    print("begun", flush=True)
    sys.stdin.read()
    done.set()
    print(tokens[0], flush=True)


if __name__ == "__main__":
    main()
