"""The installed clients, run in a temporary home and workspace, without a terminal and within a bound in time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CLIENTS = Path(__file__).parents[2] / ".clients"
INSTALLED = CLIENTS / "node_modules" / ".bin"
TIMEOUT = 120
"""Seconds in which a client must be done: tens of times what it needs on a quiet machine."""


@dataclass(frozen=True)
class Finished:
    """A client that has ended: its status, and standard output and error as a terminal would show them."""

    status: int
    output: str


@dataclass(frozen=True)
class Sandbox:
    """A home and a workspace of a client's own."""

    home: Path
    workspace: Path

    def run_client(
        self,
        *command: str,
        environment: Mapping[str, str] | None = None,
        timeout: float = TIMEOUT,
        fails: bool = False,
    ) -> Finished:
        """Run a client in the workspace. It must end in time, and with status 0 unless it `fails`."""
        log = self.home.parent / "output.txt"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [INSTALLED / command[0], *command[1:]],
                cwd=self.workspace,
                env=self._environment() | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                pytest.fail(f"{command[0]} was not done after {timeout} s. It wrote:\n{_tail(log)}")
            finally:
                _kill_group(process)
        finished = Finished(process.returncode, log.read_text(errors="replace"))
        if (finished.status != 0) != fails:
            pytest.fail(f"{command[0]} ended with status {finished.status}. It wrote:\n{_tail(log)}")
        return finished

    def _environment(self) -> dict[str, str]:
        """Nothing of this process's but where programs are."""
        return {
            "PATH": os.pathsep.join([str(INSTALLED), os.environ.get("PATH", os.defpath)]),
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "NO_COLOR": "1",
        }


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End the client and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-8000:]


def missing(programs: Sequence[str]) -> str:
    """Why tests of these clients cannot run; empty if they can."""
    absent = [program for program in programs if not (INSTALLED / program).exists()]
    return f"{', '.join(absent)} not installed: `make test-clients` installs it" if absent else ""
