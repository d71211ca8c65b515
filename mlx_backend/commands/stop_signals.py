"""SIGINT and SIGTERM for a server: the first asks for an orderly stop, the next ends the process.

Knows nothing of what is stopped.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


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


class StopSignals:
    """Signals, and bytes that other threads post, in the order in which they come. Made in the main thread.

    A handler in Python would not do: the system may deliver a signal to any thread, and then nothing wakes the main
    thread, which alone runs handlers.
    """

    def __init__(self) -> None:
        self._events, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._is_ending = False

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
        self._descriptor = signal.set_wakeup_fd(self._sender.fileno())
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if self._is_ending:  # signals are waited for until the process is gone
            return
        signal.set_wakeup_fd(self._descriptor)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._events.close()
        self._sender.close()

    def post(self, event: int) -> None:
        """Add an event, a byte that is no signal's number. From any thread; does nothing when nobody waits any more."""
        with suppress(OSError):
            self._sender.send(bytes([event]))

    def wait(self, seconds: float | None = None) -> int | None:
        """Return the next signal's number or event; None if none came in so many seconds."""
        self._events.settimeout(seconds)
        try:
            return self._events.recv(1)[0]
        except TimeoutError:
            return None

    def end_process(self, *, after: float, status: int) -> None:
        """End the process at the next signal, and at the latest after so many seconds, with `status`. Returns at once.

        Threads in foreign code (a file that is loaded, a grammar that is compiled) cannot be interrupted, and Python
        would wait for them.
        """
        self._is_ending = True
        threading.Thread(target=self._end, args=(after, status), name="end", daemon=True).start()

    def _end(self, seconds: float, status: int) -> None:
        event = self.wait(seconds)
        while event is not None and event not in _SIGNALS:
            event = self.wait(seconds)
        logging.shutdown()
        os._exit(status if event is None else 128 + event)
