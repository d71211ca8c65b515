"""Which models are in memory: loaded when asked for, shared, kept while used, unloaded when idle or in the way.

Real threads and scripted engines; the clock is the test's own, so nothing here waits for time to pass.
"""

import gc
import math
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from mlx_backend.engine.base import GenerationRequest, TokenDelta
from mlx_backend.engine.scripted import ScriptedEngine
from mlx_backend.errors import EngineError, EngineStopped
from mlx_backend.models.spec import ModelSpec
from mlx_backend.registry.catalogue import Catalogue
from mlx_backend.registry.errors import ModelLoading, NoRoom, UnknownModel
from mlx_backend.registry.residency import MAX_QUEUED, Hold, Residency, Unloading
from mlx_backend.registry.resident import Load, ModelState, Resident, to_make_room

SOON = 20  # seconds after which a test that waits for another thread gives up
GB = 1_000_000_000


class Clock:
    """Time that moves when the test says so."""

    def __init__(self) -> None:
        self._now = 100.0
        self._lock = threading.Lock()
        self._conditions: set[threading.Condition] = set()
        self._seen = threading.local()
        self.somebody_waits = threading.Condition()

    def now(self) -> float:
        self._seen.value = self._now
        return self._now

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        with self._lock:
            if self._seen.value != self._now:  # it has moved since the caller looked
                return
            self._conditions.add(condition)
        with self.somebody_waits:
            self.somebody_waits.notify_all()
        condition.wait(SOON)

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds
            conditions = list(self._conditions)
        for condition in conditions:
            with condition:
                condition.notify_all()


class Loaded:
    """What loading gives: as much of a service as a residency knows."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.engine = ScriptedEngine(lambda _prompt: "yes", model_id=name)


class World:
    """A catalogue and a loader whose every step a test can hold up or let fail."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.loads: list[str] = []
        self.begun: dict[str, threading.Event] = {}
        self.gates: dict[str, threading.Event] = {}
        self.failures: dict[str, list[BaseException]] = {}
        self.reports: dict[str, Callable[[float], None]] = {}
        self.sizes: dict[str, int] = {}
        self.at_once = self.most_at_once = 0
        self.made: list[Loaded] = []
        self.residency: Residency[Loaded]

    def serve(
        self, *specs: ModelSpec, memory_limit: int | None = None, default_name: str | None = None
    ) -> Residency[Loaded]:
        self.residency = Residency(
            Catalogue(specs),
            self.load,
            memory_limit=memory_limit,
            measure=lambda spec: self.sizes.get(spec.name, 0),
            default_name=default_name,
            clock=self.clock,
        )
        return self.residency

    def hold_up(self, name: str) -> threading.Event:
        """Let loads of this model begin, and end when the event that is returned is set."""
        self.begun[name] = threading.Event()
        self.gates[name] = threading.Event()
        return self.gates[name]

    def load(self, spec: ModelSpec, report: Callable[[float], None]) -> Loaded:
        self.loads.append(spec.name)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            self.reports[spec.name] = report
            if spec.name in self.gates:
                self.begun[spec.name].set()
                assert self.gates[spec.name].wait(SOON)
            if self.failures.get(spec.name):
                raise self.failures[spec.name].pop(0)
            report(1.0)
            self.made.append(Loaded(spec.name))
            return self.made[-1]
        finally:
            self.at_once -= 1

    def state(self, name: str) -> ModelState:
        return next(state for state in self.residency.states() if state.name == name)

    def until(self, name: str, state: str) -> None:
        """Wait for a model to be in a state."""
        with self.residency._changed:
            assert self.residency._changed.wait_for(lambda: self.state(name).state == state, SOON)

    def until_waiting(self, name: str, count: int) -> None:
        """Wait for so many requests to wait for a load."""

        def reached() -> bool:
            resident = self.residency._residents.get(name)
            return resident is not None and resident.load is not None and resident.load.waiters == count

        with self.clock.somebody_waits:
            assert self.clock.somebody_waits.wait_for(reached, SOON)


def spec(
    name: str, *, pinned: bool = False, ttl: float | None = None, aliases: tuple[str, ...] = ()
) -> ModelSpec:
    return ModelSpec(name=name, source=f"/models/{name}", pinned=pinned, ttl=ttl, aliases=aliases)


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("model-")}


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    for gate in world.gates.values():
        gate.set()
    world.residency.stop()
    assert threads() == set()
    assert not any(loaded.engine.healthy() for loaded in world.made)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(20) as pool:
        yield pool


