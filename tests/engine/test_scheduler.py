"""The engine thread: who is admitted when, who is told what, and that nobody is ever left waiting."""

import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from mlx_backend.engine.base import (
    EngineItem,
    EngineStatus,
    Finished,
    Generation,
    GenerationRequest,
    Progress,
    TokenDelta,
)
from mlx_backend.engine.batch import Ended, ModelFacts, Outcome
from mlx_backend.engine.jobs import OVERTAKING_SECONDS, Job
from mlx_backend.engine.scheduler import Scheduler
from mlx_backend.engine.scripted import ScriptedEngine, ScriptedTokenizer, Transcript
from mlx_backend.errors import EngineBusy, EngineError, EngineFailed, EngineRefused, EngineStopped

SOON = 20  # seconds after which a test that waits for another thread gives up
LONG = "all work and no play makes " * 20


def request(prompt: str = "hello", max_tokens: int = 1000) -> GenerationRequest:
    tokens = ScriptedTokenizer().encode(prompt, control_tokens=True)
    return GenerationRequest(prompt=tokens, max_tokens=max_tokens)


def text_of(items: Iterable[EngineItem]) -> str:
    return "".join(item.text for item in items if isinstance(item, TokenDelta))


def take(generation: Generation, count: int) -> list[EngineItem]:
    items = [generation.next(SOON) for _ in range(count)]
    assert None not in items, "the engine did not deliver in time"
    return [item for item in items if item is not None]


@contextmanager
def engine_of(*transcripts: str | Transcript, **options: int) -> Iterator[ScriptedEngine]:
    with ScriptedEngine(transcripts, **options) as engine:  # type: ignore[arg-type]
        yield engine


# -- admission ----------------------------------------------------------------------------------------------


def test_a_request_that_comes_while_another_decodes_has_its_token_one_step_later() -> None:
    with engine_of(LONG, "b" * 30, gated=True) as engine:
        first = engine.generate(request())
        engine.advance(2)
        take(first, 2)
        second = engine.generate(request())
        engine.advance(1)
        assert isinstance(take(second, 1)[0], TokenDelta)
        take(first, 1)
        assert first.next(0) is None, "the first stream moved on by one token in that step, no more"


def test_more_requests_than_may_run_wait_in_line_in_their_order() -> None:
    with engine_of("aaa", "bbb", "ccc", max_concurrent=1) as engine:
        generations = [engine.generate(request()) for _ in range(3)]
        assert [text_of(generation) for generation in generations] == ["aaa", "bbb", "ccc"]


def urgent(prompt: str, priority: int) -> GenerationRequest:
    return replace(request(prompt), priority=priority)


def begun(engine: ScriptedEngine) -> list[str]:
    return [asked.prompt for asked in engine.requests]


def test_of_those_who_wait_the_lowest_priority_number_goes_first_and_then_who_came_first() -> None:
    with engine_of(*"xxxxxxx", max_concurrent=1, gated=True) as engine:
        running = engine.generate(urgent("runs", 9))
        engine.advance(1)
        take(running, 1)
        priorities = [("a", 1), ("b", 0), ("c", 1), ("d", -1), ("e", 0), ("f", -1)]
        waiting = [engine.generate(urgent(name, priority)) for name, priority in priorities]
        engine.advance(20)
        for generation in [running, *waiting]:
            list(generation)
        assert begun(engine) == ["runs", "d", "f", "b", "e", "a", "c"]


def test_nobody_is_overtaken_for_ever() -> None:
    late, early = Job(1, urgent("late", 0)), Job(0, urgent("early", 1))
    late.born = early.born + OVERTAKING_SECONDS / 2
    assert late.turn < early.turn
    late.born = early.born + OVERTAKING_SECONDS * 2
    assert early.turn < late.turn


def test_one_that_leaves_the_line_leaves_the_others_in_their_order() -> None:
    with engine_of(*"xxxx", max_concurrent=1, gated=True) as engine:
        running = engine.generate(request("runs"))
        engine.advance(1)
        take(running, 1)
        waiting = [engine.generate(urgent(name, at)) for name, at in (("a", 2), ("b", 0), ("c", 1))]
        waiting[1].close()
        engine.advance(20)
        for generation in (running, waiting[0], waiting[2]):
            list(generation)
        assert begun(engine) == ["runs", "c", "a"]


def test_a_full_line_is_refused_with_a_time_to_come_back() -> None:
    with engine_of(LONG, LONG, LONG, gated=True, max_concurrent=1, max_waiting=1) as engine:
        running = engine.generate(request())
        waiting = engine.generate(request())
        with pytest.raises(EngineBusy, match="2 requests are running or waiting") as refusal:
            engine.generate(request())
        assert refusal.value.retry_after >= 1
        running.close()
        engine.advance(1)
        take(waiting, 1)  # the place is free now
        engine.generate(request()).close()


def test_a_place_is_free_before_its_end_can_be_heard() -> None:
    with ScriptedEngine(lambda prompt: "x", max_concurrent=1, max_waiting=0) as engine:
        for _ in range(200):
            assert text_of(engine.generate(request())) == "x"


