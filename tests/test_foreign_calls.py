"""Calls of compiled code, which nothing can stop: they are left when their time is over, and a panic is an error."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import suppress
from functools import partial
from queue import SimpleQueue

import pytest

from mlx_backend.errors import EngineBusy, EngineRefused, RequestError
from mlx_backend.foreign_calls import MAX_OF_CLIENT, MAX_RUNNING, ForeignCalls
from mlx_backend.preparation import Preparation, PreparationCancelled


class PanicException(BaseException):
    """As pyo3 has it, of which there is no name to import."""


def test_a_call_that_does_not_end_is_left_when_the_requests_time_is_over() -> None:
    end = threading.Event()
    with Preparation(0.2).running(), pytest.raises(RequestError, match="took longer than"):
        ForeignCalls().run(end.wait)
    end.set()


def test_only_so_many_run_at_a_time_and_once_all_of_them_were_left_others_are_refused() -> None:
    calls, begun, end = ForeignCalls(), SimpleQueue[None](), threading.Event()
    before = set(threading.enumerate())

    def slow() -> None:
        begun.put(None)
        end.wait()

    def wait_for(preparation: Preparation) -> None:
        with preparation.as_current(), suppress(PreparationCancelled):
            calls.run(slow)

    clients = [f"client {number // MAX_OF_CLIENT}" for number in range(MAX_RUNNING)]
    preparations = [Preparation(client=client) for client in clients]
    waiting = [threading.Thread(target=wait_for, args=(each,)) for each in preparations]
    for thread in waiting:
        thread.start()
        begun.get(timeout=60)
    with Preparation(0.05).running(), pytest.raises(EngineBusy):
        calls.run(slow)
    assert begun.empty()
    for preparation, thread in zip(preparations, waiting, strict=True):
        preparation.cancel()
        thread.join(60)
    with pytest.raises(EngineBusy, match="still at earlier texts"):
        calls.run(str)
    end.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert calls.run(lambda: "done") == "done"


def test_one_client_leaves_room_for_others() -> None:
    calls, end = ForeignCalls(), threading.Event()
    for _ in range(MAX_OF_CLIENT):
        with Preparation(0.05, "a").running(), pytest.raises(RequestError):
            calls.run(end.wait)
    with Preparation(client="a").running(), pytest.raises(EngineBusy):
        calls.run(str)
    with Preparation(client="b").running():
        assert calls.run(lambda: "done") == "done"
    end.set()


def test_a_call_that_failed_keeps_its_text_no_longer_than_its_error_is_kept() -> None:
    class Text(str):
        pass

    text, before = Text("a"), set(threading.enumerate())
    with suppress(TypeError):
        ForeignCalls().run(partial(divmod, 1, text))
    left = weakref.ref(text)
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    gc.disable()
    try:
        del text
        assert left() is None
    finally:
        gc.enable()


def test_what_a_call_raises_is_raised_and_a_panic_is_a_refusal() -> None:
    def panic() -> None:
        raise PanicException("Onig: Regex search error: retry-limit-in-match over")

    with pytest.raises(ZeroDivisionError):
        ForeignCalls().run(lambda: 1 / 0)
    with pytest.raises(EngineRefused, match=r"cannot read this text: Onig: .* over\.$"):
        ForeignCalls().run(panic)
