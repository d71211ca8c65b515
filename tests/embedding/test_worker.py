"""The thread of a model that reads: whose piece comes when, who is told what, and that nobody is left waiting."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from scripted_network import SOON, Scripted

from mlx_backend.device.lock import FairLock
from mlx_backend.embedding.base import Row
from mlx_backend.embedding.worker import MAX_ROWS, PIECE_TOKENS, Job, Worker
from mlx_backend.errors import EngineBusy, EngineError, EngineStopped

if TYPE_CHECKING:
    from array import array
    from collections.abc import Generator, Iterator, Sequence


@contextmanager
def worker(network: Scripted, device: Any = None, **options: Any) -> Iterator[Worker]:
    working = Worker(network, device or FairLock(), **options)
    try:
        yield working
    finally:
        if network.gate is not None:
            network.gate.release(10_000)
        working.stop()


def rows(*lengths: int, first: int = 1) -> list[Row]:
    return [Row([first] * length) for length in lengths]


def lengths(job: Job) -> list[float]:
    vectors = job.wait()
    assert vectors is not None
    return [vector[0] for vector in vectors]


def test_vectors_come_in_the_order_of_their_rows_whatever_their_lengths() -> None:
    given = [(at * 37) % 300 + 1 for at in range(500)]
    network = Scripted()
    with worker(network) as working:
        assert lengths(working.submit(rows(*given))) == given


def test_pieces_are_of_rows_of_like_length_and_bounded() -> None:
    network = Scripted()
    with worker(network) as working:
        working.submit(rows(*[1] * 600, 5000, 300, 200, 2)).wait()
    assert all(count <= MAX_ROWS for count, _ in network.pieces)
    assert (1, 5000) in network.pieces, "what is longer than a piece is read alone"
    assert network.pieces == sorted(network.pieces, key=lambda piece: piece[1])


def test_no_rows_are_no_work() -> None:
    with worker(Scripted()) as working:
        assert working.submit([]).wait() == []


def test_a_question_is_not_kept_waiting_by_a_library() -> None:
    network = Scripted(gated=True)
    with worker(network) as working:
        library = working.submit(rows(*[PIECE_TOKENS] * 20))
        assert network.began.acquire(timeout=SOON)  # the first piece of twenty
        question = working.submit(rows(5, first=2))
        assert network.gate is not None
        network.gate.release()
        network.goes_on(6)
        assert lengths(question) == [5]
        assert None in library.vectors
        network.gate.release(10_000)
        assert lengths(library) == [PIECE_TOKENS] * 20
    turns = [2 in stage for stage in network.stages]
    assert turns.index(True) <= 6


def test_the_device_is_given_back_after_every_stage() -> None:
    taken = 0

    class Device:
        def __enter__(self) -> None:
            nonlocal taken
            taken += 1

        def __exit__(self, *_: object) -> None: ...

    network = Scripted()
    with worker(network, Device()) as working:
        working.submit(rows(450)).wait()
    assert len(network.stages) == 5
    assert taken == 5


def test_stages_are_short_beside_a_chat_and_longer_alone() -> None:
    now, chats = 0.0, False
    sizes: list[int] = []

    class Device:
        def __enter__(self) -> None:
            nonlocal now
            now += 0.02 if chats else 0.0  # a token of the chat's

        def __exit__(self, *_: object) -> None: ...

    class Steady(Scripted):
        """Reads ten thousand tokens a second."""

        def run(
            self, rows: Sequence[Row], dimensions: int | None, most: int
        ) -> Generator[None, None, list[array[float]]]:
            nonlocal now
            sizes.append(most)
            now += sum(len(row.tokens) for row in rows) / 10_000
            return (yield from super().run(rows, dimensions, most))

    with worker(Steady(), Device(), clock=lambda: now) as working:
        for comes in (False, True, False):
            chats = comes
            for _ in range(10):
                working.submit(rows(500)).wait()
    assert sizes[0] < sizes[9]
    assert sizes[19] < sizes[9] / 2
    assert sizes[29] > 2 * sizes[19]


def test_a_job_that_is_closed_stops_at_its_next_stage() -> None:
    network = Scripted(gated=True)
    with worker(network) as working:
        job = working.submit(rows(5000))
        network.goes_on(2)
        assert network.began.acquire(timeout=SOON)
        job.close()
        assert job.wait() is None
        assert network.gate is not None
        network.gate.release()
        after = working.submit(rows(3, first=2))
        network.goes_on()
        assert lengths(after) == [3]
    assert len(network.stages) == 4


def test_a_job_that_is_closed_while_it_waits_is_never_begun() -> None:
    network = Scripted(gated=True)
    with worker(network) as working:
        first, second = working.submit(rows(5)), working.submit(rows(5, first=2))
        second.close()
        network.goes_on()
        assert lengths(first) == [5]
        assert second.wait() is None
        third = working.submit(rows(5, first=3))
        network.goes_on()
        third.wait()
    assert network.stages == [{1}, {3}]


def test_who_waits_is_told_when_it_stops() -> None:
    network = Scripted(gated=True)
    working = Worker(network, FairLock())
    running, waiting = working.submit(rows(5000)), working.submit(rows(5))
    assert network.began.acquire(timeout=SOON)
    stopping = threading.Thread(target=working.stop)
    stopping.start()
    assert network.gate is not None
    with working._changed:
        assert working._changed.wait_for(lambda: working._stopping, SOON)
    network.gate.release()
    for job in (running, waiting):
        with pytest.raises(EngineStopped):
            job.wait()
    stopping.join()
    assert network.unloaded
    with pytest.raises(EngineStopped):
        working.submit(rows(1))
    assert working.status().state == "stopped"
    assert not working.is_healthy()


def test_a_failure_is_its_own_jobs_and_told_without_a_traceback() -> None:
    with worker(Scripted(fails="the kernel broke")) as working:
        bad, good = working.submit(rows(5, first=13)), working.submit(rows(5))
        with pytest.raises(EngineError, match=r"^The model failed: the kernel broke\.$"):
            bad.wait()
        assert lengths(good) == [5]


def test_a_line_that_is_full_is_said_at_once() -> None:
    network = Scripted(gated=True)
    with worker(network, max_waiting=2) as working:
        working.submit(rows(5))
        assert network.began.acquire(timeout=SOON)
        working.submit(rows(5)), working.submit(rows(5))
        assert (working.status().running, working.status().waiting) == (1, 2)
        with pytest.raises(EngineBusy, match="2 requests for vectors are waiting"):
            working.submit(rows(5))


def test_what_cannot_be_loaded_is_said_by_who_wanted_it() -> None:
    network = Scripted(fails="load")
    with pytest.raises(EngineError, match=r"There is no such model\."):
        Worker(network, FairLock())
    assert network.unloaded
