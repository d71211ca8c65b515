"""Prints and logs in a way that cannot block the server, even if what reads the output is slow, stuck or gone.

Log lines go through a bounded queue to a thread that alone writes them. When the queue is full, lines are dropped and
counted. Control characters are escaped, since parts of a line may come from clients. Knows nothing of what is logged.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import threading
from contextlib import contextmanager
from datetime import UTC, datetime
from queue import Full, Queue
from typing import TYPE_CHECKING, Any

from mlx_backend.commands.terminal import discard_output, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_WAITING_LINES = 4096
MAX_LINE_CHARACTERS = 8192
MAX_TRACEBACK_CHARACTERS = 16384
LAST_LINES_SECONDS = 0.5
"""How long the last lines may take when the server ends."""

_CLEAR_LINE = "\r\x1b[K"
_PASSWORD = re.compile(r"(?<=://)[^/?#\s]+(?=@)")
"""And the user's name: what an address has before its host and the last @, as that of a proxy or a mirror may."""
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


def say(*lines: str) -> None:
    """Print lines on standard output. If they can no longer be read, this and all that follows is not printed."""
    try:
        print(*map(printable, lines), sep="\n", flush=True)
    except (OSError, ValueError):  # the pipe's reader has gone, or standard output was closed
        discard_output()


class LineFormatter(logging.Formatter):
    """One line a record, but for a traceback: what a client has sent cannot begin another line or colour a terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        """Escape control characters, leave passwords out, and cut what is longer than `MAX_LINE_CHARACTERS`."""
        line = _without_control_characters(without_passwords(super().formatMessage(record)))
        return line if len(line) <= MAX_LINE_CHARACTERS else line[:MAX_LINE_CHARACTERS] + " …"

    def formatException(self, ei: Any) -> str:  # noqa: N802 (logging's name)
        """Indent the lines of a traceback, whose last may come from a client; keep the end of one that is long."""
        lines = without_passwords(super().formatException(ei))[-MAX_TRACEBACK_CHARACTERS:].split("\n")
        return "\n".join(f"  {_without_control_characters(line)}" for line in lines)


def without_passwords(text: str) -> str:
    """Return a text without the passwords of the addresses in it."""
    return _PASSWORD.sub("…", text) if "://" in text else text


def _without_control_characters(text: str) -> str:
    return _CONTROL_CHARACTERS.sub(lambda found: repr(found[0])[1:-1], text)


class JsonFormatter(logging.Formatter):
    """One JSON object a record: time (UTC), level, message, and what the record has as `fields`. ASCII alone."""

    def format(self, record: logging.LogRecord) -> str:
        """Write the object, each text in it cut to `MAX_LINE_CHARACTERS`."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": time, "level": record.levelname, "message": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            traceback = without_passwords(self.formatException(record.exc_info))
            line["exception"] = traceback[-MAX_LINE_CHARACTERS:]  # what it was is last
        cut = {
            name: without_passwords(value)[:MAX_LINE_CHARACTERS] if isinstance(value, str) else value
            for name, value in line.items()
        }
        return json.dumps(cut, default=str)


