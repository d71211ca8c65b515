"""Batches of several ranks without a model: they take the same steps, and they end together."""

import json
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from mlx_backend.engine.base import Finished, GenerationRequest, Progress, Sampling, TokenDelta
from mlx_backend.engine.batch import Ended, ModelFacts, Outcome
from mlx_backend.engine.distributed.batch import LeaderBatch, follow, from_wire, to_wire
from mlx_backend.engine.distributed.transport import Endpoint, Follower, Leader
from mlx_backend.engine.scheduler import Scheduler
from mlx_backend.engine.scripted import ScriptedTokenizer
from mlx_backend.errors import EngineError, EngineRefused, EngineStopped

SOON = 20
REQUEST = GenerationRequest(prompt=[7, 8, 9], max_tokens=3)
EVERYTHING = GenerationRequest(
    prompt=[1, 2, 3],
    max_tokens=9,
    checkpoints=(1, 2),
    sampling=Sampling(
        temperature=0.1 + 0.2, top_p=0.95, seed=2**64 - 1, logit_bias=((5, -100.0), (6, 1 / 3))
    ),
    expected_tokens=5,
    logprobs=3,
    adapter="poet",
    priority=-2,
)


class PlainBatch:
    """A batch that counts, and remembers what was asked of it."""

    def __init__(self, *, wrong_at: int | None = None, breaks_at: int | None = None) -> None:
        self.rate: float | None = None
        self.log: list[Any] = []
        self.load_error: EngineError | None = None
        self.block: threading.Event | None = None
        self.stepping = threading.Event()
        self.rows: dict[int, list[int]] = {}
        self._steps = 0
        self._wrong_at = wrong_at
        self._breaks_at = breaks_at

    def load(self, report: Callable[[float], None]) -> ModelFacts:
        if self.load_error is not None:
            raise self.load_error
        self.log.append("load")
        return ModelFacts(model_id="plain", context_length=100, tokenizer=ScriptedTokenizer())

    def admits(self, request: GenerationRequest) -> bool:
        return True

    def insert(self, key: int, request: GenerationRequest) -> None:
        self.log.append(("insert", key, request))
        self.rows[key] = list(range(request.max_tokens))

    def ready(self) -> bool:
        return True

    def step(self) -> Iterable[tuple[int, Outcome]]:
        self._steps += 1
        self.log.append(("step", self.rate))
        self.stepping.set()
        if self.block is not None:
            self.block.wait()
        if self._steps == self._breaks_at:
            raise RuntimeError("out of memory")
        self.rate = 100.0 * self._steps
        for key, row in list(self.rows.items()):
            yield key, Progress(1, 1)
            yield key, TokenDelta(row.pop(0) + (self._steps == self._wrong_at), "")
            if not row:
                del self.rows[key]
                yield key, Ended("length")

    def remove(self, key: int) -> None:
        self.log.append(("remove", key))
        del self.rows[key]

    def unload(self) -> None:
        self.log.append("unload")

    def close(self) -> None:
        self.log.append("close")


class PlainRanks:
    """A place on the wire; the endpoint goes through a queue."""

    def __init__(self, rank: int, size: int, endpoint: queue.SimpleQueue[Endpoint]) -> None:
        self.rank = rank
        self.size = size
        self.leader: Leader | None = None
        self.follower: Follower | None = None
        self._endpoint = endpoint

    def open(self) -> None:
        if self.rank == 0:
            self.leader = Leader(self.size, ["127.0.0.1"])
            for _ in range(1, self.size):
                self._endpoint.put(self.leader.endpoint)
            self.leader.accept_followers()
        else:
            self.follower = Follower(self.rank, self.size, self._endpoint.get(timeout=SOON))

    def close(self) -> None:
        line = self.leader or self.follower
        if line is not None:
            line.close()


