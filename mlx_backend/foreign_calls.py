"""Calls of compiled code that nothing can stop: who waits for one can leave it, and a panic is an error like others.

A tokenizer's patterns come with a model and its texts from clients. One that looks for repetitions of repetitions may
take hours for a text, or give up with a panic of Rust's, which is no `Exception` and would end the thread. What was
left goes on by itself. At most `MAX_RUNNING` run at a time, half of them for one client; others wait their turn, unless
all of these were left. Knows nothing of what is called.
"""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TYPE_CHECKING

from mlx_backend.errors import EngineBusy, EngineRefused
from mlx_backend.preparation import Slots, current

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_RUNNING = 4
MAX_OF_CLIENT = MAX_RUNNING // 2
_MAX_CHARACTERS = 200
"""Of a panic's message, in an answer."""


class ForeignCalls:
    """The calls of one model's tokenizer. Safe to use from any thread."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._slots = Slots(MAX_RUNNING, max_of_client=MAX_OF_CLIENT)
        self._left: Counter[str] = Counter()

    def run[T](self, call: Callable[[], T]) -> T:
        """Return what a call returns, without waiting longer than the current preparation lasts.

        Raises what it raises, EngineRefused in place of a panic, what `Preparation.check` raises, and EngineBusy if its
        turn does not come.
        """
        preparation, client = current(), current().client
        future: Future[T] = Future()
        is_over = threading.Event()
        future.add_done_callback(lambda _: is_over.set())
        with ExitStack() as unless_begun:
            slot = unless_begun.enter_context(ExitStack())
            is_full = self._left[client] >= MAX_OF_CLIENT or self._left.total() >= MAX_RUNNING
            turn = self._slots.slot_for(preparation, preparation.seconds_left, client)
            if is_full or not slot.enter_context(turn):
                raise EngineBusy(
                    "The model's tokenizer is still at earlier texts, for which it takes very long."
                )
            threading.Thread(
                target=_resolve, args=(future, call, slot.close), name="foreign", daemon=True
            ).start()
            unless_begun.pop_all()
        with preparation.cancelled_by(is_over.set):
            is_over.wait(min(preparation.seconds_left, threading.TIMEOUT_MAX))
        try:
            if not future.done():
                self._count(client, 1)
                future.add_done_callback(lambda _: self._count(client, -1))
                preparation.check()
            return future.result()
        finally:
            del future  # it has the error, whose traceback has this frame

    def _count(self, client: str, more: int) -> None:
        with self._guard:
            self._left[client] += more
            self._left = +self._left  # without those that have none


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


def _resolve[T](future: Future[T], call: Callable[[], T], give_back_slot: Callable[[], None]) -> None:
    try:
        result = run_here(call)
    except BaseException as error:
        give_back_slot()
        future.set_exception(error)
        del future  # as above
    else:
        give_back_slot()
        future.set_result(result)
