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
from prepared_images import prepared
from scripted_engine import ScriptedTokenizer

from mlx_backend.engine.base import Finished, GenerationRequest, Progress, Sampling, TokenDelta
from mlx_backend.engine.batch import Ended, ModelInfo, Outcome
from mlx_backend.engine.distributed.batch import LeaderBatch, follow, from_wire, to_wire
from mlx_backend.engine.distributed.transport import Endpoint, Follower, Leader
from mlx_backend.engine.images import PromptImage
from mlx_backend.engine.scheduler import Scheduler
from mlx_backend.errors import EngineError, EngineRefused, EngineStopped

SOON = 60
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
    """A batch that generates 0, 1, 2 …, and records its calls."""

    def __init__(self, *, wrong_at: int | None = None, breaks_at: int | None = None) -> None:
        self.pace: list[float] = []
        self.log: list[Any] = []
        self.load_error: EngineError | None = None
        self.block: threading.Event | None = None
        self.stepping = threading.Event()
        self.rows: dict[int, list[int]] = {}
        self._steps = 0
        self._wrong_at = wrong_at
        self._breaks_at = breaks_at

    def load(self, on_progress: Callable[[float], None]) -> ModelInfo:
        if self.load_error is not None:
            raise self.load_error
        self.log.append("load")
        return ModelInfo(model_id="plain", context_length=100, tokenizer=ScriptedTokenizer())

    def admits(self, request: GenerationRequest) -> bool:
        return True

    def insert(self, key: int, request: GenerationRequest) -> None:
        self.log.append(("insert", key, request))
        self.rows[key] = list(range(request.max_tokens))

    def step(self) -> Iterable[tuple[int, Outcome]]:
        self._steps += 1
        self.log.append(("step", self.pace))
        self.stepping.set()
        if self.block is not None:
            self.block.wait()
        if self._steps == self._breaks_at:
            raise RuntimeError("out of memory")
        self.pace = [100.0 * self._steps]
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
    """A rank whose endpoint comes through a queue."""

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
            self.follower = Follower(self.rank, self._endpoint.get(timeout=SOON))

    def close(self) -> None:
        transport = self.leader or self.follower
        if transport is not None:
            transport.close()


@contextmanager
def group(
    leader_batch: PlainBatch, *follower_batches: PlainBatch
) -> Iterator[tuple[Scheduler, list[Future[int]]]]:
    """A scheduler on rank 0, and what the others will return."""
    endpoint: queue.SimpleQueue[Endpoint] = queue.SimpleQueue()
    size = 1 + len(follower_batches)
    batch_of_all = LeaderBatch(leader_batch, PlainRanks(0, size, endpoint))
    scheduler = Scheduler(batch_of_all)
    with ThreadPoolExecutor() as threads:
        others = [
            threads.submit(follow, batch, PlainRanks(rank, size, endpoint))
            for rank, batch in enumerate(follower_batches, 1)
        ]
        try:
            scheduler.start()
            batch_of_all.on_lost(lambda error: scheduler.terminate(error, timeout=SOON))
            yield scheduler, others
        finally:
            scheduler.stop()


def test_followers_do_what_rank_0_does_before_the_same_step() -> None:
    leader_batch, *follower_batches = batches = [PlainBatch() for _ in range(3)]
    with group(leader_batch, *follower_batches) as (scheduler, others):
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
    assert [batch.log for batch in follower_batches] == [leader_batch.log] * 2
    assert ("remove", 2) in leader_batch.log
    assert ("insert", 3, EVERYTHING) in leader_batch.log
    assert (
        len(
            {
                tuple(pace)
                for name, pace in (entry for entry in leader_batch.log if len(entry) == 2)
                if name == "step"
            }
        )
        > 3
    )
    assert all(not batch.rows for batch in batches)


def test_a_request_survives_the_wire() -> None:
    assert from_wire(json.loads(json.dumps(to_wire(EVERYTHING)))) == EVERYTHING


def test_a_constraint_that_never_raises_is_applied_by_rank_0_alone() -> None:
    class Harmless:
        never_raises = True

        def unconstrained_tokens(self) -> int:
            """None are certain."""
            return 0

        def allowed_mask(self) -> None:
            """Nothing is masked."""

        def advance(self, token: int) -> None:
            """Keeps no state."""

    there = from_wire(json.loads(json.dumps(to_wire(replace(REQUEST, constraint=Harmless()))))).constraint
    assert there is not None
    there.advance(7)
    assert (there.allowed_mask(), there.unconstrained_tokens(), there.never_raises) == (None, 0, True)
    assert from_wire(json.loads(json.dumps(to_wire(REQUEST)))).constraint is None


def test_a_grammar_is_refused_and_other_requests_go_on() -> None:
    class Grammar:
        never_raises = False

        def unconstrained_tokens(self) -> int:
            """None are certain."""
            return 0

        def allowed_mask(self) -> None:
            """Nothing is masked."""

        def advance(self, token: int) -> None:
            """Keeps no state."""

    with group(PlainBatch(), PlainBatch()) as (scheduler, _):
        bound, free = scheduler.submit(replace(REQUEST, constraint=Grammar())), scheduler.submit(REQUEST)
        with pytest.raises(EngineRefused, match="must follow a grammar is not possible yet while several"):
            list(bound)
        assert isinstance(list(free)[-1], Finished)


