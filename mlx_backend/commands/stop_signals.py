"""SIGINT and SIGTERM for a server: the first asks for an orderly stop, the next ends the process.

SIGHUP asks a server to read its files again, and one whose terminal was closed to stop.

Knows nothing of what is stopped.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from contextlib import contextmanager, suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
AGAIN_SECONDS = 0.01


@contextmanager
def ended_by_interrupts() -> Iterator[None]:
    """Within the block Ctrl-C ends the process as a signal does: there is nothing to stop yet.

    An exception would be a traceback at best. Raised while a library is imported, it may be swallowed there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def raise_interrupts() -> None:
    """Have Ctrl-C raise KeyboardInterrupt from now on: in `python -m mlx_backend` it ends the process.

    One that is raised where Python can only report it, in a finaliser or a callback, is raised again soon after.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = sys.unraisablehook
    again = partial(signal.pthread_kill, threading.get_ident(), signal.SIGINT)

    def report(raised: sys.UnraisableHookArgs) -> None:
        if isinstance(raised.exc_value, KeyboardInterrupt):
            threading.Timer(AGAIN_SECONDS, again).start()
        else:
            before(raised)

    sys.unraisablehook = report


class StopSignals:
    """Signals, and bytes that other threads post, in the order in which they come. Made in the main thread.

    A handler in Python would not do: the system may deliver a signal to any thread, and then nothing wakes the main
    thread, which alone runs handlers.
    """

    def __init__(self, *, on_hangup: Callable[[], None] = lambda: None) -> None:
        """`on_hangup` is called by `wait` for each SIGHUP, which is a stop if there was a terminal that is gone."""
        self._on_hangup = on_hangup
        self._has_hung_up = False
        self._had_terminal = _has_terminal()
        self._events, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._is_ending = False
        self._status = 0

    def __enter__(self) -> Self:
        # nohup has SIGHUP ignored: that it does not stop the server is what was wanted.
        self._had_terminal &= signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        handled = (*_SIGNALS, signal.SIGHUP)
        self._before = {number: signal.signal(number, lambda *_: None) for number in handled}
        self._descriptor = signal.set_wakeup_fd(self._sender.fileno())
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if self._is_ending:  # signals are waited for until the process is gone
            if error is None:
                _end_process(self._status)
            return
        signal.set_wakeup_fd(self._descriptor)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._events.close()
        self._sender.close()

    def post(self, event: int) -> None:
        """Add an event, a byte that is no signal's number. From any thread; does nothing after the last `wait`."""
        with suppress(OSError):
            self._sender.send(bytes([event]))

    def wait(self, seconds: float | None = None) -> int | None:
        """Return the next signal's number or event; None if none came in `seconds`."""
        deadline = None if seconds is None else monotonic() + seconds
        while True:
            self._events.settimeout(None if deadline is None else max(0.001, deadline - monotonic()))
            try:
                event = self._events.recv(1)[0]
            except TimeoutError:
                return None
            if event != signal.SIGHUP or self._is_hangup():
                return event

    def _is_hangup(self) -> bool:
        """Act on a SIGHUP. True: it is the first that asks to stop; one terminal may send several."""
        if not self._is_ending and not (self._had_terminal and not _has_terminal()):
            self._on_hangup()
            return False
        first, self._has_hung_up = not self._has_hung_up, True
        return first

    def end_process(self, *, after: float, status: int) -> None:
        """End the process with `status`: when this object's block ends, at the next signal, or `after` seconds.

        Returns at once. The process ends without the interpreter's own end, which frees every object, in a second or
        more, and waits for threads: those in foreign code (a file that is loaded, a grammar that is compiled) cannot be
        interrupted.
        """
        self._is_ending = True
        self._status = status
        self._has_hung_up = True
        threading.Thread(target=self._end, args=(after, status), name="end", daemon=True).start()

    def _end(self, seconds: float, status: int) -> None:
        event = self.wait(seconds)
        while event is not None and event not in _SIGNALS:
            event = self.wait(seconds)
        _end_process(status if event is None else 128 + event)


def _end_process(status: int) -> None:
    """Write out what was logged, and end the process at once. What was printed has been written."""
    logging.shutdown()
    os._exit(status)


def _has_terminal() -> bool:
    """Whether the process has a controlling terminal that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
