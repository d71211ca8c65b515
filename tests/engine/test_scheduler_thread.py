"""The scheduler's thread: what runs on it, what waits for room, and what it does with nothing to do."""

import threading
from dataclasses import replace
from queue import SimpleQueue

import pytest
from scheduler_batches import (
    SOON,
    LimitedBatch,
    RecordingBatch,
    finishes,
    request,
)

from mlx_backend.engine.base import EngineStatus, Finished, GenerationRequest
from mlx_backend.engine.scheduler import Scheduler
from mlx_backend.errors import EngineBusy, EngineRefused, EngineStopped


def test_loading_stepping_and_unloading_happen_on_one_thread_that_is_not_the_callers() -> None:
    batch = RecordingBatch()
    scheduler = Scheduler(batch)
    assert not scheduler.is_healthy()
    assert scheduler.start().model_id == "recording"
    assert scheduler.is_healthy()
    list(scheduler.submit(request()))
    scheduler.stop()
    assert [name for name, _ in batch.calls] == ["load", "insert", "step", "unload", "close"]
    assert len({thread for _, thread in batch.calls}) == 1
    assert threading.get_ident() not in {thread for _, thread in batch.calls}


def test_an_idle_thread_sleeps() -> None:
    batch = RecordingBatch()
    scheduler = Scheduler(batch)
    scheduler.start()
    for _ in range(5):
        scheduler.wake()
    scheduler.stop()
    assert [name for name, _ in batch.calls] == ["load", "unload", "close"]


def test_a_failed_load_is_raised_by_start_and_leaves_no_thread() -> None:
    batch = RecordingBatch(load_error=EngineRefused("there is no such model"))
    scheduler = Scheduler(batch)
    with pytest.raises(EngineRefused, match="there is no such model"):
        scheduler.start()
    assert not scheduler.is_healthy()
    assert [name for name, _ in batch.calls] == ["load", "unload", "close"]
    with pytest.raises(EngineStopped, match="there is no such model"):
        scheduler.submit(request())


def test_requests_wait_in_order_for_room_and_one_that_can_never_fit_is_refused() -> None:
    batch = LimitedBatch(room=100)
    scheduler = Scheduler(batch)
    scheduler.start()
    first, second, third, giant, fourth = (
        scheduler.submit(request(max_tokens=size)) for size in (60, 60, 30, 101, 20)
    )
    for generation in (first, second, third, fourth):
        batch.ending.release()
        scheduler.wake()
        assert isinstance(generation.next(SOON), Finished)
    with pytest.raises(EngineRefused, match="101 tokens can never fit"):
        giant.next(SOON)
    assert [each.max_tokens for each in batch.inserted] == [60, 60, 30, 20]
    scheduler.stop()


def test_a_request_queued_for_longer_than_its_timeout_is_refused_with_a_time_to_try_again() -> None:
    batch = LimitedBatch(room=100)
    scheduler = Scheduler(batch)
    scheduler.start()
    running = scheduler.submit(request(max_tokens=100))
    queued = scheduler.submit(replace(request(max_tokens=50), queue_timeout=0.01))
    with pytest.raises(EngineBusy, match=r"queued for 0.01 seconds") as refusal:
        queued.next(SOON)
    assert refusal.value.retry_after >= 1
    assert scheduler.status() == EngineStatus(state="ready", running=1, waiting=0)
    batch.ending.release()
    scheduler.wake()
    assert isinstance(running.next(SOON), Finished)
    scheduler.stop()


def test_a_request_that_may_not_wait_is_started_if_there_is_room_and_else_refused_at_once() -> None:
    batch = LimitedBatch(room=100)
    scheduler = Scheduler(batch)
    scheduler.start()
    running, refused = (scheduler.submit(replace(request(max_tokens=60), queue_timeout=0)) for _ in range(2))
    with pytest.raises(EngineBusy, match="queued for 0 seconds"):
        refused.next(SOON)
    assert finishes(scheduler, batch, running)
    scheduler.stop()


def test_no_request_waits_for_a_warm_up_that_is_being_made_which_is_then_made_anew() -> None:
    batch = LimitedBatch(room=100)
    scheduler = Scheduler(batch)
    scheduler.start()
    guesses = [request("what was likely", max_tokens=0), request("what is likely now", max_tokens=0)]
    making, may_go_on = SimpleQueue[None](), threading.Semaphore(0)

    def make_request() -> GenerationRequest:
        guess = guesses.pop(0)
        making.put(None)
        may_go_on.acquire()
        return guess

    scheduler.prewarm(make_request)
    making.get(timeout=SOON)
    asked = scheduler.submit(request(max_tokens=10))
    batch.wait_for(lambda: bool(batch.inserted))
    may_go_on.release()
    assert finishes(scheduler, batch, asked)
    making.get(timeout=SOON)
    may_go_on.release()
    batch.wait_for(lambda: len(batch.inserted) == 2)
    scheduler.stop()
    assert batch.inserted[1].prompt == request("what is likely now").prompt


def test_warm_ups_run_while_there_is_nothing_else_and_are_preempted_by_requests() -> None:
    batch = LimitedBatch(room=100)
    scheduler = Scheduler(batch)
    scheduler.start()
    guess = request("what may come next", max_tokens=0)
    scheduler.prewarm(lambda: guess)
    first = scheduler.submit(request(max_tokens=10))
    batch.ending.release()
    scheduler.wake()
    assert isinstance(first.next(SOON), Finished)
    batch.wait_for(lambda: guess in batch.inserted)
    second = scheduler.submit(request(max_tokens=11))
    batch.ending.release()
    scheduler.wake()
    assert isinstance(second.next(SOON), Finished)
    scheduler.stop()
    served = [each.max_tokens for each in batch.inserted if each is not guess]
    assert served == [10, 11]
    assert scheduler.status().running == 0, "a warm-up is not counted"