# -- leaving ------------------------------------------------------------------------------------------------


def test_closing_a_generation_ends_it_at_once_and_leaves_the_others_alone() -> None:
    with engine_of(LONG, "unharmed", gated=True) as engine:
        left, stays = engine.generate(request()), engine.generate(request())
        engine.advance(1)
        take(left, 1)
        left.close()
        left.close()
        assert engine.requests[0].cancelled.wait(SOON)
        with pytest.raises(StopIteration):
            left.next()
        engine.advance(10)
        assert text_of(stays) == "unharmed"
        assert engine.cancelled == [engine.requests[0]]


def test_leaving_the_loop_over_a_generation_cancels_it() -> None:
    with engine_of(LONG) as engine:
        for _ in engine.generate(request()):
            break
        assert engine.requests[0].ended.wait(SOON)


def test_a_forgotten_generation_does_not_run_on() -> None:
    with engine_of(LONG, gated=True) as engine:
        generation = engine.generate(request())
        engine.advance(1)
        take(generation, 1)
        del generation
        gc.collect()
        assert engine.requests[0].cancelled.wait(SOON)


def test_one_thread_can_close_what_another_waits_for() -> None:
    with engine_of(LONG, gated=True) as engine:
        generation = engine.generate(request())
        read: list[EngineItem] = []
        reader = threading.Thread(target=lambda: read.extend(generation))
        reader.start()
        generation.close()
        reader.join(SOON)
        assert not reader.is_alive()
        assert read == []


def test_leaving_the_line_before_ones_turn_costs_the_engine_nothing() -> None:
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


# -- telling ------------------------------------------------------------------------------------------------


def test_a_generation_tells_its_progress_its_tokens_and_then_what_it_cost() -> None:
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


def test_asking_with_a_timeout_says_none_while_there_is_nothing() -> None:
    with engine_of(LONG, gated=True) as engine:
        generation = engine.generate(request())
        assert generation.next(0) is None
        assert generation.next(0.001) is None
        engine.advance(1)
        assert isinstance(generation.next(SOON), TokenDelta)


# -- failing ------------------------------------------------------------------------------------------------


def test_a_failing_request_fails_alone_and_after_what_it_said() -> None:
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


def test_when_a_step_fails_those_who_run_are_told_and_those_who_wait_are_served_by_the_next_engine() -> None:
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


def test_an_engine_that_fails_twice_in_a_row_tells_all_and_pauses_and_says_so_meanwhile() -> None:
    batch = FailingBatch(failures=2)
    scheduler = Scheduler(batch, max_running=1, first_pause=60)
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


def test_an_engine_that_cannot_be_loaded_again_is_tried_until_it_can() -> None:
    batch = FailingBatch(failures=1, failed_loads=3)
    scheduler = Scheduler(batch, first_pause=0.001)
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
    assert batch.loads == 5
    scheduler.stop()


def test_stopping_tells_everybody_and_can_be_done_twice_by_anybody() -> None:
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


# -- the thread itself --------------------------------------------------------------------------------------


class RecordingBatch:
    """Ends every request with its first step, and writes down what is called on which thread."""

    def __init__(self, load_error: EngineError | None = None) -> None:
        self.calls: list[tuple[str, int]] = []
        self._load_error = load_error
        self._keys: list[int] = []

    def _note(self, name: str) -> None:
        self.calls.append((name, threading.get_ident()))

    def load(self, report: Callable[[float], None]) -> ModelFacts:
        self._note("load")
        if self._load_error is not None:
            raise self._load_error
        return ModelFacts(model_id="recording", context_length=10, tokenizer=ScriptedTokenizer())

    def admits(self, request: GenerationRequest) -> bool:
        return True

    def insert(self, key: int, request: GenerationRequest) -> None:
        self._note("insert")
        self._keys.append(key)

    def ready(self) -> bool:
        return True

    def step(self) -> Iterable[tuple[int, Outcome]]:
        self._note("step")
        ended, self._keys = self._keys, []
        return [(key, Ended("stop")) for key in ended]

    def remove(self, key: int) -> None:
        self._note("remove")

    def unload(self) -> None:
        self._note("unload")
        raise RuntimeError("even this must not keep anybody waiting")

    def close(self) -> None:
        self._note("close")


class FailingBatch(RecordingBatch):
    """Fails its first steps once the gate is open, and some of the loads after that."""

    def __init__(self, failures: int, failed_loads: int = 0) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.reloaded = threading.Event()
        self.loads = 0
        self._failures = failures
        self._failed_loads = failed_loads

    def load(self, report: Callable[[float], None]) -> ModelFacts:
        self.loads += 1
        if self.loads > 1 and self._failed_loads:
            self._failed_loads -= 1
            raise EngineError("the file is gone")
        if self.loads > 1:
            self.reloaded.set()
        return super().load(report)

    def step(self) -> Iterable[tuple[int, Outcome]]:
        self.gate.wait(SOON)
        if self._failures:
            self._failures -= 1
            raise RuntimeError("the device is gone")
        return super().step()

    def unload(self) -> None:
        self._keys.clear()


