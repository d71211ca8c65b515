"""What somebody else waits while the server is attacked: one attack after another, a normal client beside each.

    python tests/benchmarks/bench_attacks.py [ATTACK …] [--tree CHECKOUT …] [--seconds 30]

Each attack has a server process of its own, which serves the demo model; with several checkouts of the project it is
measured on each in turn. The normal client sends a small chat every half second, however long the earlier ones take,
and asks for /health; it has an address of its own. Then the attack stops, and memory is read after five seconds; then
it begins again, and the server is sent SIGTERM three seconds later. Linux only: it reads /proc, and uses several
addresses of 127.0.0.0/8.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.attacks import ATTACKS
from harmony_data import GPT_OSS_TEMPLATE

from mlx_backend.demo import MODEL_PATH

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
MAX_MEMORY = 12 << 30
"""Of address space: a server that wants more gets no more."""
DRAIN_SECONDS = 1
"""How long running replies get when the server is stopped: what a stop takes beyond it is in its way."""
EVERY_SECONDS = 0.5
STOP_SECONDS = 45.0
NORMAL_ADDRESS = "127.0.1.1"
"""Of the normal client. The attacks come from others: what one address sends waits in one queue."""
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 16}


@dataclass
class Waits:
    """How long the requests of the normal client to one address took, in seconds, and what became of the others."""

    seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def longest(self) -> float:
        return max(self.seconds, default=0.0)


class NormalClient:
    """Sends its requests on time, whatever the earlier ones do; those that are not answered at the end count too."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._ends = threading.Event()
        self._guard = threading.Lock()
        self.chats, self.health = Waits(), Waits()
        self._threads: list[threading.Thread] = []
        self._running: dict[float, Waits] = {}
        self._clock = threading.Thread(target=self._run)
        self._clock.start()

    def _run(self) -> None:
        body = json.dumps(QUESTION).encode()
        due = time.monotonic()
        while not self._ends.wait(max(0.0, due - time.monotonic())):
            due += EVERY_SECONDS
            for waits, request in (
                (self.chats, ("POST", "/v1/chat/completions", body)),
                (self.health, ("GET", "/health", None)),
            ):
                self._threads.append(threading.Thread(target=self._send, args=(waits, request), daemon=True))
                self._threads[-1].start()

    def _send(self, waits: Waits, request: tuple[str, str, bytes | None]) -> None:
        connection = http.client.HTTPConnection(
            "127.0.0.1", self._port, timeout=90, source_address=(NORMAL_ADDRESS, 0)
        )
        error = ""
        with self._guard:
            started = time.monotonic()
            self._running[started] = waits
        try:
            connection.request(*request, headers={"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read()
            error = "" if response.status == 200 else str(response.status)
        except (OSError, http.client.HTTPException) as failure:
            error = type(failure).__name__
        finally:
            connection.close()
        with self._guard:
            if self._running.pop(started, None) is None:  # given up
                return
            waits.seconds.append(time.monotonic() - started)
            if error:
                waits.errors.append(error)

    def end(self, patience: float) -> None:
        """Send no more, and wait for what has been sent, but not longer than so many seconds."""
        self._ends.set()
        self._clock.join()
        deadline = time.monotonic() + patience
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._guard:
            for started, waits in self._running.items():
                waits.seconds.append(time.monotonic() - started)
                waits.errors.append("no answer")
            self._running.clear()


@dataclass
class ServerProcess:
    """A server under attack."""

    process: subprocess.Popen[bytes]
    port: int

    def memory(self, name: str) -> float:
        """A line of its status (VmHWM: the most; VmRSS: now), in megabytes; 0 if it has ended."""
        with suppress(OSError):
            for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
                if line.startswith(f"{name}:"):
                    return int(line.split()[1]) / 1024
        return 0.0

    def stop(self) -> str:
        """Send SIGTERM; how long it took to end, and with which status if it was not 0."""
        started = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return f"> {STOP_SECONDS:g} s"
        took = f"{time.monotonic() - started:.1f} s"
        return took if status == 0 else f"{took} (status {status})"


@contextmanager
def serving(tree: Path, attack: str) -> Iterator[ServerProcess]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlx_backend", "serve", "--model", str(MODEL_PATH), "--port", str(port)]
    command += ["--drain-seconds", str(DRAIN_SECONDS)]
    if attack == "tool messages":
        command += ["--chat-template", str(GPT_OSS_TEMPLATE)]
    with tempfile.TemporaryFile() as log:
        errors: IO[bytes] | int = subprocess.PIPE if attack == "log unread" else log
        process = subprocess.Popen(
            command,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1"},
            stdout=log,
            stderr=errors,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY)),
        )
        server = ServerProcess(process, port)
        try:
            await_answer(server)
            yield server
        finally:
            process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()
            log.seek(0)
            lines = log.read().decode(errors="replace").splitlines()
            if any("Traceback" in line for line in lines):
                print("\n".join(["    the server's log:", *lines[-15:]]), file=sys.stderr)


