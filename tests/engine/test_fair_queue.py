"""The queue is fair between clients: one that asks once is not kept waiting by one that asks two hundred times."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from scheduler_batches import LONG, engine_of, request, take
from scripted_engine import ScriptedEngine

from mlx_backend.engine.base import MAX_PRIORITY, Finished, GenerationRequest, QueueClient
from mlx_backend.engine.fair_queue import MAX_IDLE_CLIENTS, SECONDS_PER_PRIORITY, FairQueue
from mlx_backend.engine.jobs import Job
from mlx_backend.engine.scheduler import OUTPUT_WEIGHT, PROMPT_WEIGHT
from mlx_backend.errors import EngineBusy


def of(client: str, length: int = 1, priority: int = 0) -> GenerationRequest:
    return replace(request(), prompt=[1] * length, client=client, priority=priority)


class Queue:
    """A queue with clients, as the scheduler has it."""

    def __init__(self) -> None:
        self.queue: FairQueue[Job] = FairQueue()
        self.count = 0

    def add(self, client: str, length: int = 1, priority: int = 0, waited: float = 0.0) -> Job:
        share = self.queue.share_of(client)
        share.submitted += 1
        job = Job(self.count, of(client, length, priority), share)
        job.queued_at -= waited
        self.count += 1
        self.queue.add(job)
        return job

    def serve(self, tokens: int = 1) -> str:
        """Start the next, let it generate so many tokens and end; return whose it is."""
        job = self.queue.next()
        self.queue.remove(job)
        job.share.served += PROMPT_WEIGHT * len(job.request.prompt) + OUTPUT_WEIGHT * tokens
        job.share.finished += 1
        return job.share.name


def test_one_request_waits_for_one_of_each_other_client_however_many_those_have_sent() -> None:
    queue = Queue()
    for _ in range(200):
        queue.add("many")
    for name in ("some", "some", "one"):
        queue.add(name)
    assert [queue.serve() for _ in range(6)] == ["many", "some", "one", "many", "some", "many"]


@pytest.mark.parametrize("seed", range(10))
def test_each_that_waits_is_told_its_place(seed: int) -> None:
    rng, queue = random.Random(seed), Queue()
    queue.add("a", priority=5)
    for _ in range(29):
        queue.add(rng.choice("aaaabbc"))
    told = {job: queue.queue.position_of(job) for job in queue.queue}
    places = []
    while queue.queue:
        first = queue.queue.next()
        places.append(told[first])
        assert queue.queue.position_of(first) == 1
        queue.serve()
        assert queue.queue.position_of(first) is None
    assert places == list(range(1, 31))


def test_tokens_count_and_not_requests() -> None:
    queue = Queue()
    for _ in range(50):
        queue.add("long", 90)
        queue.add("short", 10)
    served = [queue.serve(tokens=5) for _ in range(33)]
    assert served.count("long") == pytest.approx(33 * 20 / 120, abs=1)


def test_the_shortest_is_one_of_those_of_the_best_priority_and_the_first_of_equals() -> None:
    queue = Queue()
    queue.add("long", 90)
    for name, priority in (("title", 1), ("first", 0), ("second", 0)):
        queue.add(name, 20, priority)
    for job in queue.queue:
        job.tokens = len(job.request.prompt)
    assert queue.queue.next().share.name == "long"
    assert queue.queue.shortest().share.name == "first"


def test_turns_that_were_not_used_are_not_saved_up() -> None:
    queue = Queue()
    queue.add("late")
    queue.serve()
    for _ in range(100):
        queue.add("busy")
    for _ in range(50):
        queue.serve()
    for _ in range(10):
        queue.add("late")
    served = [queue.serve() for _ in range(10)]
    assert 4 <= served.count("busy") <= 6


def test_a_client_that_waits_for_each_answer_before_it_asks_again_gets_its_half() -> None:
    queue = Queue()
    for _ in range(100):
        queue.add("many")
    served = []
    queue.add("one")
    for _ in range(40):
        served.append(queue.serve())
        if served[-1] == "one":
            queue.add("one")
    assert served.count("one") == pytest.approx(20, abs=1)


def test_what_was_found_in_the_cache_is_not_counted() -> None:
    with ScriptedEngine(lambda _: "yes", max_concurrent=1) as engine:
        first = [list(engine.generate(of("a", 500))) for _ in range(2)]
        cached = [each[-1] for each in first]
        assert isinstance(cached[1], Finished)
        share = engine._scheduler._queue.share_of("a")
        generated = sum(each.completion_tokens for each in cached if isinstance(each, Finished))
        computed = sum(
            each.prompt_tokens - each.cached_tokens for each in cached if isinstance(each, Finished)
        )
        assert share.served == computed + OUTPUT_WEIGHT * generated


def test_a_lower_priority_number_goes_first_whoever_was_served_less() -> None:
    queue = Queue()
    for _ in range(3):
        queue.add("chat")
    queue.add("nightly", priority=1)
    queue.add("chat")
    assert [queue.serve(tokens=100) for _ in range(5)] == ["chat"] * 4 + ["nightly"]


def test_waiting_lifts_a_request_to_the_best_priority_that_waits_and_there_it_takes_turns() -> None:
    queue = Queue()
    for _ in range(5):
        queue.add("nightly", priority=2, waited=3 * SECONDS_PER_PRIORITY)
    for _ in range(5):
        queue.add("chat")
    assert [queue.serve() for _ in range(4)] == ["nightly", "chat", "nightly", "chat"]


def test_in_a_full_queue_the_last_of_whoever_has_most_gives_way() -> None:
    with engine_of(*[LONG] * 6, gated=True, max_concurrent=1, max_waiting=4) as engine:
        running = engine.generate(of("many"))
        engine.advance(1)
        take(running, 1)
        waiting = [engine.generate(of("many")) for _ in range(4)]
        with pytest.raises(EngineBusy, match="5 requests are running or waiting"):
            engine.generate(of("many"))
        one = engine.generate(of("one"))
        engine.advance(2)  # between two steps it looks at what has come
        with pytest.raises(
            EngineBusy, match=r"5 of the requests that wait or run are yours; try again in \d+ s"
        ):
            waiting[-1].next()
        running.close()
        engine.advance(5)
        take(one, 1)  # it is next
        assert engine.status().waiting == 3


def test_who_has_as_much_as_the_others_displaces_nobody() -> None:
    with engine_of(LONG, LONG, LONG, gated=True, max_concurrent=1, max_waiting=2) as engine:
        generations = [engine.generate(of(name)) for name in ("a", "b", "c")]
        for name in ("a", "d"):
            with pytest.raises(EngineBusy):
                engine.generate(of(name))
        for each in generations:
            each.close()


def test_who_comes_is_refused_where_those_with_more_have_nothing_that_waits() -> None:
    with engine_of(*[LONG] * 4, gated=True, max_concurrent=2, max_waiting=2) as engine:
        running = [engine.generate(of("many")) for _ in range(2)]
        engine.advance(1)
        for each in running:
            take(each, 1)
        waiting = [engine.generate(of(name)) for name in ("a", "b")]
        with pytest.raises(EngineBusy, match="4 requests are running or waiting"):
            engine.generate(of("one"))
        for each in (*running, *waiting):
            each.close()


@pytest.mark.parametrize("seed", range(20))
def test_who_may_displace_is_not_displaced(seed: int) -> None:
    chosen = random.Random(seed)
    queue, running = Queue(), []
    for _ in range(20):
        job = queue.add(chosen.choice("abcd"))
        if chosen.random() < 0.5:
            queue.queue.remove(job)
            running.append(job)
    for name in "abcde":
        may = queue.queue.may_displace(queue.queue.share_of(name), running)
        newest = queue.add(name)
        displaced = queue.queue.displaced()
        assert may is (displaced.share is not newest.share)
        queue.queue.remove(newest)
        newest.share.finished += 1


def test_clients_who_left_are_forgotten_when_there_are_many() -> None:
    queue: FairQueue[Job] = FairQueue()
    busy = queue.share_of("busy")
    busy.submitted += 1
    for number in range(3 * MAX_IDLE_CLIENTS):
        queue.share_of(str(number))
    assert len(queue._shares) == MAX_IDLE_CLIENTS
    assert queue.share_of("busy") is busy


@pytest.mark.parametrize("seed", range(20))
def test_at_random_everybody_is_served_and_nobody_much_less_than_who_waited_with_them(seed: int) -> None:
    """Two clients with requests waiting all the time are given the same number of tokens, to within two requests."""
    chosen = random.Random(seed)
    queue = Queue()
    largest = 40 + OUTPUT_WEIGHT * 40
    for name in "abc":
        for _ in range(300):
            queue.add(name, chosen.randint(1, 40))
    for _ in range(chosen.randint(10, 100)):
        queue.add(f"passing {chosen.randint(0, 9)}", chosen.randint(1, 40))
    for _ in range(300):
        queue.serve(tokens=chosen.randint(0, 40))
        served = [queue.queue.share_of(name).served for name in "abc"]
        assert max(served) - min(served) <= 2 * largest
    while len(queue.queue):
        queue.serve()


def test_the_priority_of_a_key_makes_no_request_one_that_cannot_be_queued() -> None:
    for client, wanted, priority in (
        (QueueClient("anybody"), -3, -3),
        (QueueClient("key", 5), 2, 7),
        (QueueClient("key", 5), -2, 5),
        (QueueClient("key", 5), MAX_PRIORITY, MAX_PRIORITY),
        (QueueClient("key", -5), MAX_PRIORITY, MAX_PRIORITY - 5),
    ):
        assert client.priority_of(wanted) == priority
    with engine_of("yes") as engine:
        items = list(engine.generate(of("key", priority=QueueClient("key", 5).priority_of(MAX_PRIORITY))))
    assert isinstance(items[-1], Finished)