class RoomyBatch(RecordingBatch):
    """Has room for requests of so many tokens altogether, and keeps each until it is told to end it."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.inserted: list[GenerationRequest] = []
        self._sizes: dict[int, int] = {}
        self.ending = threading.Semaphore(0)

    def admits(self, request: GenerationRequest) -> bool:
        if request.max_tokens > self.room:
            raise EngineRefused(f"{request.max_tokens} tokens can never fit into {self.room}.")
        return sum(self._sizes.values()) + request.max_tokens <= self.room

    def insert(self, key: int, request: GenerationRequest) -> None:
        self._sizes[key] = request.max_tokens
        self.inserted.append(request)

    def ready(self) -> bool:
        return self.ending.acquire(blocking=False)

    def step(self) -> Iterable[tuple[int, Outcome]]:
        key = next(iter(self._sizes))
        del self._sizes[key]
        return [(key, Ended("stop"))]

    def remove(self, key: int) -> None:
        del self._sizes[key]


class ClingingBatch(RoomyBatch):
    """Fails the first time it is to drop a request."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.begun = threading.Semaphore(0)
        self.failed = False

    def insert(self, key: int, request: GenerationRequest) -> None:
        super().insert(key, request)
        self.begun.release()

    def remove(self, key: int) -> None:
        if not self.failed:
            self.failed = True
            raise RuntimeError("the device is gone")
        super().remove(key)

    def unload(self) -> None:
        self._sizes.clear()


def ended(scheduler: Scheduler, batch: RoomyBatch, generation: Generation) -> bool:
    batch.ending.release()
    scheduler.wake()
    return isinstance(generation.next(SOON), Finished)


def test_whoever_comes_is_not_lost_when_putting_a_warm_up_aside_breaks_the_engine() -> None:
    batch = ClingingBatch(room=100)
    scheduler = Scheduler(batch)
    scheduler.start()
    scheduler.prewarm(lambda: request("what may come next", max_tokens=0))
    assert batch.begun.acquire(timeout=SOON)
    assert ended(scheduler, batch, scheduler.submit(request(max_tokens=10)))
    scheduler.stop()


def test_whoever_leaves_gives_the_place_back_even_if_that_breaks_the_engine() -> None:
    batch = ClingingBatch(room=100)
    scheduler = Scheduler(batch, max_running=1, max_waiting=1)
    scheduler.start()
    leaver, waiter = (scheduler.submit(request(max_tokens=10)) for _ in range(2))
    assert batch.begun.acquire(timeout=SOON)
    leaver.close()
    assert ended(scheduler, batch, waiter)
    others = [scheduler.submit(request(max_tokens=10)) for _ in range(2)]
    assert all(ended(scheduler, batch, other) for other in others)
    scheduler.stop()


def test_what_must_wait_for_room_waits_in_its_turn_and_what_can_never_fit_is_refused() -> None:
    batch = RoomyBatch(room=100)
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


def test_a_request_that_waits_for_longer_than_its_patience_is_told_when_to_come_back() -> None:
    batch = RoomyBatch(room=100)
    scheduler = Scheduler(batch)
    scheduler.start()
    running = scheduler.submit(request(max_tokens=100))
    late = scheduler.submit(replace(request(max_tokens=50), queue_timeout=0.01))
    with pytest.raises(EngineBusy, match=r"waited 0.01 seconds for its turn") as refusal:
        late.next(SOON)
    assert refusal.value.retry_after >= 1
    assert scheduler.status() == EngineStatus(state="ready", running=1, waiting=0)
    batch.ending.release()
    scheduler.wake()
    assert isinstance(running.next(SOON), Finished)
    scheduler.stop()


def test_warm_ups_run_while_nobody_waits_and_are_put_aside_as_soon_as_somebody_does() -> None:
    batch = RoomyBatch(room=100)
    scheduler = Scheduler(batch)
    scheduler.start()
    guess = request("what may come next", max_tokens=0)
    scheduler.prewarm(lambda: guess)
    asked = scheduler.submit(request(max_tokens=10))
    batch.ending.release()
    scheduler.wake()
    assert isinstance(asked.next(SOON), Finished)
    batch.ending.release()
    scheduler.wake()
    after = scheduler.submit(request(max_tokens=11))
    batch.ending.release()
    scheduler.wake()
    assert isinstance(after.next(SOON), Finished)
    scheduler.stop()
    asked_for = [each.max_tokens for each in batch.inserted if each is not guess]
    assert asked_for == [10, 11]
    assert guess in batch.inserted
    assert scheduler.status().running == 0, "nobody counts a warm-up"


def test_loading_stepping_and_unloading_happen_on_one_thread_that_is_not_ours() -> None:
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


def test_a_failed_load_is_raised_to_whoever_started_it_and_leaves_no_thread() -> None:
    batch = RecordingBatch(load_error=EngineRefused("there is no such model"))
    scheduler = Scheduler(batch)
    with pytest.raises(EngineRefused, match="there is no such model"):
        scheduler.start()
    assert not scheduler.is_healthy()
    assert [name for name, _ in batch.calls] == ["load", "unload", "close"]
    with pytest.raises(EngineStopped, match="there is no such model"):
        scheduler.submit(request())
