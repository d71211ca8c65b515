"""The thread that watches running requests' sockets misses no client, however requests come and go meanwhile."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from mlx_backend.server.disconnects import DisconnectWatcher

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def watcher() -> Iterator[DisconnectWatcher]:
    watcher = DisconnectWatcher()
    watcher.start()
    yield watcher
    watcher.stop()


@pytest.mark.parametrize("round_number", range(8))
def test_a_client_that_leaves_is_noticed_after_hundreds_of_requests_have_come_and_gone(
    watcher: DisconnectWatcher, round_number: int
) -> None:
    """A race of threads, so it is run several times."""

    def come_and_go(_: int) -> None:
        near, far = socket.socketpair()
        with near, far:
            for _ in range(500):
                with watcher.watching(near, lambda: None):
                    pass

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(come_and_go, range(4)))
    has_left = threading.Event()
    near, far = socket.socketpair()
    with near, watcher.watching(near, has_left.set):
        far.close()
        assert has_left.wait(10)


def test_a_client_that_had_left_before_is_noticed_at_once(watcher: DisconnectWatcher) -> None:
    near, far = socket.socketpair()
    near.settimeout(60)
    calls: list[str] = []
    with near:
        far.close()
        with watcher.watching(near, lambda: calls.append("left")):
            assert calls == ["left"]
    assert calls == ["left"]


def test_a_client_that_is_there_or_has_sent_its_next_request_has_not_left(watcher: DisconnectWatcher) -> None:
    near, far = socket.socketpair()
    near.settimeout(60)
    calls: list[str] = []
    with near, far:
        with watcher.watching(near, lambda: calls.append("left")):
            far.sendall(b"GET / HTTP/1.1\r\n")
        with watcher.watching(near, lambda: calls.append("left")):
            pass
        assert near.recv(64) == b"GET / HTTP/1.1\r\n"
    assert not calls
