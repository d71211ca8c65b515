"""The scheduler's queue, what a generation yields, and what happens when it is closed."""

import gc
import math
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from scheduler_batches import (
    LONG,
    SOON,
    LimitedBatch,
    engine_of,
    request,
    take,
    text_of,
)
from scripted_engine import ScriptedEngine, Transcript

from mlx_backend.engine.base import EngineItem, Finished, GenerationRequest, Progress, TokenDelta
from mlx_backend.engine.batch import FEW_TOKENS, ModelInfo
from mlx_backend.engine.fair_queue import SECONDS_PER_PRIORITY, FairQueue
from mlx_backend.engine.jobs import Job
from mlx_backend.engine.scheduler import Scheduler
from mlx_backend.errors import EngineBusy


def test_a_request_that_comes_while_another_decodes_has_its_first_token_one_step_later() -> None:
    with engine_of(LONG, "b" * 30, gated=True) as engine:
        first = engine.generate(request())
        engine.advance(2)
        take(first, 2)
        second = engine.generate(request())
        engine.advance(1)
        assert isinstance(take(second, 1)[0], TokenDelta)
        take(first, 1)
        assert first.next(0) is None, "the first stream moved on by one token in that step, no more"


def test_requests_beyond_the_limit_are_queued_in_their_order() -> None:
    with engine_of("aaa", "bbb", "ccc", max_concurrent=1) as engine:
        generations = [engine.generate(request()) for _ in range(3)]
        assert [text_of(generation) for generation in generations] == ["aaa", "bbb", "ccc"]


def urgent(prompt: str, priority: int) -> GenerationRequest:
    return replace(request(prompt), priority=priority)


def started(engine: ScriptedEngine) -> list[str]:
    return [each.prompt for each in engine.requests]


def test_the_queue_is_sorted_by_priority_number_and_then_by_arrival() -> None:
    with engine_of(*"xxxxxxx", max_concurrent=1, gated=True) as engine:
        running = engine.generate(urgent("runs", 9))
        engine.advance(1)
        take(running, 1)
        priorities = [("a", 1), ("b", 0), ("c", 1), ("d", -1), ("e", 0), ("f", -1)]
        waiting = [engine.generate(urgent(name, priority)) for name, priority in priorities]
        engine.advance(20)
        for generation in [running, *waiting]:
            list(generation)
        assert started(engine) == ["runs", "d", "f", "b", "e", "a", "c"]


@pytest.mark.parametrize(("steps_later", "first"), [(0.5, "late"), (2, "early")])
def test_no_request_is_overtaken_for_ever(steps_later: float, first: str) -> None:
    queue: FairQueue[Job] = FairQueue()
    late = Job(1, urgent("late", 0), queue.share_of(""))
    early = Job(0, urgent("early", 1), queue.share_of(""))
    late.queued_at = early.queued_at + SECONDS_PER_PRIORITY * steps_later
    for job in (late, early):
        queue.add(job)
    assert next(iter(queue)) is {"late": late, "early": early}[first]


@pytest.mark.parametrize(
    ("room", "names"),
    [(math.inf, ["few", "long", "short", "other"]), (50, ["few", "short", "other"]), (4, ["few"])],
)
def test_while_a_long_prompt_has_no_room_shorter_ones_are_started_and_those_of_few_tokens_in_any_case(
    room: float, names: list[str]
) -> None:
    class Short(LimitedBatch):
        def load(self, on_progress: Callable[[float], None]) -> ModelInfo:
            return replace(super().load(on_progress), prefill_room=lambda priority: room)

    batch = Short(100)
    lengths = {"long": 90, "short": 40, "other": 45, "few": FEW_TOKENS}
    scheduler = Scheduler(batch)
    generations = {
        name: scheduler.submit(GenerationRequest(prompt=[1] * length, max_tokens=1))
        for name, length in lengths.items()
    }
    scheduler.start()
    try:
        for name in names:
            batch.ending.release()
            scheduler.wake()
            assert isinstance(generations[name].next(SOON), Finished)
    finally:
        scheduler.stop()
    assert [len(request.prompt) for request in batch.inserted] == [lengths[name] for name in names]


def test_cancelling_a_queued_request_leaves_the_others_in_their_order() -> None:
    with engine_of(*"xxxx", max_concurrent=1, gated=True) as engine:
        running = engine.generate(request("runs"))
        engine.advance(1)
        take(running, 1)
        waiting = [engine.generate(urgent(name, at)) for name, at in (("a", 2), ("b", 0), ("c", 1))]
        waiting[1].close()
        engine.advance(20)
        for generation in (running, waiting[0], waiting[2]):
            list(generation)
        assert started(engine) == ["runs", "c", "a"]


