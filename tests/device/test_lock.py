"""The lock that models share: granted in the order it was asked for, and free again after an exception."""

import threading
from queue import SimpleQueue

import pytest

from mlx_backend.device.threads import FairLock

SOON = 60


def test_the_lock_is_granted_in_the_order_it_was_asked_for() -> None:
    lock, order = FairLock(), SimpleQueue[int]()

    def take(number: int) -> None:
        with lock:
            order.put(number)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(5)]
    with lock:
        for count, thread in enumerate(threads, 1):
            thread.start()
            while len(lock._waiters) < count:
                pass
    for thread in threads:
        thread.join(SOON)
    assert [order.get_nowait() for _ in threads] == list(range(5))


def test_the_holder_that_asks_again_stands_behind_those_who_wait() -> None:
    lock, order = FairLock(), SimpleQueue[str]()
    waiting = threading.Event()

    def wait() -> None:
        with lock:
            order.put("the other")

    def ask_twice() -> None:
        with lock:
            waiting.wait(SOON)
            while not lock._waiters:
                pass
        with lock:
            order.put("the holder again")

    holder = threading.Thread(target=ask_twice)
    holder.start()
    while not lock._held:
        pass
    other = threading.Thread(target=wait)
    other.start()
    waiting.set()
    for thread in (holder, other):
        thread.join(SOON)
    assert [order.get_nowait(), order.get_nowait()] == ["the other", "the holder again"]


def test_an_exception_gives_the_lock_back() -> None:
    lock = FairLock()
    with pytest.raises(ValueError, match="mine"), lock:
        raise ValueError("mine")
    with lock:
        assert lock._held
    assert not lock._held