def error_of(asked: "Future[Hold[Loaded]]") -> BaseException:
    error = asked.exception(SOON)
    assert error is not None
    return error


# -- loading ------------------------------------------------------------------------------------------------


def test_a_model_is_loaded_when_it_is_asked_for_and_then_kept(world: World) -> None:
    residency = world.serve(spec("a", aliases=("first",)), spec("b"))
    assert world.loads == []
    with residency.use("a", SOON) as service:
        assert service.name == "a"
        with residency.use("first", 0) as again:
            assert again is service
    with residency.use("a", 0) as later:
        assert later is service
    assert world.loads == ["a"]


def test_requests_that_come_while_a_model_is_loaded_share_the_load(
    world: World, pool: ThreadPoolExecutor
) -> None:
    residency = world.serve(spec("a"))
    gate = world.hold_up("a")
    asked = [pool.submit(residency.acquire, "a", math.inf) for _ in range(10)]
    world.until_waiting("a", 10)
    gate.set()
    holds = [future.result(SOON) for future in asked]
    assert len({id(hold.service) for hold in holds}) == 1
    assert world.state("a").in_use == 10
    assert world.loads == ["a"]


def test_different_models_are_loaded_one_after_another_in_their_order(
    world: World, pool: ThreadPoolExecutor
) -> None:
    residency = world.serve(*map(spec, "abc"))
    gate = world.hold_up("a")
    asked = []
    for name in "abc":
        asked.append(pool.submit(residency.acquire, name, math.inf))
        world.until_waiting(name, 1)
    assert [world.state(name).state for name in "abc"] == ["loading"] * 3
    assert world.loads == ["a"]
    gate.set()
    for future in asked:
        future.result(SOON).release()
    assert (world.loads, world.most_at_once) == (["a", "b", "c"], 1)


def test_a_ready_model_answers_while_another_is_loaded(world: World) -> None:
    residency = world.serve(spec("a"), spec("b"))
    residency.acquire("a", SOON).release()
    world.hold_up("b")
    with pytest.raises(ModelLoading):
        residency.acquire("b", 0)
    assert world.begun["b"].wait(SOON)
    with residency.use("a", 0) as service:
        assert service.engine.healthy()


def test_who_cannot_wait_is_told_how_far_it_is_and_when_to_come_back(
    world: World, pool: ThreadPoolExecutor
) -> None:
    residency = world.serve(spec("a"))
    gate = world.hold_up("a")
    with pytest.raises(ModelLoading) as at_once:
        residency.acquire("a", 0)
    assert (at_once.value.name, at_once.value.percent) == ("a", 0)
    assert world.begun["a"].wait(SOON)
    asked = pool.submit(residency.acquire, "a", 30)
    world.until_waiting("a", 1)
    world.clock.advance(10)
    for part in (math.nan, -1, 0.25):
        world.reports["a"](part)
    assert world.state("a").percent == 25
    world.clock.advance(20)
    late = error_of(asked)
    assert isinstance(late, ModelLoading)
    assert (late.percent, late.retry_after) == (25, 60)
    assert str(late) == "The model 'a' is being loaded (25 %); try again in 60 s."
    gate.set()
    residency.acquire("a", math.inf).release()
    assert world.loads == ["a"], "the load went on without anybody waiting"


def test_a_model_in_the_line_is_not_said_to_be_at_any_percent(world: World) -> None:
    residency = world.serve(spec("a"), spec("b"))
    world.hold_up("a")
    for name in "ab":
        with pytest.raises(ModelLoading) as caught:
            residency.acquire(name, 0)
        assert (caught.value.percent, caught.value.retry_after) == (0, 5)


def test_the_line_of_models_to_be_loaded_has_an_end(world: World) -> None:
    names = [f"m{i}" for i in range(MAX_QUEUED + 5)]
    residency = world.serve(*map(spec, names))
    gate = world.hold_up("m0")
    for name in names:
        with pytest.raises(ModelLoading):
            residency.acquire(name, 0)
        assert world.begun["m0"].wait(SOON)
    states = [world.state(name).state for name in names]
    assert states == ["loading"] * (MAX_QUEUED + 1) + ["unloaded"] * 4
    gate.set()
    residency.acquire(names[-1], math.inf).release()


