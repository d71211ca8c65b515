"""The scheduler when something fails: the request, the engine, or its restart; and that no caller is left waiting."""

import threading

import pytest
from scheduler_batches import (
    LONG,
    SOON,
    BatchThatFailsToRemove,
    FailingBatch,
    LimitedBatch,
    engine_of,
    finishes,
    request,
    text_of,
)
from scripted_engine import ScriptedEngine, Transcript

from mlx_backend.engine.base import EngineItem, Finished
from mlx_backend.engine.scheduler import Scheduler
from mlx_backend.errors import EngineError, EngineFailed, EngineStopped


def test_a_failing_request_fails_alone_and_after_its_tokens() -> None:
    broken = Transcript(text="half an ans", failure=EngineError("the wire burnt through"))
    with engine_of(broken, "unharmed", gated=True) as engine:
        failing, other = engine.generate(request()), engine.generate(request())
        engine.advance(20)
        items: list[EngineItem] = []
        with pytest.raises(EngineError, match="the wire burnt through"):
            items.extend(failing)  # extend keeps what came before the error
        assert text_of(items) == "half an ans"
        assert text_of(other) == "unharmed"
        assert engine.is_healthy()


def test_a_request_that_cannot_be_started_fails_alone() -> None:
    def script(prompt: str) -> str:
        if prompt == "bad":
            raise ZeroDivisionError("no such thing")
        return "fine"

    with ScriptedEngine(script) as engine:
        bad, good = engine.generate(request("bad")), engine.generate(request("good"))
        with pytest.raises(EngineError, match="could not be started: no such thing"):
            list(bad)
        assert text_of(good) == "fine"


def test_when_a_step_fails_running_requests_fail_and_queued_ones_are_served_after_the_restart() -> None:
    crash = Transcript(text="x", failure=MemoryError("no memory left"))
    with engine_of(LONG, crash, "third", "fourth", max_concurrent=2, gated=True) as engine:
        running = [engine.generate(request()) for _ in range(2)]
        waiting = [engine.generate(request()) for _ in range(2)]
        engine.advance(2)
        for generation in running:
            with pytest.raises(
                EngineFailed, match="broke and is being restarted: MemoryError: no memory left"
            ):
                list(generation)
        engine.advance(20)
        assert [text_of(generation) for generation in waiting] == ["third", "fourth"]
        assert engine.is_healthy()
        assert engine.status().state == "ready"


def test_a_second_failure_in_a_row_fails_every_request_and_delays_the_restart() -> None:
    batch = FailingBatch(failures=2)
    scheduler = Scheduler(batch, max_running=1, first_restart_delay=60)
    scheduler.start()
    first, second, third = (scheduler.submit(request()) for _ in range(3))
    batch.gate.set()
    for generation in (first, second, third):
        with pytest.raises(EngineFailed, match="RuntimeError: the device is gone") as failure:
            list(generation)
    assert failure.value.retry_after == 60, "as long as the pause"
    assert batch.loads == 2, "the third start is still to come"
    assert not scheduler.is_healthy()
    assert scheduler.status().state == "restarting"
    assert "the device is gone" in scheduler.status().detail
    with pytest.raises(EngineFailed, match="is being restarted"):
        scheduler.submit(request())
    scheduler.stop()
    assert scheduler.status().state == "stopped"


@pytest.mark.parametrize("failed_loads", [3, 2000])
def test_an_engine_that_cannot_be_loaded_again_is_tried_until_it_can(
    monkeypatch: pytest.MonkeyPatch, failed_loads: int
) -> None:
    monkeypatch.setattr("mlx_backend.engine.scheduler.MAX_RESTART_DELAY", 0)
    batch = FailingBatch(failures=1, failed_loads=failed_loads)
    scheduler = Scheduler(batch)
    scheduler.start()
    broken = scheduler.submit(request())
    batch.gate.set()
    with pytest.raises(EngineFailed):
        list(broken)
    assert batch.reloaded.wait(SOON)
    while not scheduler.is_healthy():  # it is loaded; it says so a moment later
        pass
    *_, last = scheduler.submit(request())
    assert isinstance(last, Finished)
    assert batch.loads == failed_loads + 2
    scheduler.stop()


def test_stopping_fails_every_request_and_may_be_done_twice_and_by_any_thread() -> None:
    with engine_of(LONG, LONG, gated=True, max_concurrent=1) as engine:
        generations = [engine.generate(request()) for _ in range(2)]
        stoppers = [threading.Thread(target=engine.stop) for _ in range(2)]
        for stopper in stoppers:
            stopper.start()
        for stopper in stoppers:
            stopper.join(SOON)
            assert not stopper.is_alive()
        engine.stop()
        for generation in generations:
            with pytest.raises(EngineStopped, match="has been stopped"):
                list(generation)
        assert not engine.is_healthy()
        with pytest.raises(EngineStopped):
            engine.generate(request())


def test_a_request_is_not_lost_when_preempting_a_warm_up_for_it_breaks_the_engine() -> None:
    batch = BatchThatFailsToRemove(room=100)
    scheduler = Scheduler(batch)
    scheduler.start()
    scheduler.prewarm(lambda: request("what may come next", max_tokens=0))
    assert batch.inserting.acquire(timeout=SOON)
    assert finishes(scheduler, batch, scheduler.submit(request(max_tokens=10)))
    scheduler.stop()


def test_a_warm_up_for_which_the_system_has_no_thread_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, refused = threading.Thread.start, threading.Event()

    def start_others(thread: threading.Thread) -> None:
        if thread.name == "prewarm":
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_others)
    batch = LimitedBatch(room=100)
    scheduler = Scheduler(batch)
    scheduler.start()
    scheduler.prewarm(lambda: request("what may come next", max_tokens=0))
    assert refused.wait(SOON)
    assert finishes(scheduler, batch, scheduler.submit(request(max_tokens=10)))
    assert not caplog.records, "the engine has not broken"
    scheduler.stop()


def test_a_cancelled_request_makes_room_even_if_removing_it_breaks_the_engine() -> None:
    batch = BatchThatFailsToRemove(room=100)
    scheduler = Scheduler(batch, max_running=1, max_waiting=1)
    scheduler.start()
    cancelled, waiting = (scheduler.submit(request(max_tokens=10)) for _ in range(2))
    assert batch.inserting.acquire(timeout=SOON)
    cancelled.close()
    assert finishes(scheduler, batch, waiting)
    others = [scheduler.submit(request(max_tokens=10)) for _ in range(2)]
    assert all(finishes(scheduler, batch, other) for other in others)
    scheduler.stop()
