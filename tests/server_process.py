"""`mlx-backend` as a process of its own, with the demo model: what tests of signals and start-up share."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlx_backend.demo import MODEL_PATH

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterator

COMMAND = [sys.executable, "-m", "mlx_backend"]
ENVIRONMENT = {
    **os.environ,
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    # A server has a thread for each request that may wait: many servers would have more than some systems allow.
    "MLX_BACKEND_MAX_QUEUE": "16",
    "MLX_BACKEND_PORT": "0",  # the default one may be in use, by a server that somebody works with
}


def endless_completion() -> bytes:
    """The body of a request that the demo model writes on and on for, until there is no more room: it may not end."""
    ends = json.loads((MODEL_PATH / "config.json").read_text())["eos_token_id"]
    body = {"prompt": "Once", "stream": True, "logit_bias": {str(token): -100 for token in ends}}
    return json.dumps(body).encode()


@dataclass
class ServerProcess:
    process: subprocess.Popen[str]
    url: str = ""
    printed: str = ""
    log: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def logged(self, words: str) -> str:
        """The next line of the log with these words."""
        while words not in (line := self.log.get(timeout=60)):
            assert line, f"it ended before {words!r} was logged"
        return line

    def log_to_end(self) -> str:
        """The rest of the log, once the process has ended."""
        lines = []
        while line := self.log.get(timeout=60):
            lines.append(line)
        return "".join(lines)


@contextmanager
def server_process(*arguments: str, **environment: str) -> Iterator[ServerProcess]:
    """A server that has loaded its model, on a free port; killed at the end."""
    process = subprocess.Popen(
        [*COMMAND, *arguments, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENT, **environment},
    )
    server = ServerProcess(process)
    assert process.stdout is not None
    assert process.stderr is not None
    errors = process.stderr

    def collect() -> None:
        for line in errors:
            server.log.put(line)
        server.log.put("")

    collector = threading.Thread(target=collect)
    collector.start()
    try:
        for line in process.stdout:
            server.printed += line
            if line.startswith("Listening on "):
                server.url = line.split()[-1]
            if line.startswith("  Try: "):
                break
        else:
            raise AssertionError(f"it ended before it served: {server.printed}{server.log_to_end()}")
        yield server
    finally:
        process.kill()
        process.wait()
        collector.join()
        process.stdout.close()
        process.stderr.close()


def ended(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself."""
    environment = {**ENVIRONMENT, **environment}
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, env=environment, timeout=120
    )