def test_pinned_models_are_loaded_at_the_start_with_those_that_are_named(world: World) -> None:
    residency = world.serve(spec("a"), spec("b", pinned=True), spec("c", aliases=("see",)))
    residency.preload("see", "b")
    assert world.loads == ["b", "c"]
    assert [world.state(name).state for name in "abc"] == ["unloaded", "ready", "ready"]


def test_a_pinned_model_that_cannot_be_loaded_is_said_to_be_so_at_the_start(world: World) -> None:
    absent = ModelSpec(name="x", source="owner/not-here", pinned=True)
    with pytest.raises(UnknownModel, match="has not been downloaded"):
        world.serve(absent).preload()
    world.failures["b"] = [EngineError("no weights")]
    with pytest.raises(EngineError, match="no weights"):
        world.serve(spec("b", pinned=True)).preload()


# -- names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, "", "default"])
def test_a_request_that_names_no_model_gets_the_default(name: str | None, world: World) -> None:
    with world.serve(spec("a"), spec("b"), default_name="b").use(name, SOON) as service:
        assert service.name == "b"


def test_a_model_may_be_called_default(world: World) -> None:
    residency = world.serve(spec("a"), spec("b", aliases=("default",)), default_name="a")
    assert residency.acquire("default", SOON).spec.name == "b"


def test_without_a_default_a_request_has_to_name_one(world: World) -> None:
    residency = world.serve(spec("a"))
    for name in (None, "default", "z"):
        with pytest.raises(UnknownModel, match="There is 'a'"):
            residency.acquire(name, SOON)
    assert world.loads == []


# -- failing ------------------------------------------------------------------------------------------------


def test_a_failed_load_is_told_to_all_who_waited_and_tried_again_after_a_pause(
    world: World, pool: ThreadPoolExecutor
) -> None:
    residency = world.serve(spec("a"))
    world.failures["a"] = [EngineError("no such folder")]
    gate = world.hold_up("a")
    asked = [pool.submit(residency.acquire, "a", math.inf) for _ in range(3)]
    world.until_waiting("a", 3)
    gate.set()
    errors = [error_of(future) for future in asked]
    assert [(type(error), str(error)) for error in errors] == [(EngineError, "no such folder")] * 3
    assert len(set(map(id, errors))) == 3, "threads do not share an error's traceback"
    state = world.state("a")
    assert (state.state, state.error, state.percent) == ("failed", "no such folder", 0)
    with pytest.raises(EngineError, match="no such folder"):
        residency.acquire("a", SOON)
    assert world.loads == ["a"]
    world.clock.advance(1)
    residency.acquire("a", SOON).release()
    assert (world.state("a").state, world.state("a").error) == ("ready", None)


def test_the_pause_doubles_up_to_a_minute_and_a_success_forgets_it(world: World) -> None:
    residency = world.serve(spec("a"))
    world.failures["a"] = [EngineError(str(number)) for number in range(9)]
    for pause in (1, 2, 4, 8, 16, 32, 60, 60, 60):
        for _ in range(2):  # the second is answered from memory
            with pytest.raises(EngineError):
                residency.acquire("a", SOON)
        world.clock.advance(pause)
    residency.acquire("a", SOON).release()
    residency.unload("a")
    world.failures["a"] = [EngineError("again")]
    with pytest.raises(EngineError):
        residency.acquire("a", SOON)
    world.clock.advance(1)
    residency.acquire("a", SOON).release()
    assert len(world.loads) == 12