def await_answer(server: ServerProcess) -> None:
    """Wait until it answers a chat."""
    deadline = time.monotonic() + 90
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=90)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(QUESTION))
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        if server.process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("The server did not start.")
        time.sleep(0.1)


class Attacker:
    """One attack in a process of its own, from now until `end`."""

    def __init__(self, name: str, port: int, seconds: float) -> None:
        end_tokens = json.loads((MODEL_PATH / "generation_config.json").read_text())["eos_token_id"]
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("attacks.py")), name, str(port), str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "END_TOKENS": json.dumps(end_tokens)},
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def begin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def result(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self._process.wait()
        found: dict[str, Any] = json.loads(line or '{"answers": {}, "seconds": 0}')
        return found

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass
class Row:
    """What one attack did to one state of the server. Seconds, megabytes."""

    median: float
    longest: float
    health: float
    errors: str
    answers: str
    seconds: float
    peak: float
    after: float
    stop: str

    def __str__(self) -> str:
        return (
            f"{self.median:.2f} s, {self.longest:.1f} s | {self.health:.1f} s | {self.errors or '–'} | {self.answers}"
            f" in {self.seconds:.1f} s | {self.peak:.0f}, {self.after:.0f} MB | {self.stop}"
        )


def measure(tree: Path, attack: str, seconds: float) -> Row:
    with serving(tree, attack) as server:
        attacker = Attacker(attack, server.port, seconds)
        client = NormalClient(server.port)
        time.sleep(1)
        attacker.begin()
        result = attacker.result()
        client.end(patience=5)
        time.sleep(5)
        peak, after = server.memory("VmHWM"), server.memory("VmRSS")
        again = Attacker(attack, server.port, STOP_SECONDS)
        again.begin()
        time.sleep(3)
        stop = server.stop()
        again.end()
    chats = client.chats
    return Row(
        statistics.median(chats.seconds or [0.0]),
        chats.longest,
        client.health.longest,
        counted([*chats.errors, *(f"/health {each}" for each in client.health.errors)]),
        ", ".join(f"{count} × {answer}" for answer, count in sorted(result["answers"].items())),
        result["seconds"],
        peak,
        after,
        stop,
    )


def counted(words: list[str]) -> str:
    return ", ".join(f"{words.count(word)} × {word}" for word in sorted(set(words)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "attacks", nargs="*", metavar="ATTACK", help=f"one of: {', '.join(ATTACKS)}; all by default"
    )
    parser.add_argument(
        "--tree", type=Path, nargs="+", default=[ROOT], help="checkouts of the project, in turn"
    )
    parser.add_argument("--seconds", type=float, default=30, help="how long an attack lasts at most")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    print(
        "attack | chats wait (median, longest) | /health | errors | the attack's answers | memory (most, after) | stop"
    )
    for attack in options.attacks or ATTACKS:
        for tree in options.tree:
            print(f"{attack} [{tree.name}] | {measure(tree, attack, options.seconds)}", flush=True)


if __name__ == "__main__":
    main()
