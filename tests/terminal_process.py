"""A command on a terminal of its own: what is typed, and what is seen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
from contextlib import contextmanager, suppress
from time import monotonic
from typing import TYPE_CHECKING

from server_process import COMMAND, ENVIRONMENT

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS, COLUMNS = 40, 100
MAX_WAIT_SECONDS = 120
"""For what is to be shown: then it will not come, though a spinner may turn for ever."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[()=>].?|\r")
_WHERE_IS_THE_CURSOR = b"\x1b[6n"


class TerminalProcess:
    """A process, and the terminal that it believes to have."""

    def __init__(self, process: subprocess.Popen[bytes], terminal: int) -> None:
        self.process = process
        self.raw = ""
        self._terminal = terminal
        self._seen = 0

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def until(self, words: str) -> str:
        """What was shown since the words that were waited for before, up to these."""
        deadline = monotonic() + MAX_WAIT_SECONDS
        while (at := self._text.find(words, self._seen)) < 0:
            assert self._read(deadline), f"it ended before {words!r} was shown: {self._text[self._seen :]!r}"
        before, self._seen = self._seen, at + len(words)
        return self._text[before : self._seen]

    def to_end(self) -> None:
        """Wait until the process has ended."""
        deadline = monotonic() + MAX_WAIT_SECONDS
        while self._read(deadline):
            pass

    @property
    def _text(self) -> str:
        return _CONTROL.sub("", self.raw)

    def _read(self, deadline: float) -> bool:
        """Take in what is new; False at the end."""
        data = b""
        if not select.select([self._terminal], [], [], max(0, deadline - monotonic()))[0]:
            raise AssertionError(f"not within {MAX_WAIT_SECONDS} s: {self._text[self._seen :]!r}")
        with suppress(OSError):  # as Linux says that the other end is closed
            data = os.read(self._terminal, 65536)
        if _WHERE_IS_THE_CURSOR in data:
            self.type("\x1b[1;1R")
        self.raw += data.decode(errors="replace")
        return bool(data)


@contextmanager
def terminal_process(*arguments: str, **environment: str) -> Iterator[TerminalProcess]:
    """Run a command of ours on a terminal; it is killed at the end, if it has not ended."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=its,
        stdout=its,
        stderr=its,
        env={**ENVIRONMENT, "TERM": "xterm-256color", **environment},
        preexec_fn=take_terminal,
    )
    os.close(its)
    try:
        yield TerminalProcess(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