def test_an_image_is_refused_and_other_requests_go_on() -> None:
    image = PromptImage(0, prepared())
    with group(PlainBatch(), PlainBatch()) as (scheduler, _):
        seeing, blind = scheduler.submit(replace(REQUEST, images=[image])), scheduler.submit(REQUEST)
        with pytest.raises(EngineRefused, match="Images are not possible yet while several processes"):
            list(seeing)
        assert isinstance(list(blind)[-1], Finished)


def test_ranks_with_different_results_stop() -> None:
    with group(PlainBatch(), PlainBatch(wrong_at=2)) as (scheduler, [other]):
        with pytest.raises(EngineStopped, match="Rank 1 has ended: Its results differ from those of rank 0"):
            list(scheduler.submit(replace(REQUEST, max_tokens=1 << 20)))
        assert other.result(SOON) == 1
        assert scheduler.status().state == "stopped"


def test_an_exception_on_rank_0_ends_all_ranks_without_a_restart() -> None:
    leader_batch = PlainBatch(breaks_at=2)
    with group(leader_batch, PlainBatch()) as (scheduler, [other]):
        with pytest.raises(EngineStopped, match=r"Rank 0 could not go on: RuntimeError: out of memory"):
            list(scheduler.submit(REQUEST))
        assert other.result(SOON) == 1
        with pytest.raises(EngineStopped, match="out of memory"):
            scheduler.submit(REQUEST)
    assert [entry for entry in leader_batch.log if isinstance(entry, str)] == ["load", "unload", "close"]


def test_a_follower_whose_rank_0_has_gone_ends_with_an_error() -> None:
    endpoint: queue.SimpleQueue[Endpoint] = queue.SimpleQueue()
    leader = PlainRanks(0, 2, endpoint)
    batch = PlainBatch()
    with ThreadPoolExecutor() as threads:
        other = threads.submit(follow, batch, PlainRanks(1, 2, endpoint))
        leader.open()
        leader.close()
        assert other.result(SOON) == 1
    assert batch.log == ["load", "unload", "close"]


def test_an_exception_on_another_rank_is_quoted() -> None:
    with group(PlainBatch(), PlainBatch(), PlainBatch(breaks_at=2)) as (scheduler, others):
        with pytest.raises(EngineStopped, match="Rank 2 has ended: RuntimeError: out of memory"):
            list(scheduler.submit(replace(REQUEST, max_tokens=1 << 20)))
        assert [other.result(SOON) for other in others] == [1, 1]


def test_a_rank_that_is_lost_while_there_are_no_requests_is_noticed() -> None:
    endpoint: queue.SimpleQueue[Endpoint] = queue.SimpleQueue()
    batch_of_all = LeaderBatch(PlainBatch(), PlainRanks(0, 2, endpoint))
    scheduler = Scheduler(batch_of_all)
    lost = PlainRanks(1, 2, endpoint)
    opening = threading.Thread(target=lost.open)
    opening.start()
    scheduler.start()
    terminated: queue.SimpleQueue[bool] = queue.SimpleQueue()
    batch_of_all.on_lost(lambda error: terminated.put(scheduler.terminate(error, timeout=SOON)))
    opening.join(SOON)
    lost.close()
    assert terminated.get(timeout=SOON) is True
    assert scheduler.status().state == "stopped"
    assert scheduler.status().detail.startswith("Rank 1 was lost")
    scheduler.stop()


def test_a_rank_that_cannot_load_is_quoted_when_rank_0_starts() -> None:
    broken = PlainBatch()
    broken.load_error = EngineRefused("there is no such model")

    class Meeting(PlainBatch):
        def load(self, on_progress: Callable[[float], None]) -> ModelInfo:
            ranks.open()
            assert ranks.leader is not None
            ranks.leader.all_gather("loaded")
            return super().load(on_progress)

    endpoint: queue.SimpleQueue[Endpoint] = queue.SimpleQueue()
    ranks = PlainRanks(0, 2, endpoint)
    batch_of_all = LeaderBatch(Meeting(), ConnectedRanks(ranks))
    with ThreadPoolExecutor() as threads:
        other = threads.submit(follow, broken, PlainRanks(1, 2, endpoint))
        with pytest.raises(EngineStopped, match="Rank 1 has ended: there is no such model"):
            Scheduler(batch_of_all).start()
        assert other.result(SOON) == 1


class ConnectedRanks:
    """Ranks that are connected already."""

    def __init__(self, ranks: PlainRanks) -> None:
        self._ranks = ranks
        self.rank, self.size = ranks.rank, ranks.size
        self.follower: Follower | None = None

    @property
    def leader(self) -> Leader | None:
        return self._ranks.leader

    def open(self) -> None:
        """They are."""

    def close(self) -> None:
        self._ranks.close()


def test_every_request_fails_even_if_the_thread_does_not_come_out_of_its_batch() -> None:
    batch = PlainBatch()
    batch.block = threading.Event()
    scheduler = Scheduler(batch)
    scheduler.start()
    running = scheduler.submit(REQUEST)
    assert batch.stepping.wait(SOON)
    assert scheduler.terminate(EngineStopped("rank 1 was lost"), timeout=0.1) is False
    with pytest.raises(EngineStopped, match="rank 1 was lost"):
        list(running)
    with pytest.raises(EngineStopped, match="rank 1 was lost"):
        scheduler.submit(REQUEST)
    assert scheduler.status().state == "stopped"
    scheduler.stop()  # does not wait for the thread
    batch.block.set()
    scheduler._thread.join(SOON)
    assert not scheduler._thread.is_alive(), "it ends once it comes out, and does not start anew"
    assert [entry for entry in batch.log if isinstance(entry, str)] == ["load", "unload", "close"]
