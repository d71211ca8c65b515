"""The servers that are compared, how each is started, and the model they all serve."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from benchmarks.peer_environments import installed, python_of

from mlx_backend.demo import MODEL_PATH

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

type Message = dict[str, Any]
type ModelVariant = Literal["real", "endless", "slow"]
"""The demo model as it is; one that never ends its reply; the same at 10 ms a step and with steps counted."""

LAUNCHER: Final = Path(__file__).with_name("slow_step.py")
STEP_SECONDS: Final = 0.01
START_SECONDS: Final = 120.0


@dataclass(frozen=True)
class System:
    """A server: the environment it lives in (None: this project's own), its module and options."""

    name: str
    environment: str | None
    command: tuple[str, ...]
    model: str = "{model}"
    variables: Mapping[str, str] = field(default_factory=dict)
    rows: frozenset[str] | None = None
    reasoning_fields: Mapping[str, Any] = field(default_factory=dict)
    """Request fields that make it give the reply the others give by default."""

    def is_installed(self) -> bool:
        """Whether it is installed."""
        return self.environment is None or installed(self.environment)


OURS: Final = System(
    "mlx-backend",
    None,
    ("mlx_backend", "--model", "{model}", "--model-id", "demo", "--port", "{port}"),
    model="demo",
)
_MLX_VLM: Final = ("mlx_vlm.server", "--model", "{model}", "--host", "127.0.0.1", "--port", "{port}")
_RAPID: Final = (
    *("rapid_mlx.cli", "serve", "{model}", "--host", "127.0.0.1", "--port", "{port}"),
    *("--served-model-name", "demo", "--tool-call-parser", "harmony", "--reasoning-parser", "gpt_oss"),
)
_THINKING: Final = {"chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "medium"}}
SYSTEMS: Final = (
    OURS,
    System(
        "mlx-backend --prompt-cache-dir",
        None,
        (*OURS.command, "--prompt-cache-dir", "prompts"),
        model=OURS.model,
        rows=frozenset({"reuse"}),
    ),
    System(
        "mlx-backend --cache-gb 0.02",
        None,
        (*OURS.command, "--cache-gb", "0.02"),
        model=OURS.model,
        rows=frozenset({"memory"}),
    ),
    System(
        "mlx_lm.server",
        "mlx-lm",
        ("mlx_lm.server", "--model", "{model}", "--host", "127.0.0.1", "--port", "{port}"),
        model="default_model",
    ),
    System("mlx-vlm", "mlx-vlm", _MLX_VLM),
    System(
        "mlx-vlm, APC_ENABLED=1",
        "mlx-vlm",
        _MLX_VLM,
        variables={"APC_ENABLED": "1"},
        rows=frozenset({"reuse"}),
    ),
    System("Rapid-MLX", "rapid-mlx", _RAPID, model="demo", reasoning_fields=_THINKING),
    System(
        "Rapid-MLX --no-gc-control",
        "rapid-mlx",
        (*_RAPID, "--no-gc-control"),
        model="demo",
        rows=frozenset({"cost", "first", "stall", "crowd", "arrivals", "behind"}),
        reasoning_fields=_THINKING,
    ),
)


class RunningServer:
    """A server process that answers requests."""

    def __init__(self, system: System, variant: ModelVariant, folder: Path, home: Path) -> None:
        self.system, self.variant, self.name = system, variant, system.name
        self._folder, self._home = folder, home
        self._steps = home / "steps"
        self.start()

    def start(self) -> None:
        """Start the process and wait for its first reply."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        values = {"model": str(self._folder), "port": str(self.port)}
        self.model = self.system.model.format(**values)
        variables = {
            **os.environ,
            "HOME": str(self._home),
            "HF_HUB_OFFLINE": "1",
            "OPENBLAS_NUM_THREADS": "1",
            **self.system.variables,
        }
        if self.variant == "slow":
            variables |= {"BENCH_STEP_SECONDS": str(STEP_SECONDS), "BENCH_STEP_FILE": str(self._steps)}
        python = sys.executable if self.system.environment is None else python_of(self.system.environment)
        with (self._home / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [python, LAUNCHER, *(word.format(**values) for word in self.system.command)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self._home,
                env=variables,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                last = (self._home / "log").read_text(errors="replace").splitlines()[-1:]
                raise RuntimeError(f"{self.name} did not start: {last}")
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        body = {"model": self.model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            return connection.getresponse().status == 200
        return False

    def stop(self) -> None:
        """Stop the process, with SIGTERM if that is enough."""
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def restart(self) -> None:
        """Stop it and start it again, with what it left on disk."""
        self.stop()
        self.start()

    def steps(self) -> int:
        """Count the model steps run so far (flavour slow only)."""
        return self._steps.stat().st_size

    def resident_mib(self) -> float:
        """Return the resident memory of the process."""
        ps = subprocess.run(
            ["ps", "-o", "rss=", "-p", str(self.process.pid)], capture_output=True, check=True
        )
        return int(ps.stdout) / 1024

    def processor_seconds(self) -> float | None:
        """Return the processor time the process has used; None where the system does not say (not Linux)."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        if not stat.exists():
            return None
        user, kernel = stat.read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(kernel)) / os.sysconf("SC_CLK_TCK")


class Bare:
    """The bare loop, in a process of its own."""

    name = "bare BatchGenerator"

    def __init__(self, folder: Path, question: str) -> None:
        command = [
            sys.executable,
            *map(str, (LAUNCHER, Path(__file__).with_name("bare.py"), folder)),
            question,
        ]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        assert self._read_line() == "ready"

    def seconds(self, streams: int, tokens: int) -> tuple[float, float]:
        """Run the loop once; return the seconds it took and the processor time."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"streams": streams, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        taken, worked = map(float, self._read_line().split())
        return taken, worked

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        line: str = self._process.stdout.readline()
        return line.strip()

    def stop(self) -> None:
        """Stop it by closing its input."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Fleet:
    """The servers of one flavour, all up at the same time so that rounds can alternate between them."""

    def __init__(self, names: list[str], rounds: int) -> None:
        self.rounds = rounds
        self._names = names
        self._scratch = Path(tempfile.mkdtemp(prefix="bench-peers-"))
        self._up: list[RunningServer] = []
        self._bare: list[Bare] = []
        self._broken: set[str] = set()

    def servers(self, row: str, variant: ModelVariant) -> list[RunningServer]:
        """Start what the row needs, stop what it does not, and return them in the order of the table."""
        wanted = [
            system
            for system in SYSTEMS
            if system.name in self._names
            and (system.rows is None or row in system.rows)
            and system.is_installed()
            and system.name not in self._broken
        ]
        for server in self._up:
            if server.variant != variant or server.system not in wanted:
                server.stop()
        self._up = [server for server in self._up if server.process.poll() is None]
        names = {server.name for server in self._up}
        for system in wanted:
            if system.name not in names:
                home = Path(tempfile.mkdtemp(dir=self._scratch))
                try:
                    self._up.append(RunningServer(system, variant, self.folder(variant), home))
                except RuntimeError as problem:
                    self._broken.add(system.name)
                    print(f"({problem})", flush=True)
        order = [system.name for system in SYSTEMS]
        return sorted(self._up, key=lambda server: order.index(server.name))

    def bare(self, question: str) -> Bare:
        """Start the bare loop on the endless model."""
        self._bare.append(Bare(self.folder("endless"), question))
        return self._bare[-1]

    def folder(self, variant: ModelVariant) -> Path:
        """Return the model's folder, written on first use."""
        folder = self._scratch / "gpt-oss-demo"
        if variant == "real":
            return MODEL_PATH
        if not folder.exists():
            shutil.copytree(MODEL_PATH, folder)
            subprocess.run(
                [sys.executable, Path(__file__).with_name("endless.py"), folder], check=True, env=os.environ
            )
        return folder

    def close(self) -> None:
        """Stop all and remove their files."""
        for server in self._up:
            server.stop()
        for bare in self._bare:
            bare.stop()
        shutil.rmtree(self._scratch, ignore_errors=True)


@contextlib.contextmanager
def fleet(names: list[str], rounds: int) -> Iterator[Fleet]:
    """Run the servers for as long as the benchmark runs."""
    one = Fleet(names, rounds)
    try:
        yield one
    finally:
        one.close()


def missing() -> list[str]:
    """Name the systems that are not installed."""
    return [system.name for system in SYSTEMS if not system.is_installed()]
