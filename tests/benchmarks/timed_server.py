"""A server in a process of its own, and what its replies take: seconds by the clock and of its processor time."""

from __future__ import annotations

import http.client
import json
import os
import socket
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    type Messages = list[dict[str, Any]]

TICK: Final = 1 / os.sysconf("SC_CLK_TCK")
LAUNCHER: Final = Path(__file__).parent / "peers" / "slow_step.py"  # gives MLX a fast BLAS


@dataclass
class Figures:
    """Seconds of the rounds: by the clock, and of the server's processor time."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    def add_first(self, turns: Turns) -> None:
        """Count replies of one token."""
        self.wall.append(turns.wall)
        self.processor.append(turns.processor)

    def add_step(self, first: Turns, longer: Turns) -> None:
        """Count a further token, as the difference of replies of one token and longer ones."""
        self.wall.append((longer.wall - first.wall) / (longer.tokens - 1))
        self.processor.append((longer.processor - first.processor) / (longer.tokens - 1))

    def __str__(self) -> str:
        times = [1e3 * each for each in self.wall]
        spent = 1e3 * statistics.mean(self.processor)
        return f"{statistics.median(times):8.1f} ms ({min(times):.1f}-{max(times):.1f}), processor {spent:.1f} ms"


class Turns(NamedTuple):
    """What replies took that were asked for at once: seconds, and of each the part that was cached at least."""

    wall: float
    processor: float
    cached: float
    tokens: float
    """Of a reply, on average."""


class TimedServer:
    """A server that is started with a fast BLAS. `{port}` in its command is where it is to listen.

    `end_tokens` are never sampled, so that a reply has as many tokens as are asked for. A module in `folder` comes
    before an installed one.
    """

    def __init__(
        self,
        name: str,
        python: str | Path,
        command: Sequence[str],
        model: str | None,
        end_tokens: Sequence[int],
        *,
        folder: Path | None = None,
    ) -> None:
        self.name = name
        self._model = model
        self._bias = {str(token): -100 for token in end_tokens}
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port: int = free.getsockname()[1]
        self._process = subprocess.Popen(
            [python, LAUNCHER, *(word.format(port=self._port) for word in command)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **({"PYTHONPATH": str(folder)} if folder else {})},
        )

    def wait(self) -> None:
        """Wait until it answers."""
        while True:
            try:
                self.reply([{"role": "user", "content": "one"}], 1)
            except OSError:
                if self._process.poll() is not None:
                    raise
                time.sleep(0.2)
            else:
                return

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()

    def reply(self, messages: Messages, tokens: int) -> dict[str, Any]:
        """Have a reply of so many tokens generated; return the usage."""
        body: dict[str, Any] = {
            "messages": messages,
            "max_tokens": tokens,
            "temperature": 0,
        }
        if self._bias:
            body["logit_bias"] = self._bias
        if self._model is not None:
            body["model"] = self._model
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=1200)
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        if answer.status != 200:
            raise RuntimeError(f"{self.name}: {answer.status} {text[:500]!r}")
        usage: dict[str, Any] = json.loads(text)["usage"]
        # mlx-vlm's server reports some tokens less for replies at the same time.
        assert 0.9 * tokens <= usage["completion_tokens"] <= tokens, usage
        return usage

    def turns(self, turns: Sequence[Messages], tokens: int) -> Turns:
        """Have all replied to at once."""
        started, before = time.perf_counter(), self._processor_seconds()
        with ThreadPoolExecutor(len(turns)) as pool:
            usages = list(pool.map(lambda turn: self.reply(turn, tokens), turns))
        seconds = time.perf_counter() - started
        cached = min(
            (each.get("prompt_tokens_details") or {}).get("cached_tokens", 0) / each["prompt_tokens"]
            for each in usages
        )
        generated = statistics.mean(each["completion_tokens"] for each in usages)
        return Turns(seconds, self._processor_seconds() - before, cached, generated)

    def many(
        self, messages: Callable[[int], Messages], count: int, clients: int, tokens: int
    ) -> tuple[float, float]:
        """Have so many requests replied to, some at a time; return the seconds, and those of the processor."""
        started, before = time.perf_counter(), self._processor_seconds()
        with ThreadPoolExecutor(clients) as pool:
            for _ in pool.map(lambda at: self.reply(messages(at), tokens), range(count)):
                pass
        return time.perf_counter() - started, self._processor_seconds() - before

    def _processor_seconds(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * TICK