@contextmanager
def group(leads: PlainBatch, *follows: PlainBatch) -> Iterator[tuple[Scheduler, list[Future[int]]]]:
    """A scheduler on rank 0, and what the others will return."""
    endpoint: queue.SimpleQueue[Endpoint] = queue.SimpleQueue()
    size = 1 + len(follows)
    leading = LeaderBatch(leads, PlainRanks(0, size, endpoint))
    scheduler = Scheduler(leading)
    with ThreadPoolExecutor() as threads:
        others = [
            threads.submit(follow, batch, PlainRanks(rank, size, endpoint))
            for rank, batch in enumerate(follows, 1)
        ]
        try:
            scheduler.start()
            leading.on_lost(lambda ending: scheduler.end(ending, within=SOON))
            yield scheduler, others
        finally:
            scheduler.stop()


def test_followers_do_what_rank_0_does_before_the_same_step() -> None:
    leads, *follows = batches = [PlainBatch() for _ in range(3)]
    with group(leads, *follows) as (scheduler, others):
        both = [scheduler.submit(REQUEST), scheduler.submit(replace(REQUEST, max_tokens=5))]
        for generation in both:
            list(generation)
        left = scheduler.submit(replace(REQUEST, max_tokens=1 << 20))
        while not isinstance(left.next(SOON), TokenDelta):
            pass
        left.close()
        list(scheduler.submit(EVERYTHING))
        scheduler.stop()
        assert [other.result(SOON) for other in others] == [0, 0]
    assert [batch.log for batch in follows] == [leads.log] * 2
    assert ("remove", 2) in leads.log
    assert ("insert", 3, EVERYTHING) in leads.log
    assert (
        len({rate for name, rate in (entry for entry in leads.log if len(entry) == 2) if name == "step"}) > 3
    )
    assert all(not batch.rows for batch in batches)


def test_a_request_survives_the_way_to_another_process() -> None:
    assert from_wire(json.loads(json.dumps(to_wire(EVERYTHING)))) == EVERYTHING


def test_a_constraint_that_never_raises_is_rank_0s_alone() -> None:
    class Wish:
        never_raises = True

        def unconstrained_tokens(self) -> int:
            """Nothing is promised."""
            return 0

        def allowed_mask(self) -> None:
            """Anything goes."""

        def advance(self, token: int) -> None:
            """Nothing is read."""

    there = from_wire(json.loads(json.dumps(to_wire(replace(REQUEST, constraint=Wish()))))).constraint
    assert there is not None
    there.advance(7)
    assert (there.allowed_mask(), there.unconstrained_tokens(), there.never_raises) == (None, 0, True)
    assert from_wire(json.loads(json.dumps(to_wire(REQUEST)))).constraint is None


def test_what_lives_in_one_process_is_refused_and_the_others_go_on() -> None:
    class Grammar:
        never_raises = False

        def unconstrained_tokens(self) -> int:
            """Nothing is promised."""
            return 0

        def allowed_mask(self) -> None:
            """Anything goes."""

        def advance(self, token: int) -> None:
            """Nothing is read."""

    with group(PlainBatch(), PlainBatch()) as (scheduler, _):
        bound, free = scheduler.submit(replace(REQUEST, constraint=Grammar())), scheduler.submit(REQUEST)
        with pytest.raises(EngineRefused, match="must follow a grammar is not possible yet while several"):
            list(bound)
        assert isinstance(list(free)[-1], Finished)


def test_ranks_that_come_to_different_results_do_not_go_on() -> None:
    with group(PlainBatch(), PlainBatch(wrong_at=2)) as (scheduler, [other]):
        with pytest.raises(EngineStopped, match="Rank 1 has ended: It came to another result than rank 0"):
            list(scheduler.submit(replace(REQUEST, max_tokens=1 << 20)))
        assert other.result(SOON) == 1
        assert scheduler.status().state == "stopped"


def test_an_exception_on_rank_0_is_the_end_for_all_and_nothing_is_restarted() -> None:
    leads, follows = PlainBatch(breaks_at=2), PlainBatch()
    with group(leads, follows) as (scheduler, [other]):
        with pytest.raises(EngineStopped, match=r"Rank 0 could not go on: RuntimeError: out of memory"):
            list(scheduler.submit(REQUEST))
        assert other.result(SOON) == 1
        with pytest.raises(EngineStopped, match="out of memory"):
            scheduler.submit(REQUEST)
    assert [entry for entry in leads.log if isinstance(entry, str)] == ["load", "unload", "close"]