def test_a_full_queue_refuses_with_a_time_to_try_again() -> None:
    with engine_of(LONG, LONG, LONG, gated=True, max_concurrent=1, max_waiting=1) as engine:
        running = engine.generate(request())
        waiting = engine.generate(request())
        with pytest.raises(EngineBusy, match="2 requests are running or waiting") as refusal:
            engine.generate(request())
        assert refusal.value.retry_after >= 1
        running.close()
        engine.advance(1)
        take(waiting, 1)  # there is room now
        engine.generate(request()).close()


def test_a_finished_request_makes_room_before_its_last_item_can_be_seen() -> None:
    with ScriptedEngine(lambda prompt: "x", max_concurrent=1, max_waiting=0) as engine:
        for _ in range(200):
            assert text_of(engine.generate(request())) == "x"


def test_closing_a_generation_ends_it_at_once_and_does_not_touch_the_others() -> None:
    with engine_of(LONG, "unharmed", gated=True) as engine:
        cancelled, other = engine.generate(request()), engine.generate(request())
        engine.advance(1)
        take(cancelled, 1)
        cancelled.close()
        cancelled.close()
        assert engine.requests[0].cancelled.wait(SOON)
        with pytest.raises(StopIteration):
            cancelled.next()
        engine.advance(10)
        assert text_of(other) == "unharmed"
        assert engine.cancelled == [engine.requests[0]]


def test_leaving_the_loop_over_a_generation_cancels_it() -> None:
    with engine_of(LONG) as engine:
        for _ in engine.generate(request()):
            break
        assert engine.requests[0].ended.wait(SOON)


def test_a_generation_that_is_dropped_does_not_run_on() -> None:
    with engine_of(LONG, gated=True) as engine:
        generation = engine.generate(request())
        engine.advance(1)
        take(generation, 1)
        del generation
        gc.collect()
        assert engine.requests[0].cancelled.wait(SOON)


def test_one_thread_can_close_the_generation_that_another_waits_for() -> None:
    with engine_of(LONG, gated=True) as engine:
        generation = engine.generate(request())
        read: list[EngineItem] = []
        reader = threading.Thread(target=lambda: read.extend(generation))
        reader.start()
        generation.close()
        reader.join(SOON)
        assert not reader.is_alive()
        assert read == []


def test_a_request_cancelled_in_the_queue_never_reaches_the_engine() -> None:
    with engine_of("aaa", "bbb", gated=True, max_concurrent=1) as engine:
        running, waiting, last = (engine.generate(request()) for _ in range(3))
        waiting.close()
        engine.advance(10)
        assert text_of(running) == "aaa"
        assert text_of(last) == "bbb"
        assert len(engine.requests) == 2


def test_a_generation_that_has_ended_ignores_being_closed() -> None:
    with engine_of("done") as engine:
        generation = engine.generate(request())
        items = list(generation)
        generation.close()
        assert isinstance(items[-1], Finished)
        assert list(generation) == []
        assert engine.cancelled == []


def test_a_generation_yields_its_progress_its_tokens_and_then_what_it_cost() -> None:
    with engine_of(Transcript(text="東京 yes<|return|>", prefill=2)) as engine:
        prompt = request("0123456789")
        *items, last = engine.generate(prompt)
    total = len(prompt.prompt)
    assert items[:2] == [Progress(total // 2, total), Progress(total, total)]
    assert [item.text for item in items[2:] if isinstance(item, TokenDelta)] == [
        "東",
        "京",
        " ye",
        "s",
        "<|return|>",
    ]
    assert isinstance(last, Finished)
    assert (last.reason, last.prompt_tokens, last.completion_tokens) == ("stop", total, 5)
    assert min(last.queue_seconds, last.prefill_seconds, last.decode_seconds) >= 0


def test_a_generation_stops_at_its_limit() -> None:
    with engine_of(LONG) as engine:
        *tokens, last = engine.generate(request(max_tokens=3))
    assert len(tokens) == 3
    assert isinstance(last, Finished)
    assert last.reason == "length"


def test_next_with_a_timeout_returns_none_while_there_is_nothing() -> None:
    with engine_of(LONG, gated=True) as engine:
        generation = engine.generate(request())
        assert generation.next(0) is None
        assert generation.next(0.001) is None
        engine.advance(1)
        assert isinstance(generation.next(SOON), TokenDelta)
