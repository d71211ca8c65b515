"""A server of a command's own: `serve` in another process, on a free port of this machine, while the command runs.

For measuring: a client in the server's own process would take time from it. However the command is ended, the server is
stopped with it: it gets the signals of the terminal too, and those that end the command alone are exceptions here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, NoReturn

from mlx_backend.clients import KEY_VARIABLE
from mlx_backend.commands.errors import CommandError
from mlx_backend.commands.running_server import RunningServer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SERVE = (sys.executable, "-P", "-m", "mlx_backend", "serve")
STOP_SECONDS = 10.0
_LISTENING = "Listening on "


@contextmanager
def own_server(options: Sequence[str]) -> Iterator[RunningServer]:
    """Start one with these options of `serve`, and stop it after the block. Requests wait for its model to be loaded.

    What it says of loading goes to standard error, where it also says why it cannot start.
    """
    command = [
        *SERVE,
        *options,
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--log-level",
        "warning",
        "--drain-seconds",
        "0",
    ]
    with _signals_raised(), subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            with closing(RunningServer(_address(process), os.environ.get(KEY_VARIABLE) or None)) as server:
                yield server
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def _signals_raised() -> Iterator[None]:
    """Raise KeyboardInterrupt within the block for every signal by which a command is ended."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.signal(each, interrupt) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(_LISTENING):
            return line.removeprefix(_LISTENING).split()[0]
    raise CommandError("The server did not start; it says why above.")
