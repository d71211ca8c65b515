"""The thread of an embedding model: whose batch runs when, what fails for whom, and that nobody is left waiting."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from scripted_network import SOON, ScriptedNetwork

from mlx_backend.device.threads import FairLock
from mlx_backend.embedding.text_encoder import EncodedText
from mlx_backend.embedding.worker import MAX_BATCH_TEXTS, MIN_BATCH_TOKENS, EmbeddingJob, Worker
from mlx_backend.errors import EngineBusy, EngineError, EngineStopped

if TYPE_CHECKING:
    from array import array
    from collections.abc import Generator, Iterator, Sequence


@contextmanager
def running(network: ScriptedNetwork, device: Any = None, **options: Any) -> Iterator[Worker]:
    worker = Worker(network, device or FairLock(), **options)
    try:
        yield worker
    finally:
        if network.gate is not None:
            network.gate.release(10_000)
        worker.stop()


def texts(*lengths: int, token: int = 1) -> list[EncodedText]:
    return [EncodedText([token] * length) for length in lengths]


def lengths(job: EmbeddingJob) -> list[float]:
    vectors = job.wait()
    assert vectors is not None
    return [vector[0] for vector in vectors]


def test_vectors_are_in_the_order_of_the_texts_whatever_their_lengths() -> None:
    given = [(i * 37) % 300 + 1 for i in range(500)]
    with running(ScriptedNetwork()) as worker:
        assert lengths(worker.submit(texts(*given))) == given


def test_batches_are_of_texts_of_similar_length_and_bounded() -> None:
    network = ScriptedNetwork()
    with running(network) as worker:
        worker.submit(texts(*[1] * 600, 5000, 300, 200, 2)).wait()
    assert all(count <= MAX_BATCH_TEXTS for count, _ in network.batches)
    assert (1, 5000) in network.batches, "a text that is longer than a batch runs alone"
    assert network.batches == sorted(network.batches, key=lambda batch: batch[1])


def test_a_job_without_texts_is_finished_at_once() -> None:
    with running(ScriptedNetwork()) as worker:
        assert worker.submit([]).wait() == []


def test_a_query_does_not_wait_for_a_library() -> None:
    network = ScriptedNetwork(gated=True)
    with running(network) as worker:
        library = worker.submit(texts(*[MIN_BATCH_TOKENS] * 20))
        assert network.stage_started.acquire(timeout=SOON)  # the first batch of twenty
        query = worker.submit(texts(5, token=2))
        assert network.gate is not None
        network.gate.release()
        network.let_pass(6)
        assert lengths(query) == [5]
        assert None in library.vectors
        network.gate.release(10_000)
        assert lengths(library) == [MIN_BATCH_TOKENS] * 20
    is_query = [2 in stage for stage in network.stages]
    assert is_query.index(True) <= 6


def test_the_device_is_released_after_every_stage() -> None:
    acquired = 0

    class Device:
        def __enter__(self) -> None:
            nonlocal acquired
            acquired += 1

        def __exit__(self, *_: object) -> None: ...

    network = ScriptedNetwork()
    with running(network, Device()) as worker:
        worker.submit(texts(450)).wait()
    assert len(network.stages) == 5
    assert acquired == 5


def test_stages_are_short_beside_a_chat_model_and_longer_alone() -> None:
    now, chat_runs = 0.0, False
    stage_sizes: list[int] = []

    class Device:
        def __enter__(self) -> None:
            nonlocal now
            now += 0.02 if chat_runs else 0.0  # the chat model computes a token

        def __exit__(self, *_: object) -> None: ...

    class SteadyNetwork(ScriptedNetwork):
        """Runs ten thousand tokens a second."""

        def run(
            self, texts: Sequence[EncodedText], dimensions: int | None, stage_tokens: int
        ) -> Generator[None, None, list[array[float]]]:
            nonlocal now
            stage_sizes.append(stage_tokens)
            now += sum(len(text.tokens) for text in texts) / 10_000
            return (yield from super().run(texts, dimensions, stage_tokens))

    with running(SteadyNetwork(), Device(), clock=lambda: now) as worker:
        for beside_chat in (False, True, False):
            chat_runs = beside_chat
            for _ in range(10):
                worker.submit(texts(500)).wait()
    assert stage_sizes[0] < stage_sizes[9]
    assert stage_sizes[19] < stage_sizes[9] / 2
    assert stage_sizes[29] > 2 * stage_sizes[19]


def test_a_closed_job_stops_at_its_next_stage() -> None:
    network = ScriptedNetwork(gated=True)
    with running(network) as worker:
        job = worker.submit(texts(5000))
        network.let_pass(2)
        assert network.stage_started.acquire(timeout=SOON)
        job.close()
        assert job.wait() is None
        assert network.gate is not None
        network.gate.release()
        after = worker.submit(texts(3, token=2))
        network.let_pass()
        assert lengths(after) == [3]
    assert len(network.stages) == 4


def test_a_job_that_is_closed_while_queued_never_runs() -> None:
    network = ScriptedNetwork(gated=True)
    with running(network) as worker:
        first, second = worker.submit(texts(5)), worker.submit(texts(5, token=2))
        second.close()
        network.let_pass()
        assert lengths(first) == [5]
        assert second.wait() is None
        third = worker.submit(texts(5, token=3))
        network.let_pass()
        third.wait()
    assert network.stages == [{1}, {3}]


def test_stopping_fails_running_and_queued_jobs() -> None:
    network = ScriptedNetwork(gated=True)
    worker = Worker(network, FairLock())
    current, queued = worker.submit(texts(5000)), worker.submit(texts(5))
    assert network.stage_started.acquire(timeout=SOON)
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    assert network.gate is not None
    with worker._changed:
        assert worker._changed.wait_for(lambda: worker._stopping, SOON)
    network.gate.release()
    for job in (current, queued):
        with pytest.raises(EngineStopped):
            job.wait()
    stopping.join()
    assert network.unloaded
    with pytest.raises(EngineStopped):
        worker.submit(texts(1))
    assert worker.status().state == "stopped"
    assert not worker.is_healthy()


def test_a_failure_fails_only_its_own_job_and_shows_no_traceback() -> None:
    with running(ScriptedNetwork(fails="the kernel broke")) as worker:
        bad, good = worker.submit(texts(5, token=13)), worker.submit(texts(5))
        with pytest.raises(EngineError, match=r"^The model failed: the kernel broke\.$"):
            bad.wait()
        assert lengths(good) == [5]


def test_a_full_queue_refuses_at_once() -> None:
    network = ScriptedNetwork(gated=True)
    with running(network, max_waiting=2) as worker:
        worker.submit(texts(5))
        assert network.stage_started.acquire(timeout=SOON)
        worker.submit(texts(5)), worker.submit(texts(5))
        assert (worker.status().running, worker.status().waiting) == (1, 2)
        with pytest.raises(EngineBusy, match="2 embedding requests are waiting"):
            worker.submit(texts(5))


def test_the_next_job_is_of_the_client_that_has_been_given_least() -> None:
    network = ScriptedNetwork(gated=True)
    with running(network) as worker:
        jobs = [worker.submit(texts(5), client="many") for _ in range(20)]
        assert network.stage_started.acquire(timeout=SOON)
        jobs.append(worker.submit(texts(5, token=2), client="one"))
        assert network.gate is not None
        network.gate.release(10_000)
        for job in jobs:
            assert lengths(job) == [5]
    assert [2 in stage for stage in network.stages].index(True) <= 2


def test_in_a_full_queue_the_last_job_of_whoever_has_most_gives_way() -> None:
    network = ScriptedNetwork(gated=True)
    with running(network, max_waiting=3) as worker:
        jobs = [worker.submit(texts(5), client="many")]
        assert network.stage_started.acquire(timeout=SOON)
        jobs += [worker.submit(texts(5), client="many") for _ in range(3)]
        with pytest.raises(EngineBusy):
            worker.submit(texts(5), client="many")
        other = worker.submit(texts(5), client="one")
        with pytest.raises(EngineBusy):
            jobs[-1].wait()
        jobs[1].close()
        worker.submit(texts(5), client="many")  # what nobody waits for makes room
        assert network.gate is not None
        network.gate.release(10_000)
        assert lengths(other) == [5]


def test_a_failed_load_raises_in_the_constructor() -> None:
    network = ScriptedNetwork(fails="load")
    with pytest.raises(EngineError, match=r"There is no such model\."):
        Worker(network, FairLock())
    assert network.unloaded
