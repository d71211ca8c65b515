"""Requests that come one after the other are answered by the same threads, however many there are."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING

from running_server import running
from scripted_engine import ScriptedEngine

from mlx_backend.server.app import App
from mlx_backend.server.worker_queue import WorkerQueue

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pytest
    from _typeshed.wsgi import StartResponse, WSGIEnvironment


@contextmanager
def workers(queue: WorkerQueue, count: int) -> Iterator[SimpleQueue[tuple[str, str]]]:
    """Threads that take from the queue until they get None; what they took, with their names."""
    taken: SimpleQueue[tuple[str, str]] = SimpleQueue()

    def work() -> None:
        while (item := queue.get()) is not None:
            taken.put((threading.current_thread().name, item))

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    yield taken
    for _ in threads:
        queue.put(None)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_what_is_put_before_anybody_asks_is_had_in_its_order() -> None:
    queue = WorkerQueue()
    for item in "abc":
        queue.put(item)
    assert queue.qsize() == 3
    with workers(queue, 1) as taken:
        assert [taken.get(timeout=60)[1] for _ in range(3)] == ["a", "b", "c"]
    assert queue.qsize() == 0


def test_every_item_is_had_once_whoever_is_idle() -> None:
    queue = WorkerQueue()
    with workers(queue, 8) as taken:
        for number in range(2000):
            queue.put(str(number))
        items = {taken.get(timeout=60)[1] for _ in range(2000)}
    assert items == set(map(str, range(2000)))
    assert taken.empty()


def test_requests_one_after_the_other_use_few_of_the_servers_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    used: set[str] = set()
    answer = App.__call__

    def noted(app: App, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        used.add(threading.current_thread().name)
        return answer(app, environ, start_response)

    monkeypatch.setattr(App, "__call__", noted)
    with running(ScriptedEngine(lambda _prompt: "")) as server:
        for _ in range(60):
            assert server.call("/health")[0] == 200
    assert 1 <= len(used) <= 10, "a client may send before the thread that answered it is idle again"
