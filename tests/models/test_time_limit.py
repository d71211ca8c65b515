"""Code that cannot be asked to stop is stopped, and code that ends in time is left alone."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest

from mlx_backend.models import time_limit as time_limit_module
from mlx_backend.models.time_limit import TimeLimitExceeded, time_limit


def loop_for_ever(seconds: float) -> None:
    with time_limit(seconds):
        while True:
            pass


def test_a_loop_is_stopped() -> None:
    with pytest.raises(TimeLimitExceeded):
        loop_for_ever(0.02)


def test_a_block_that_ends_in_time_is_not_touched_then_or_later() -> None:
    for _ in range(200):
        with time_limit(60):
            total = sum(range(100))
        assert total == 4950
    assert not [
        each
        for each in threading.enumerate()
        if isinstance(each, threading.Timer) and not each.finished.is_set()
    ]


def test_a_block_that_ends_as_its_time_does_either_ends_or_raises_and_nothing_comes_behind() -> None:
    outcomes = set()
    for tries in range(300):
        try:
            with time_limit(0.001):
                for _ in range(tries * 100):
                    pass
            outcomes.add("ended")
        except TimeLimitExceeded:
            outcomes.add("raised")
        for _ in range(1000):  # here nothing may be raised
            pass
    assert outcomes <= {"ended", "raised"}


def test_a_block_that_ends_while_it_is_interrupted_leaves_all_others_their_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupt, about_to, leaving = time_limit_module._interrupt, threading.Event(), threading.Event()

    def interrupt_as_it_ends(thread: int) -> None:
        about_to.set()
        leaving.wait(10)
        interrupt(thread)

    monkeypatch.setattr(time_limit_module, "_interrupt", interrupt_as_it_ends)
    for _ in range(20):
        about_to.clear()
        leaving.clear()
        with suppress(TimeLimitExceeded), time_limit(0.001):
            about_to.wait(10)
            leaving.set()
    monkeypatch.undo()
    with pytest.raises(TimeLimitExceeded):
        loop_for_ever(0.02)


def test_what_the_block_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError), time_limit(60):
        _ = 1 / 0


def test_two_threads_have_limits_of_their_own() -> None:
    caught: list[str] = []

    def loop(name: str, seconds: float) -> None:
        try:
            loop_for_ever(seconds)
        except TimeLimitExceeded:
            caught.append(name)

    threads = [threading.Thread(target=loop, args=each) for each in (("a", 0.02), ("b", 0.05))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(caught) == ["a", "b"]
