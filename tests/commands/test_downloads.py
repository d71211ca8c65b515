"""`mlx-backend` with a model that has to be downloaded, as a person sees it: progress, /health, Ctrl-C, errors."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from hub_server import Fault, HubServer, hub
from terminal_process import terminal_process

from mlx_backend.demo import MODEL_PATH

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DEMO = "maker/demo"
WEIGHTS = "model.safetensors"


@pytest.fixture
def server() -> Iterator[HubServer]:
    files: dict[str, bytes | int | None] = {file.name: file.read_bytes() for file in MODEL_PATH.iterdir()}
    with hub({DEMO: files}) as server:
        server.piece = 1 << 18
        yield server


class Start:
    """A server that is being started with a Hub on loopback; `errors` is its standard error so far."""

    def __init__(
        self, hub: HubServer, home: Path, *arguments: str, stderr: int = subprocess.PIPE, **environment: str
    ):
        kept = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlx_backend", "--port", "0", *(arguments or ("--model", DEMO))],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={
                **kept,
                "HF_ENDPOINT": hub.url,
                "HF_HOME": str(home),
                "PYTHONUNBUFFERED": "1",
                **environment,
            },
        )
        assert self.process.stdout is not None
        self.url = ""

    def __enter__(self) -> Start:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def read_to(self, words: str) -> str:
        assert self.process.stdout is not None
        read = ""
        for line in self.process.stdout:
            read += line
            if line.startswith("Listening on "):
                self.url = line.split()[-1]
            if words in line:
                return read
        raise AssertionError(f"it ended before {words!r}: {read}")

    def health(self) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=60) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)


class Gate:
    """Holds the download of the weights back when so many bytes have been sent."""

    def __init__(self, hub: HubServer, after: int) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self._after = after
        hub.on_body = self._wait

    def _wait(self, name: str, sent: int) -> None:
        if name == WEIGHTS and sent >= self._after:
            self.reached.set()
            self.opened.wait(60)


def test_a_download_shows_in_health_ends_with_ctrl_c_and_goes_on_at_the_next_start(
    server: HubServer, tmp_path: Path
) -> None:
    gate = Gate(server, after=3 << 20)
    with Start(server, tmp_path) as start:
        start.read_to("Listening on ")
        assert gate.reached.wait(60)
        total = sum(file.stat().st_size for file in MODEL_PATH.iterdir())
        status, health = start.health()
        (model,) = health["models"]
        assert (status, health["status"]) == (503, "downloading")
        assert model["state"] == "downloading"
        assert model["total_bytes"] == total
        while model["bytes"] < 2 << 20:  # the last of what was sent may be on its way
            (model,) = start.health()[1]["models"]
        assert model["percent"] == 100 * model["bytes"] // total
        start.process.send_signal(signal.SIGINT)
        start.read_to("Stopping")
        _, errors = start.process.communicate(timeout=60)
        gate.opened.set()
        assert start.process.returncode == 0
        assert "Traceback" not in errors
        assert "could not" not in errors
    there = max(
        partial.stat().st_size for partial in tmp_path.rglob("*.incomplete")
    )  # small files may be among them
    assert there >= 2 << 20
    with Start(server, tmp_path) as start:
        start.read_to("  Try: ")
        assert start.health() == (200, start.health()[1])
        start.process.send_signal(signal.SIGINT)
        _, errors = start.process.communicate(timeout=60)
    assert [begin for name, begin in server.ranges if name == WEIGHTS] == [0, there]
    assert re.search(r"Downloading maker/demo: \d\.\d MB more; \d\.\d MB are there\.", errors)
    assert all(re.match(r"[-\d]+ [:,\d]+ (INFO|WARNING) ", line) for line in errors.splitlines()), errors
    assert "HTTP" not in errors


def test_a_second_ctrl_c_during_a_download_ends_it_now(server: HubServer, tmp_path: Path) -> None:
    gate = Gate(server, after=1 << 20)
    with Start(server, tmp_path) as start:
        start.read_to("Listening on ")
        assert gate.reached.wait(60)
        for _ in range(2):
            start.process.send_signal(signal.SIGINT)
        _, errors = start.process.communicate(timeout=60)
        gate.opened.set()
    assert start.process.returncode in (0, 130)
    assert "Traceback" not in errors


def test_a_model_that_a_request_names_is_downloaded_the_same_way(server: HubServer, tmp_path: Path) -> None:
    gate = Gate(server, after=3 << 20)
    with Start(server, tmp_path, "--model", str(MODEL_PATH), "--allow-download") as start:
        start.read_to("  Try: ")
        body = json.dumps({"model": DEMO, "messages": [{"role": "user", "content": "What is 3 plus 4?"}]})
        request = urllib.request.Request(f"{start.url}/v1/chat/completions", body.encode())
        answers: list[Any] = []
        thread = threading.Thread(
            target=lambda: answers.append(urllib.request.urlopen(request, timeout=100).read())
        )
        thread.start()
        assert gate.reached.wait(60)
        status, health = start.health()
        assert (status, health["status"]) == (200, "ok"), "the first model serves"
        entry = next(model for model in health["models"] if model["model"] == DEMO)
        assert entry["state"] == "downloading"
        assert 0 < entry["bytes"] < entry["total_bytes"]
        gate.opened.set()
        thread.join(60)
        assert json.loads(answers[0])["model"] == DEMO


def test_pull_shows_bytes_speed_and_time_stops_at_ctrl_c_and_goes_on(
    server: HubServer, tmp_path: Path
) -> None:
    gate = Gate(server, after=3 << 20)
    hub = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    with terminal_process("pull", DEMO, **hub) as pull:
        assert gate.reached.wait(60)
        shown = pull.until(" MB/s")
        assert re.search(r"demo .* \d+% [\d.]+/[\d.]+ MB", shown), shown
        pull.type("\x03")
        pull.until(f"Stopped. `mlx-backend pull {DEMO}` goes on where it was.")
        pull.to_end()
        assert pull.process.wait(60) == 130
        gate.opened.set()
    with terminal_process("pull", DEMO, **hub) as pull:
        pull.until(f"{DEMO} is here: ")
        pull.to_end()
        assert pull.process.wait(60) == 0
    first, again = (begin for name, begin in server.ranges if name == WEIGHTS)
    assert first == 0
    assert again > 0


def test_an_error_at_the_start_is_one_line(server: HubServer, tmp_path: Path) -> None:
    server.faults["api"] = Fault(401, {"X-Error-Code": "RepoNotFound"})
    with Start(server, tmp_path) as start:
        _, errors = start.process.communicate(timeout=60)
    assert start.process.returncode == 1
    (line,) = (each for each in errors.splitlines() if " INFO Matrix products: " not in each)
    assert line.startswith("mlx-backend: ")
    assert "no Hugging Face repository 'maker/demo', or it is private" in line


def test_a_terminal_shows_one_bar_that_is_gone_when_the_model_is_there(
    server: HubServer, tmp_path: Path
) -> None:
    reading, writing = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        try:
            while piece := os.read(reading, 4096):
                shown.append(piece)
        except OSError:
            pass

    gate = Gate(server, after=3 << 20)
    with Start(server, tmp_path, stderr=writing, TERM="xterm", LC_ALL="C.UTF-8") as start:
        os.close(writing)
        reader = threading.Thread(target=read)
        reader.start()
        assert gate.reached.wait(60)
        gate.opened.set()
        start.read_to("  Try: ")
        start.process.send_signal(signal.SIGINT)
        start.process.wait(60)
    reader.join(60)
    os.close(reading)
    text = b"".join(shown).decode()
    lines = [line.rpartition("\x1b[K")[2].rstrip("\r") for line in text.split("\n")]
    assert re.search(r"Downloading maker/demo [█░]+ \d+ %, [\d.]+ \w+ of \d\.\d MB", text)
    assert not any("█" in line or "░" in line for line in lines), "nothing of it is left"
    assert "Traceback" not in text
