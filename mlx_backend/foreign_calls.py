"""Calls of compiled code that nothing can stop: who waits for one can leave it, and a panic is an error like others.

A tokenizer's patterns come with a model and its texts from clients. One that looks for repetitions of repetitions may
take hours for a text, or give up with a panic of Rust's, which is no `Exception` and would end the thread. What was
left goes on by itself; while `MAX_LEFT` of these do, no more are begun. Knows nothing of what is called.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

from mlx_backend.errors import EngineBusy, EngineRefused
from mlx_backend.preparation import current

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_LEFT = 4
_MAX_CHARACTERS = 200
"""Of a panic's message, in an answer."""


class ForeignCalls:
    """The calls of one model's tokenizer. Safe to use from any thread."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._left = 0

    def run[T](self, call: Callable[[], T]) -> T:
        """Return what a call returns, without waiting longer than the current preparation lasts.

        Raises what it raises, EngineRefused in place of a panic, what `Preparation.check` raises, and EngineBusy while
        too many were left.
        """
        preparation = current()
        if self._left >= MAX_LEFT:
            raise EngineBusy("The model's tokenizer is still at earlier texts, for which it takes very long.")
        future: Future[T] = Future()
        is_over = threading.Event()
        future.add_done_callback(lambda _: is_over.set())
        threading.Thread(target=_resolve, args=(future, call), name="foreign", daemon=True).start()
        with preparation.cancelled_by(is_over.set):
            is_over.wait(min(preparation.seconds_left, threading.TIMEOUT_MAX))
        if not future.done():
            self._count(1)
            future.add_done_callback(lambda _: self._count(-1))
            preparation.check()
        return future.result()

    def _count(self, more: int) -> None:
        with self._guard:
            self._left += more


def run_here[T](call: Callable[[], T]) -> T:
    """Return what a call returns that takes no time to speak of. Raises EngineRefused in place of a panic."""
    try:
        return call()
    except Exception:
        raise
    except BaseException as panic:
        if type(panic).__name__ != "PanicException":
            raise
        message = str(panic)[:_MAX_CHARACTERS]
        raise EngineRefused(f"The model's tokenizer cannot read this text: {message}.") from None


def _resolve[T](future: Future[T], call: Callable[[], T]) -> None:
    try:
        result = run_here(call)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