def test_a_follower_whose_rank_0_has_gone_ends_with_an_error() -> None:
    endpoint: queue.SimpleQueue[Endpoint] = queue.SimpleQueue()
    leads = PlainRanks(0, 2, endpoint)
    batch = PlainBatch()
    with ThreadPoolExecutor() as threads:
        other = threads.submit(follow, batch, PlainRanks(1, 2, endpoint))
        leads.open()
        leads.close()
        assert other.result(SOON) == 1
    assert batch.log == ["load", "unload", "close"]


def test_an_exception_on_another_rank_is_quoted() -> None:
    with group(PlainBatch(), PlainBatch(), PlainBatch(breaks_at=2)) as (scheduler, others):
        with pytest.raises(EngineStopped, match="Rank 2 has ended: RuntimeError: out of memory"):
            list(scheduler.submit(replace(REQUEST, max_tokens=1 << 20)))
        assert [other.result(SOON) for other in others] == [1, 1]


def test_a_rank_that_is_lost_while_nobody_asks_for_anything_is_noticed() -> None:
    leads, follows = PlainBatch(), PlainBatch()
    endpoint: queue.SimpleQueue[Endpoint] = queue.SimpleQueue()
    leading = LeaderBatch(leads, PlainRanks(0, 2, endpoint))
    scheduler = Scheduler(leading)
    lost = PlainRanks(1, 2, endpoint)
    opening = threading.Thread(target=lost.open)
    opening.start()
    scheduler.start()
    told: queue.SimpleQueue[bool] = queue.SimpleQueue()
    leading.on_lost(lambda ending: told.put(scheduler.end(ending, within=SOON)))
    opening.join(SOON)
    lost.close()
    assert told.get(timeout=SOON) is True
    assert scheduler.status().state == "stopped"
    assert scheduler.status().detail.startswith("Rank 1 was lost")
    scheduler.stop()
    assert follows.log == []


def test_a_rank_that_cannot_load_is_quoted_to_whoever_started_rank_0() -> None:
    broken = PlainBatch()
    broken.load_error = EngineRefused("there is no such model")

    class Meeting(PlainBatch):
        def load(self, report: Callable[[float], None]) -> ModelFacts:
            ranks.open()
            assert ranks.leader is not None
            ranks.leader.all_gather("loaded")
            return super().load(report)

    endpoint: queue.SimpleQueue[Endpoint] = queue.SimpleQueue()
    ranks = PlainRanks(0, 2, endpoint)
    leading = LeaderBatch(Meeting(), NothingToOpen(ranks))
    with ThreadPoolExecutor() as threads:
        other = threads.submit(follow, broken, PlainRanks(1, 2, endpoint))
        with pytest.raises(EngineStopped, match="Rank 1 has ended: there is no such model"):
            Scheduler(leading).start()
        assert other.result(SOON) == 1


class NothingToOpen:
    """A place whose line is opened by somebody else."""

    def __init__(self, ranks: PlainRanks) -> None:
        self._ranks = ranks
        self.rank, self.size = ranks.rank, ranks.size
        self.follower: Follower | None = None

    @property
    def leader(self) -> Leader | None:
        return self._ranks.leader

    def open(self) -> None:
        """It is open."""

    def close(self) -> None:
        self._ranks.close()


def test_everybody_is_told_even_if_the_thread_does_not_come_back() -> None:
    batch = PlainBatch()
    batch.block = threading.Event()
    scheduler = Scheduler(batch)
    scheduler.start()
    running = scheduler.submit(REQUEST)
    assert batch.stepping.wait(SOON)
    assert scheduler.end(EngineStopped("rank 1 was lost"), within=0.1) is False
    with pytest.raises(EngineStopped, match="rank 1 was lost"):
        list(running)
    with pytest.raises(EngineStopped, match="rank 1 was lost"):
        scheduler.submit(REQUEST)
    assert scheduler.status().state == "stopped"
    scheduler.stop()  # waits for nobody
    batch.block.set()
