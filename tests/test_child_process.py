"""What strangers wrote is run in processes of their own, which have limits and end with the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mlx_backend import child_process
from mlx_backend.child_process import ChildProcesses, Overrun, resident_bytes
from mlx_backend.errors import EngineBusy, EngineError, RequestError
from mlx_backend.preparation import Preparation, PreparationCancelled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[1]

type Make = Callable[..., ChildProcesses]


@pytest.fixture
def processes() -> Iterator[Make]:
    made: list[ChildProcesses] = []

    def make(function: str, **settings: Any) -> ChildProcesses:
        made.append(ChildProcesses(f"child_functions:{function}", **{"at_once": 2, **settings}))
        return made[-1]

    yield make
    for each in made:
        each.close()


def described(some: ChildProcesses) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(some.call(b"", seconds=5).data)
    return found


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    status = Path(f"/proc/{pid}/stat")  # of one that nobody has waited for
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z"


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_function_answers_with_what_it_returns_and_not_with_what_it_prints(processes: Make) -> None:
    echo = processes("echo", reused=True)
    for size in (0, 1, 100_000, 9_000_000):
        request = os.urandom(size)
        assert echo.call(request, seconds=5).data == request


def test_a_process_that_waits_is_used_again_and_one_that_has_ended_is_replaced(processes: Make) -> None:
    some = processes("described", reused=True)
    first = described(some)["pid"]
    assert described(some)["pid"] == first
    os.kill(first, signal.SIGKILL)
    second = described(some)["pid"]
    assert second != first
    some.close()
    assert has_ended(second)


def test_without_idle_ones_each_request_has_a_process_of_its_own(processes: Make) -> None:
    some = processes("described")
    first, second = described(some)["pid"], described(some)["pid"]
    assert first != second
    assert has_ended(first)
    assert has_ended(second)


def test_it_yields_to_the_server_and_knows_no_keys(processes: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_BACKEND_API_KEY", "secret")
    monkeypatch.setenv("TZ", "UTC")
    found = described(processes("described", niceness=5))
    assert found["priority"] == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)
    assert set(found["variables"]) <= {"TZ", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH"}


def test_it_writes_no_files(processes: Make, tmp_path: Path) -> None:
    assert processes("write").call(str(tmp_path / "file").encode(), seconds=5).data == b"File too large"


@pytest.mark.parametrize(
    ("function", "request_", "words"),
    [
        ("loop", b"", r"more than 0\.2 seconds of processor time"),
        ("fill", b"", "too much memory|processor time"),  # macOS does not limit it
        ("fill_in_c", b"", "too much memory|processor time"),
    ],
)
def test_what_takes_too_much_ends_its_process_and_the_next_request_has_a_new_one(
    processes: Make, function: str, request_: bytes, words: str
) -> None:
    some = processes(function, reused=True)
    for _ in range(2):
        with pytest.raises(Overrun, match=words):
            some.call(request_, seconds=0.2)


def test_rust_ends_by_a_signal_of_its_own_where_there_is_no_more_memory(processes: Make) -> None:
    with pytest.raises(Overrun, match="too much memory"):
        processes("fill_in_rust").call(b"", seconds=60)


@pytest.mark.parametrize(
    ("function", "request_", "cause"),
    [
        ("fail", b"", "ZeroDivisionError"),
        ("fail", b"SIGILL", "status -4"),
        ("no_such_function", b"", "has no attribute 'no_such_function'"),
    ],
)
def test_what_is_no_fault_of_a_request_is_reported_as_the_server_s(
    processes: Make, caplog: pytest.LogCaptureFixture, function: str, request_: bytes, cause: str
) -> None:
    with pytest.raises(EngineError, match="ended unexpectedly"):
        processes(function).call(request_, seconds=5)
    assert cause in caplog.text


def test_where_the_system_limits_no_memory_a_process_is_looked_at(
    processes: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(child_process, "MAX_MEMORY", 1 << 20)  # of the parent, which is the one that looks
    monkeypatch.setattr(child_process, "_WATCH_SECONDS", 0.01)
    assert resident_bytes(os.getpid()) > 1 << 20
    with pytest.raises(Overrun, match="too much memory"):
        processes("loop").call(b"", seconds=60)


def test_a_request_that_is_cancelled_or_out_of_time_ends_its_process(processes: Make) -> None:
    cancelled, late = Preparation(60), Preparation(0.3)

    def cancel() -> None:
        threading.Event().wait(0.3)
        cancelled.cancel()

    def run(preparation: Preparation) -> None:
        with preparation.running():
            processes("loop").call(b"", seconds=60)

    with ThreadPoolExecutor(1) as threads:
        threads.submit(cancel)
        with pytest.raises(PreparationCancelled):
            run(cancelled)
    with pytest.raises(RequestError, match=r"took longer than 0\.3 seconds"):
        run(late)


def test_where_no_process_can_be_started_the_server_is_busy(
    processes: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    some = processes("echo")
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(EngineBusy, match="Resource temporarily unavailable"):
        some.call(b"", seconds=1)


PARENT = """
import os, sys
sys.path.insert(0, os.getcwd())
from mlx_backend.child_process import ChildProcesses
some = ChildProcesses("child_functions:described", at_once=1, reused=True)
print(some.call(b"", seconds=5).data.decode(), flush=True)
input()
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, None])
def test_a_process_ends_with_the_server_however_that_ends(end: signal.Signals | None) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        cwd=ROOT / "tests",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        child = json.loads(parent.stdout.readline())["pid"]
        assert not has_ended(child)
        for each in (
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGHUP,
        ):  # of a terminal, of who ends all processes
            os.kill(child, each)
        if end is None:
            parent.communicate("\n")
        else:
            parent.send_signal(end)
    until(lambda: has_ended(child))