class QueuedHandler(logging.Handler):
    """Formats records where they are made, and leaves the writing to a thread. Never blocks, never raises."""

    def __init__(self, descriptor: int, *, max_waiting: int = MAX_WAITING_LINES) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: Queue[str | threading.Event | None] = Queue(max_waiting)
        self._dropped = 0
        self._status = self._shown_status = ""
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

    def show_status(self, text: str) -> None:
        """Show a text below the log, in place of the one before; empty: none. For a terminal. Returns at once."""
        self._status = text
        with contextlib.suppress(Full):  # what is queued brings the new text along
            self._lines.put_nowait(threading.Event())

    def flush(self) -> None:
        """Wait until what is queued has been written, as far as somebody reads it in time."""
        reached = threading.Event()
        with contextlib.suppress(Full):
            self._lines.put_nowait(reached)
            reached.wait(LAST_LINES_SECONDS)

    def close(self) -> None:
        """Write what is queued, as far as somebody reads it in time."""
        self.show_status("")
        with contextlib.suppress(Full):
            self._lines.put_nowait(None)
            self._thread.join(LAST_LINES_SECONDS)
        super().close()

    def _write_lines(self) -> None:
        while (line := self._lines.get()) is not None:
            if isinstance(line, threading.Event):
                is_written = self._write_status()
                line.set()
            else:
                is_written = self._write(line)
            if not is_written:
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
        clear = _CLEAR_LINE if self._shown_status else ""
        self._shown_status = self._status
        return self._write_text(f"{clear}{line}\n{self._shown_status}")

    def _write_status(self) -> bool:
        if (before := self._shown_status) == self._status:
            return True
        self._shown_status = self._status
        return self._write_text((_CLEAR_LINE if before else "") + self._shown_status)

    def _write_text(self, text: str) -> bool:
        # Not by way of sys.stderr: a write that blocks would hold its lock, and Python could not end.
        rest = text.encode("utf-8", "backslashreplace")
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:  # what reads it has gone
            self._discard()
            return False
        return True

    def _discard(self) -> None:
        """Make room in the queue for as long as the process lives."""
        while (line := self._lines.get()) is not None:
            if isinstance(line, threading.Event):
                line.set()


class StatusLine:
    """The line of a terminal below the log, which changes while something goes on."""

    def __init__(self, handler: QueuedHandler, descriptor: int, *, is_unicode: bool) -> None:
        self._handler = handler
        self._descriptor = descriptor
        self._bar = "█░" if is_unicode else "#-"

    def show(self, texts: Sequence[str]) -> None:
        """Show the first text that there is room for, or the beginning of the last; nothing if there is none."""
        try:
            room = (os.get_terminal_size(self._descriptor).columns or 80) - 1
        except OSError:
            room = 79
        fitting = [text for text in texts if len(text) <= room]
        self._handler.show_status((fitting or [text[:room] for text in texts[-1:]] or [""])[0])
        if not texts:
            self._handler.flush()  # the next to print finds the line empty

    def bar(self, fraction: float, characters: int) -> str:
        """Draw a bar of which that fraction, from 0 to 1, is full."""
        full = int(fraction * characters)
        return self._bar[0] * full + self._bar[1] * (characters - full)


@contextmanager
def logging_to_stderr(level: str, log_format: str = "text") -> Iterator[StatusLine | None]:
    """Log to standard error within the block, with the time and level of each line; of other libraries warnings only.

    What is yielded is for a terminal on which a line can be replaced; None if standard error is something else.
    """
    handler: logging.Handler
    status_line: StatusLine | None = None
    try:
        descriptor = sys.stderr.fileno()
        handler = QueuedHandler(descriptor)
        if os.isatty(descriptor) and os.environ.get("TERM", "dumb") != "dumb":
            is_unicode = sys.stderr.encoding.lower().startswith("utf")
            status_line = StatusLine(handler, descriptor, is_unicode=is_unicode)
    except (OSError, ValueError, AttributeError):  # no standard error, or one in memory
        handler = logging.StreamHandler()
    lines = LineFormatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else lines)
    root, own = logging.getLogger(), logging.getLogger("mlx_backend")
    before = root.level, own.level
    root.addHandler(handler)
    logging.captureWarnings(True)  # which would be written where they are raised, and wait there
    own.setLevel(level.upper())
    root.setLevel(max(own.level, logging.WARNING))
    # These two log by themselves, as much as the environment says.
    for library in ("HF_HUB_VERBOSITY", "TRANSFORMERS_VERBOSITY"):
        os.environ.setdefault(library, "error")
    try:
        yield status_line
    finally:
        if status_line is not None:
            status_line.show([])
        logging.captureWarnings(False)
        root.removeHandler(handler)
        root.setLevel(before[0])
        own.setLevel(before[1])
        handler.close()