@pytest.mark.parametrize("error", [ValueError("secret"), SystemExit(1), MemoryError()])
def test_whatever_loading_raises_nobody_is_left_waiting(
    error: BaseException, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    residency = world.serve(spec("a"))
    world.failures["a"] = [error]
    with pytest.raises(EngineError) as caught:
        residency.acquire("a", SOON)
    assert str(caught.value) == "The model 'a' could not be loaded; the server's log says why."
    assert "nobody foresaw" in caplog.text
    world.clock.advance(1)
    residency.acquire("a", SOON).release()


def test_a_failed_load_keeps_nothing_of_the_half_loaded_model(world: World) -> None:
    kept: list[weakref.ref[World]] = []

    def load(_spec: ModelSpec, _report: Callable[[float], None]) -> Loaded:
        half = World()
        kept.append(weakref.ref(half))
        try:
            raise KeyError("a tensor")
        except KeyError as error:
            raise EngineError("half of it is missing") from error

    world.residency = Residency(Catalogue([spec("a")]), load, clock=world.clock)
    with pytest.raises(EngineError, match="half of it"):
        world.residency.acquire("a", SOON)
    gc.collect()
    assert kept[0]() is None


def test_an_engine_that_has_ended_is_loaded_again(world: World) -> None:
    residency = world.serve(spec("a"))
    with residency.use("a", SOON) as dead:
        dead.engine.stop()
    with residency.use("a", math.inf) as service:
        assert service is not dead
        assert service.engine.healthy()
    assert world.loads == ["a", "a"]


def test_an_engine_that_ends_while_others_have_it_is_buried_when_they_have_left(
    world: World, pool: ThreadPoolExecutor
) -> None:
    residency = world.serve(spec("a"))
    first = residency.acquire("a", SOON)
    first.service.engine.stop()
    asked = pool.submit(residency.acquire, "a", math.inf)
    first.release()
    assert asked.result(SOON).service.engine.healthy()


def test_an_engine_that_is_dead_on_arrival_is_not_loaded_for_ever(world: World) -> None:
    def load(_spec: ModelSpec, _report: Callable[[float], None]) -> Loaded:
        loaded = Loaded("a")
        loaded.engine.stop()
        world.loads.append("a")
        return loaded

    world.residency = Residency(Catalogue([spec("a")]), load, clock=world.clock)
    with world.residency.use("a", math.inf) as service, pytest.raises(EngineStopped):
        service.engine.generate(GenerationRequest(prompt=[1], max_tokens=1))
    assert world.loads == ["a", "a"]


# -- holding ------------------------------------------------------------------------------------------------


def test_a_model_is_given_back_once_however_often_that_is_said(world: World) -> None:
    residency = world.serve(spec("a"))
    first, second = residency.acquire("a", SOON), residency.acquire("a", SOON)
    first.release()
    first.release()
    assert world.state("a").in_use == 1
    with pytest.raises(RuntimeError, match="'a' has been released"):
        _ = first.service
    second.release()
    assert world.state("a").in_use == 0


def test_a_forgotten_hold_gives_its_model_back(world: World) -> None:
    residency = world.serve(spec("a"))
    hold = residency.acquire("a", SOON)
    del hold
    gc.collect()
    assert world.state("a").in_use == 0


def test_a_block_that_fails_gives_its_model_back(world: World) -> None:
    residency = world.serve(spec("a"))
    with pytest.raises(ZeroDivisionError), residency.use("a", SOON):
        _ = 1 // 0
    assert world.state("a").in_use == 0


# -- idle ---------------------------------------------------------------------------------------------------


def test_an_idle_model_is_unloaded_when_its_time_is_over(world: World) -> None:
    residency = world.serve(spec("a", ttl=60))
    with residency.use("a", SOON) as service:
        world.clock.advance(1000)
        assert world.state("a").state == "ready", "it is in use"
    world.clock.advance(59)
    residency.acquire("a", 0).release()
    world.clock.advance(59)
    residency.acquire("a", 0).release()
    assert service.engine.healthy(), "each use begins the time anew"
    world.clock.advance(60)
    world.until("a", "unloaded")
    assert not service.engine.healthy()
    residency.acquire("a", math.inf).release()
    assert world.loads == ["a", "a"]


def test_a_model_that_was_loaded_for_nobody_is_unloaded_too(world: World) -> None:
    residency = world.serve(spec("a", ttl=60))
    with pytest.raises(ModelLoading):
        residency.acquire("a", 0)
    world.until("a", "ready")
    world.clock.advance(60)
    world.until("a", "unloaded")


def test_each_model_has_its_own_time_and_a_pinned_one_has_none(world: World) -> None:
    residency = world.serve(spec("a", ttl=60), spec("b", ttl=20), spec("c", ttl=1, pinned=True), spec("d"))
    for name in "abcd":
        residency.acquire(name, SOON).release()
    world.clock.advance(20)
    world.until("b", "unloaded")
    world.clock.advance(40)
    world.until("a", "unloaded")
    assert [world.state(name).state for name in "abcd"] == ["unloaded", "unloaded", "ready", "ready"]


def test_nobody_keeps_house_where_nothing_has_a_time(world: World) -> None:
    residency = world.serve(spec("a"))
    assert threads() == set()
    residency.acquire("a", SOON).release()
    assert threads() == {"model-loader"}


# -- room ---------------------------------------------------------------------------------------------------


def test_the_model_that_was_used_least_recently_goes_first(world: World) -> None:
    world.sizes = dict.fromkeys("abcd", 4 * GB)
    residency = world.serve(*map(spec, "abcd"), memory_limit=12 * GB)
    for name in "abca":
        world.clock.advance(1)
        residency.acquire(name, SOON).release()
    residency.acquire("d", SOON).release()
    assert [world.state(name).state for name in "abcd"] == ["ready", "unloaded", "ready", "ready"]


def test_as_many_go_as_are_needed(world: World) -> None:
    world.sizes = {"a": 4 * GB, "b": 4 * GB, "c": 4 * GB, "big": 8 * GB}
    residency = world.serve(*map(spec, ["a", "b", "c", "big"]), memory_limit=12 * GB)
    for name in ("a", "b", "c", "big"):
        world.clock.advance(1)
        residency.acquire(name, SOON).release()
    assert set(residency.services()) == {"c", "big"}


def test_models_that_are_used_or_pinned_stay_and_the_figures_are_told(world: World) -> None:
    world.sizes = {"a": 4 * GB, "b": 2 * GB, "c": 1 * GB, "big": 5 * GB}
    residency = world.serve(spec("a", pinned=True), *map(spec, ["b", "c", "big"]), memory_limit=10 * GB)
    residency.preload("c")
    used = residency.acquire("b", SOON)
    with pytest.raises(NoRoom) as caught:
        residency.acquire("big", SOON)
    assert str(caught.value) == (
        "The model 'big' needs 5.0 GB, and 10.0 GB is the limit for all models. "
        "In memory and staying there: 'a' (4.0 GB, pinned), 'b' (2.0 GB, in use by 1)."
    )
    assert caught.value.retry_after == 5
    assert set(residency.services()) == {"a", "b", "c"}, "nobody goes in vain"
    assert world.state("big").state == "unloaded"
    used.release()
    residency.acquire("big", SOON).release()
    assert set(residency.services()) == {"a", "big", "c"}
    assert world.loads == ["a", "c", "b", "big"]


def test_a_model_that_will_never_fit_is_told_so(world: World) -> None:
    world.sizes = {"a": 4 * GB, "b": 11 * GB, "c": 7 * GB}
    residency = world.serve(spec("a", pinned=True), spec("b"), spec("c"), memory_limit=10 * GB)
    residency.preload()
    for name in "bc":
        with pytest.raises(NoRoom) as caught:
            residency.acquire(name, SOON)
        assert caught.value.retry_after is None


def test_what_had_to_be_downloaded_is_measured_when_it_is_there(world: World) -> None:
    world.sizes = {"a": 6 * GB, "c": 5 * GB}
    residency = world.serve(*map(spec, "abc"), memory_limit=10 * GB)
    residency.acquire("a", SOON).release()
    gate = world.hold_up("b")
    with pytest.raises(ModelLoading):
        residency.acquire("b", 0)
    assert world.begun["b"].wait(SOON)
    world.sizes["b"] = 6 * GB
    gate.set()
    world.until("b", "ready")
    assert set(residency.services()) == {"b"}, "there is no room for both"
    residency.acquire("c", SOON).release()
    assert set(residency.services()) == {"c"}


def test_room_that_is_being_made_is_waited_for(
    world: World, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.sizes = {"a": 6 * GB, "b": 6 * GB}
    residency = world.serve(spec("a"), spec("b"), memory_limit=10 * GB)
    with residency.use("a", SOON) as service:
        stop = service.engine.stop
    begun, gate = threading.Event(), threading.Event()

    def slowly() -> None:
        begun.set()
        assert gate.wait(SOON)
        stop()

    monkeypatch.setattr(service.engine, "stop", slowly)
    unloading = pool.submit(residency.unload, "a")
    assert begun.wait(SOON)
    asked = pool.submit(residency.acquire, "b", math.inf)
    world.until_waiting("b", 1)
    assert world.state("a").state == "unloading"
    gate.set()
    assert unloading.result(SOON) is Unloading.UNLOADED
    assert asked.result(SOON).spec.name == "b"


def resident(name: str, size: int, used: float, *, holds: int = 0, pinned: bool = False) -> Resident[Loaded]:
    return Resident(spec(name, pinned=pinned), state="ready", size=size, used=used, holds=holds)


def test_who_is_waited_for_does_not_go() -> None:
    one, other = resident("one", 5, used=1), resident("other", 5, used=2)
    one.load = Load(waiters=1, over=True)
    assert to_make_room("new", 5, 10, [one, other]) == [other]
    assert to_make_room("new", 0, 10, [one, other]) == []
    with pytest.raises(NoRoom, match=r"'one' \(5e-06 MB, in use by 1\)"):
        to_make_room("new", 6, 10, [one, other])


# -- unloading on request -----------------------------------------------------------------------------------


def test_an_idle_model_is_unloaded_at_once(world: World) -> None:
    residency = world.serve(spec("a", aliases=("x",)))
    assert residency.unload("a") is Unloading.NOT_LOADED
    with residency.use("a", SOON) as service:
        pass
    assert residency.unload("x") is Unloading.UNLOADED
    assert not service.engine.healthy()
    assert residency.unload("a") is Unloading.NOT_LOADED
    with pytest.raises(UnknownModel):
        residency.unload("nobody")


def test_a_model_in_use_is_unloaded_after_its_replies_and_loaded_again_for_new_ones(
    world: World, pool: ThreadPoolExecutor
) -> None:
    residency = world.serve(spec("a"))
    first, second = residency.acquire("a", SOON), residency.acquire("a", SOON)
    old = first.service
    assert residency.unload("a") is Unloading.WHEN_IDLE
    with pytest.raises(ModelLoading):
        residency.acquire("a", 0)
    asked = pool.submit(residency.acquire, "a", math.inf)
    first.release()
    assert old.engine.healthy(), "a reply is still running"
    assert not asked.done()
    second.release()
    assert asked.result(SOON).service is not old
    assert not old.engine.healthy()
    assert world.loads == ["a", "a"]


def test_a_model_that_is_being_loaded_is_unloaded_after_those_who_waited_have_had_it(
    world: World, pool: ThreadPoolExecutor
) -> None:
    residency = world.serve(spec("a"))
    gate = world.hold_up("a")
    asked = pool.submit(residency.acquire, "a", math.inf)
    world.until_waiting("a", 1)
    assert residency.unload("a") is Unloading.WHEN_IDLE
    gate.set()
    hold = asked.result(SOON)
    assert hold.service.engine.healthy()
    hold.release()
    world.until("a", "unloaded")


def test_a_load_that_nobody_waits_for_and_nobody_wants_ends_in_nothing(world: World) -> None:
    residency = world.serve(spec("a"))
    gate = world.hold_up("a")
    with pytest.raises(ModelLoading):
        residency.acquire("a", 0)
    assert world.begun["a"].wait(SOON)
    residency.unload("a")
    gate.set()
    world.until("a", "unloaded")
    assert world.loads == ["a"]


def test_a_pinned_model_is_not_unloaded(world: World) -> None:
    residency = world.serve(spec("a", pinned=True))
    residency.preload()
    assert residency.unload("a") is Unloading.PINNED
    assert world.state("a").state == "ready"


# -- telling ------------------------------------------------------------------------------------------------


def test_the_states_tell_of_every_model_that_can_be_served(world: World) -> None:
    residency = world.serve(spec("a", pinned=True), spec("b"))
    assert residency.states() == [
        ModelState(name="a", state="unloaded", pinned=True),
        ModelState(name="b", state="unloaded"),
    ]
    with residency.use("b", SOON):
        state = world.state("b")
        assert (state.state, state.percent, state.in_use) == ("ready", 100, 1)
        assert state.last_used is not None
    assert world.state("a").last_used is None


def test_a_model_that_a_request_has_brought_is_told_of_while_it_is_there(world: World) -> None:
    world.residency = Residency(Catalogue([], allow_download=True), world.load, clock=world.clock)
    assert world.residency.states() == []
    world.residency.acquire("owner/new", SOON).release()
    assert world.state("owner/new").state == "ready"
    world.residency.unload("owner/new")
    assert world.residency.states() == []


def test_names_that_came_to_nothing_are_forgotten(world: World) -> None:
    world.residency = Residency(Catalogue([], allow_download=True), world.load, clock=world.clock)
    for number in range(600):
        world.failures[f"owner/m{number}"] = [EngineError("no such repository")]
        with pytest.raises(EngineError, match="no such repository"):
            world.residency.acquire(f"owner/m{number}", SOON)
    assert len(world.residency.states()) < 300


# -- stopping -----------------------------------------------------------------------------------------------


def test_stopping_tells_those_who_wait_and_ends_every_thread(world: World, pool: ThreadPoolExecutor) -> None:
    residency = world.serve(spec("a", ttl=1000), spec("b"), spec("c"))
    hold = residency.acquire("a", SOON)
    running = hold.service.engine
    gate = world.hold_up("b")
    asked = [pool.submit(residency.acquire, name, math.inf) for name in "bc"]
    assert world.begun["b"].wait(SOON)
    stopping = pool.submit(residency.stop)
    assert [type(error_of(future)) for future in asked] == [EngineStopped, EngineStopped]
    gate.set()
    stopping.result(SOON)
    assert not running.healthy()
    assert threads() == set()
    with pytest.raises(EngineStopped, match="The server is stopping"):
        residency.acquire("a", math.inf)
    hold.release()
    residency.stop()
    assert world.loads == ["a", "b"]
    assert len(world.made) == 1, "the load heard of the end when it reported"
    world.reports["a"](0.5)  # an engine that was loading itself again


def test_what_is_loaded_in_spite_of_the_end_is_stopped(world: World) -> None:
    loaded: list[Loaded] = []
    begun, gate = threading.Event(), threading.Event()

    def load(_spec: ModelSpec, _report: Callable[[float], None]) -> Loaded:
        begun.set()
        assert gate.wait(SOON)
        loaded.append(Loaded("a"))
        return loaded[0]

    world.residency = Residency(Catalogue([spec("a")]), load, clock=world.clock)
    with pytest.raises(ModelLoading):
        world.residency.acquire("a", 0)
    assert begun.wait(SOON)
    world.residency.stop(patience=0)
    gate.set()
    world.residency.stop()
    assert not loaded[0].engine.healthy()


def test_an_engine_that_does_not_stop_cleanly_does_not_stop_the_others_from_it(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    residency = world.serve(spec("a"), spec("b"))
    with residency.use("a", SOON) as first, residency.use("b", SOON) as second:
        pass
    stop = first.engine.stop

    def fails() -> None:
        stop()
        raise OSError("the disk is full")

    monkeypatch.setattr(first.engine, "stop", fails)
    residency.stop()
    assert not second.engine.healthy()
    assert "could not be stopped cleanly" in caplog.text


def test_stopping_before_anything_was_loaded_is_nothing_special(world: World) -> None:
    world.serve(spec("a")).stop()


# -- all of it at once --------------------------------------------------------------------------------------


def test_a_crowd_never_meets_a_model_that_has_been_unloaded_under_it(
    world: World, pool: ThreadPoolExecutor
) -> None:
    names = "abcdef"
    world.sizes = dict.fromkeys(names, 4 * GB)
    residency = world.serve(*(spec(name, ttl=1) for name in names), memory_limit=12 * GB)

    def visit(seed: int) -> int:
        dice, replies = random.Random(seed), 0
        for _ in range(30):
            name = dice.choice(names)
            match dice.randrange(10):
                case 0:
                    residency.unload(name)
                case 1:
                    world.clock.advance(0.5)
                case _:
                    with suppress(NoRoom, ModelLoading), residency.use(name, dice.choice([0, 5])) as service:
                        assert service.name == name
                        items = service.engine.generate(GenerationRequest(prompt=[1], max_tokens=9))
                        replies += (
                            "".join(item.text for item in items if isinstance(item, TokenDelta)) == "yes"
                        )
        return replies

    asked = [pool.submit(visit, seed) for seed in range(8)]
    while not all(future.done() for future in asked):  # nobody else moves the clock for the last to wait
        world.clock.advance(0.1)
        with suppress(TimeoutError):
            asked[-1].result(0.01)
    assert sum(future.result(SOON) for future in asked) > 0
    assert all(state.in_use == 0 for state in residency.states())


def test_importing_the_models_is_free() -> None:
    modules = ["config_file", "catalogue", "residency"]
    heavy = [
        "huggingface_hub",
        "mlx",
        "mlx_lm",
        "numpy",
        "transformers",
        "pydantic",
        "werkzeug",
        "mlx_backend.server",
    ]
    imports = ", ".join(f"mlx_backend.registry.{module}" for module in modules)
    code = f"import sys, {imports}; print(*(sys.modules.keys() & {heavy!r}))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
