"""One thread that goes on with every answer that waits for an engine.

A step gives each of sixty clients a token. Were each of them written by a thread of its own, sixty threads would wake
up, and each would wait for the interpreter's lock, which the engine's thread needs for the next step. Here the step
wakes one thread, which writes for all of them while the engine computes.

    engine ─▶ Pump.resume() ─▶ Writer ─▶ Pump: source ─▶ sink ─▶ … ─▶ the worker, which waited in Pump.run()

Knows threads and iterators; no sockets and no engine.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_PIECES = 64
"""Pieces that a pump moves before it is the others' turn."""


class Writer:
    """The thread, and the pumps that were resumed, in their order."""

    def __init__(self) -> None:
        self._resumed: SimpleQueue[Pump | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)

    def start(self) -> None:
        """Start the thread. Raises RuntimeError if the system allows no more."""
        self._thread.start()

    def put(self, pump: Pump) -> None:
        """Have a pump move what there is."""
        self._resumed.put(pump)

    def stop(self, seconds: float) -> None:
        """End the thread after what was put before."""
        self._resumed.put(None)
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        while (pump := self._resumed.get()) is not None:
            pump.move()
            del pump  # it would stay until the next


class Pump:
    """Moves what an iterator yields into a sink, on the writer's thread, each time it is resumed.

    The iterator may not wait: where it has nothing yet it yields something that is false, and whoever has more for it
    calls `resume`.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._source: Iterator[Any] | None = None
        self._sink: Callable[[list[Any]], object] = list
        self._error: BaseException | None = None
        self._ended = threading.Lock()
        self._is_queued = False

    def run(self, source: Iterator[Any], sink: Callable[[list[Any]], object]) -> None:
        """Wait until all of the iterator was moved; raise what the iterator or the sink raised."""
        self._ended.acquire()
        self._sink, self._source = sink, source
        self.resume()  # what came before would not have been noticed
        with self._ended:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def resume(self) -> None:
        """Have what there is moved. From any thread, also from a finaliser; without effect where nothing runs."""
        if self._source is not None and not self._is_queued:
            self._is_queued = True
            self._writer.put(self)

    def move(self) -> None:
        """Move what there is. Called by the writer."""
        self._is_queued = False  # first: what comes from now on may be missed below
        if (source := self._source) is None:
            return
        pieces = []
        try:
            for piece in source:
                if not piece:
                    break
                pieces.append(piece)
                if len(pieces) == MAX_PIECES:
                    self.resume()
                    break
            else:
                self._source = None
            if pieces:
                self._sink(pieces)
        except BaseException as error:  # the worker's, which waits
            self._source, self._error = None, error
        if self._source is None:
            self._sink = list
            self._ended.release()
