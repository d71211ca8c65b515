"""Prints and logs in a way that cannot block the server, even if whoever reads the output is slow, stuck or gone.

Log lines go through a bounded queue to a thread that alone writes them. When the queue is full, lines are dropped and
counted. Control characters are escaped, since parts of a line may come from clients. Knows nothing of what is logged.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
from contextlib import contextmanager
from queue import Full, Queue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_WAITING_LINES = 4096
MAX_LINE_CHARACTERS = 8192
LAST_LINES_SECONDS = 0.5
"""How long the last lines may take when the server ends."""

_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


def say(*lines: str) -> None:
    """Print lines on standard output. If nobody can read them any more, this and all that follows is not printed."""
    try:
        print(*lines, sep="\n", flush=True)
    except (OSError, ValueError):  # the pipe's reader has gone, or standard output was closed
        # At exit Python flushes what was not written, and would end with an error.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class LineFormatter(logging.Formatter):
    """One line a record, but for a traceback: what a client has sent cannot begin another line or colour a terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        """Escape control characters, and cut what is longer than `MAX_LINE_CHARACTERS`."""
        line = _CONTROL_CHARACTERS.sub(lambda found: repr(found[0])[1:-1], super().formatMessage(record))
        return line if len(line) <= MAX_LINE_CHARACTERS else line[:MAX_LINE_CHARACTERS] + " …"


class QueuedHandler(logging.Handler):
    """Formats records where they are made, and leaves the writing to a thread. Never blocks, never raises."""

    def __init__(self, descriptor: int, *, max_waiting: int = MAX_WAITING_LINES) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: Queue[str | None] = Queue(max_waiting)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write_lines, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue one record, or count it among the dropped."""
        try:
            self._lines.put_nowait(self.format(record))
        except Full:
            self._dropped += 1
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Write what is queued, as far as somebody reads it in time."""
        with contextlib.suppress(Full):
            self._lines.put_nowait(None)
            self._thread.join(LAST_LINES_SECONDS)
        super().close()

    def _write_lines(self) -> None:
        while (line := self._lines.get()) is not None:
            if not self._write(line):
                return
            # Said where the gap is: after the lines that had been queued when the queue was full.
            if self._dropped and self._lines.empty():
                self.acquire()  # the lock that `emit` is called under
                dropped, self._dropped = self._dropped, 0
                self.release()
                if not self._write(
                    f"WARNING {dropped} lines of this log were dropped, because nobody read it."
                ):
                    return

    def _write(self, line: str) -> bool:
        # Not by way of sys.stderr: a write that blocks would hold its lock, and Python could not end.
        rest = (line + "\n").encode("utf-8", "backslashreplace")
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:  # nobody will read it any more
            self._discard()
            return False
        return True

    def _discard(self) -> None:
        """Make room in the queue for as long as the process lives."""
        while self._lines.get() is not None:
            pass


@contextmanager
def logging_to_stderr(level: str) -> Iterator[None]:
    """Log to standard error within the block, with the time and level of each line."""
    handler: logging.Handler
    try:
        handler = QueuedHandler(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # no standard error, or one in memory
        handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(level.upper())
    for verbose in ("httpx", "httpcore", "urllib3", "filelock", "fsspec"):
        logging.getLogger(verbose).setLevel(logging.WARNING)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
        handler.close()
