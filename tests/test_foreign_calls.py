"""Calls of compiled code, which nothing can stop: they are left when their time is over, and a panic is an error."""

from __future__ import annotations

import threading

import pytest

from mlx_backend.errors import EngineBusy, EngineRefused, RequestError
from mlx_backend.foreign_calls import MAX_LEFT, ForeignCalls
from mlx_backend.preparation import Preparation, PreparationCancelled


class PanicException(BaseException):
    """As pyo3 has it, of which there is no name to import."""


def test_a_call_that_does_not_end_is_left_when_the_requests_time_is_over() -> None:
    end = threading.Event()
    with Preparation(0.2).running(), pytest.raises(RequestError, match="took longer than"):
        ForeignCalls().run(end.wait)
    end.set()


def test_calls_are_left_when_their_clients_have_left_and_too_many_of_these_refuse_others() -> None:
    calls, end = ForeignCalls(), threading.Event()
    preparation = Preparation()
    preparation.cancel()
    before = set(threading.enumerate())
    for _ in range(MAX_LEFT):
        with preparation.as_current(), pytest.raises(PreparationCancelled):
            calls.run(end.wait)
    left = set(threading.enumerate()) - before
    with pytest.raises(EngineBusy, match="still at earlier texts"):
        calls.run(str)
    end.set()
    for each in left:
        each.join(60)
    assert calls.run(lambda: "done") == "done"


def test_what_a_call_raises_is_raised_and_a_panic_is_a_refusal() -> None:
    def panic() -> None:
        raise PanicException("Onig: Regex search error: retry-limit-in-match over")

    with pytest.raises(ZeroDivisionError):
        ForeignCalls().run(lambda: 1 / 0)
    with pytest.raises(EngineRefused, match=r"cannot read this text: Onig: .* over\.$"):
        ForeignCalls().run(panic)
