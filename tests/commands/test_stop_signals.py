"""Ctrl-C ends the server soon, whatever it is doing, and again at once; never with a traceback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from server_process import ENVIRONMENT, endless_completion

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STUCK_LOAD = """
import sys, threading
import mlx_backend.engine.mlx as engine

def load(*_, **__):
    print("Stuck.", flush=True)
    threading.Event().wait()  # as a file that is read from a dead disk: nothing interrupts it

engine.load_engine = load
from mlx_backend.cli import main
sys.exit(main(["serve", "--port", "0"]))
"""


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def start(
    processes: list[subprocess.Popen[str]], *arguments: str, **environment: str
) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENT, **environment},
    )
    processes.append(process)
    return process


def read_to(process: subprocess.Popen[str], words: str) -> str:
    assert process.stdout is not None
    read = ""
    for line in process.stdout:
        read += line
        if words in line:
            return read
    raise AssertionError(f"it ended before {words!r}: {read}")


@pytest.mark.parametrize("signals", [1, 2])
def test_a_load_that_nothing_can_interrupt_ends_with_the_process(
    processes: list[subprocess.Popen[str]], signals: int
) -> None:
    process = start(processes, "-c", STUCK_LOAD)
    read_to(process, "Stuck.")
    process.send_signal(signal.SIGINT)
    read_to(process, "Stopping")
    if signals == 2:
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (130 if signals == 2 else 0)
    assert "Traceback" not in errors
    assert "could not be loaded" not in errors


def test_an_interrupt_while_modules_are_imported_ends_it_without_a_traceback(
    processes: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    # The first module that the command line needs says that it is being imported, and takes its time.
    slow = 'print("Importing.", flush=True)\nimport threading\nthreading.Event().wait()\n'
    (tmp_path / "argparse.py").write_text(slow)
    folders = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    process = start(processes, "-m", "mlx_backend", PYTHONPATH=folders)
    read_to(process, "Importing.")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == -signal.SIGINT


def test_running_replies_get_their_time_in_one_line_and_a_second_signal_ends_it(
    processes: list[subprocess.Popen[str]],
) -> None:
    process = start(processes, "-m", "mlx_backend", "--port", "0")
    started = read_to(process, "  Try: ")
    port = int(started.partition("Listening on http://127.0.0.1:")[2].split()[0])
    body = endless_completion()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
            + body
        )
        assert connection.recv(12) == b"HTTP/1.1 200"
        process.send_signal(signal.SIGTERM)
        line = read_to(process, "Stopping").splitlines()[-1]
        assert line == "Stopping … (a reply that is running may take up to 30 s; Ctrl-C again ends now)"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_a_signal_that_comes_while_an_event_is_posted_is_not_lost() -> None:
    from mlx_backend.commands.stop_signals import StopSignals

    before = signal.getsignal(signal.SIGINT)
    with StopSignals() as signals:
        threading.Thread(target=signals.post, args=(0,)).start()
        assert signals.wait(60) == 0
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.wait(60) == signal.SIGINT
        assert signals.wait(0.01) is None
    assert signal.getsignal(signal.SIGINT) is before


LOST = """
import gc, signal, threading, weakref
from mlx_backend.commands.stop_signals import raise_interrupts

raise_interrupts()

class Finalised:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def interrupt(*_):
    gc.callbacks.clear()
    signal.raise_signal(signal.SIGINT)

def in_a_finaliser():
    Finalised()

def in_a_weak_reference():
    seen = type("Seen", (), {})()
    reference = weakref.ref(seen, interrupt)
    del seen

def in_the_collector():
    gc.callbacks.append(interrupt)
    gc.collect()

for lose in (in_a_finaliser, in_a_weak_reference, in_the_collector):
    try:
        lose()
        threading.Event().wait(60)
    except KeyboardInterrupt:
        print(lose.__name__)
"""


def test_ctrl_c_where_python_can_only_report_it_is_not_lost(processes: list[subprocess.Popen[str]]) -> None:
    out, errors = start(processes, "-c", LOST).communicate(timeout=60)
    assert out.split() == ["in_a_finaliser", "in_a_weak_reference", "in_the_collector"]
    assert errors == ""
