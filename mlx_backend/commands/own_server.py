"""A server of a command's own: `serve` in another process, on a free port of this machine, while the command runs."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from mlx_backend.commands.errors import CommandError
from mlx_backend.commands.running_server import KEY_VARIABLE, RunningServer

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
    # In a session of its own: Ctrl-C is this command's.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            with closing(RunningServer(_address(process), os.environ.get(KEY_VARIABLE) or None)) as server:
                yield server
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(_LISTENING):
            return line.removeprefix(_LISTENING).split()[0]
    raise CommandError("The server did not start; it says why above.")
