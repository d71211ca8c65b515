"""Rank 0 and the others, connected: what they send each other, who is let in, and who is named when one is lost."""

import errno
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from free_ports import free_port

from mlx_backend.engine.distributed.transport import LEADER_VARIABLE, Endpoint, Follower, Leader
from mlx_backend.engine.distributed.wire import Wire, accept
from mlx_backend.errors import EngineError, EngineStopped

SOON = 60


@contextmanager
def connected(size: int = 2) -> Iterator[tuple[Leader, list[Follower]]]:
    """Rank 0 and the others, connected."""
    leader = Leader(size, ["127.0.0.1"])
    with ThreadPoolExecutor() as threads:
        connecting = [threads.submit(Follower, rank, leader.endpoint) for rank in range(1, size)]
        leader.accept_followers()
    followers = [each.result() for each in connecting]
    try:
        yield leader, followers
    finally:
        leader.close()
        for follower in followers:
            follower.close()


def test_a_gathered_value_reaches_every_rank_in_the_order_of_ranks() -> None:
    with connected(3) as (leader, followers), ThreadPoolExecutor() as threads:
        gathering = [
            threads.submit(follower.all_gather, {"rank": follower.rank}) for follower in reversed(followers)
        ]
        expected = ["zero", {"rank": 1}, {"rank": 2}]
        assert leader.all_gather("zero") == expected
        assert [each.result(SOON) for each in gathering] == [expected, expected]


def test_messages_arrive_whole_and_in_their_order() -> None:
    with connected(3) as (leader, followers):
        messages = [{"at": at, "prompt": list(range(at * 1000))} for at in range(20)]
        for message in messages:
            leader.broadcast(message)
        for follower in followers:
            assert [follower.receive() for _ in messages] == messages


@pytest.mark.parametrize("greeting", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff", b"\0\0\0\2no"])
def test_a_stranger_is_turned_away(greeting: bytes) -> None:
    leader = Leader(2, ["127.0.0.1"])
    with (
        socket.create_connection(("127.0.0.1", leader.endpoint.port)) as stranger,
        ThreadPoolExecutor() as threads,
    ):
        stranger.sendall(greeting)
        stranger.shutdown(socket.SHUT_WR)
        connecting = threads.submit(Follower, 1, leader.endpoint)
        leader.accept_followers()
        follower = connecting.result(SOON)
        leader.broadcast("welcome")
        assert follower.receive() == "welcome"
        follower.close()
        leader.close()


def test_a_stranger_who_stays_silent_keeps_no_rank_out(monkeypatch: pytest.MonkeyPatch) -> None:
    of_the_stranger = iter([0.05])

    def accept_in_time(*given: Any, **named: Any) -> Wire | None:
        monkeypatch.setattr(
            "mlx_backend.engine.distributed.wire.CONNECT_TIMEOUT", next(of_the_stranger, SOON)
        )
        return accept(*given, **named)

    monkeypatch.setattr("mlx_backend.engine.distributed.transport.accept", accept_in_time)
    leader = Leader(2, ["127.0.0.1"])
    with (
        socket.create_connection(("127.0.0.1", leader.endpoint.port)) as stranger,
        ThreadPoolExecutor() as threads,
    ):
        stranger.sendall(b"\0\0")  # half a length
        connecting = threads.submit(Follower, 1, leader.endpoint)
        leader.accept_followers()
        connecting.result(SOON).close()
        leader.close()


def test_a_process_with_another_key_is_no_rank() -> None:
    leader = Leader(2, ["127.0.0.1"])
    with ThreadPoolExecutor() as threads:
        impostor = threads.submit(Follower, 1, replace(leader.endpoint, authkey=b"guessed"))
        refused = threads.submit(lambda: impostor.exception(SOON) and Follower(1, leader.endpoint))
        leader.accept_followers()
        follower = refused.result(SOON)
    assert str(impostor.exception()).startswith("Rank 1 cannot reach rank 0")
    assert isinstance(follower, Follower)
    leader.broadcast("secret")
    assert follower.receive() == "secret"
    for end in (follower, leader):
        end.close()


def test_a_process_in_rank_0s_place_that_does_not_know_the_key_is_not_followed() -> None:
    impostor = Leader(2, ["127.0.0.1"])
    expected = replace(impostor.endpoint, authkey=b"the group's")
    with ThreadPoolExecutor() as threads:
        accepting = threads.submit(impostor.accept_followers, timeout=SOON)
        with pytest.raises(EngineError, match="does not know the group's key"):
            Follower(1, expected)
        Follower(1, impostor.endpoint).close()
        accepting.result(SOON)
    impostor.close()


@pytest.mark.parametrize("rank", [0, 2, -1])
def test_a_rank_that_there_is_not_is_turned_away(rank: int) -> None:
    leader = Leader(2, ["127.0.0.1"])
    with ThreadPoolExecutor() as threads:
        accepting = threads.submit(leader.accept_followers)
        nobody = Follower(rank, leader.endpoint)
        assert nobody.receive() is None
        somebody = Follower(1, leader.endpoint)
        accepting.result(SOON)
    for end in (nobody, somebody, leader):
        end.close()


def test_a_rank_that_ends_as_soon_as_it_has_connected_is_waited_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lift, ended = Wire.set_timeout, [True]

    def set_timeout(wire: Wire, seconds: float | None) -> None:
        if seconds is None and threading.current_thread() is threading.main_thread() and ended:
            ended.pop()
            raise OSError(errno.EINVAL, "Invalid argument")  # macOS, for a connection that has ended
        lift(wire, seconds)

    monkeypatch.setattr(Wire, "set_timeout", set_timeout)
    leader = Leader(2, ["127.0.0.1"])
    with ThreadPoolExecutor() as threads:
        first = threads.submit(Follower, 1, leader.endpoint)
        second = threads.submit(lambda: first.result().receive() is None and Follower(1, leader.endpoint))
        leader.accept_followers()
        follower = second.result(SOON)
    assert isinstance(follower, Follower)
    leader.broadcast("welcome")
    assert follower.receive() == "welcome"
    for end in (first.result(), follower, leader):
        end.close()


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    accept_one = Leader._accept_one

    def accept_the_first(leader: Leader, _timeout: float) -> None:
        if leader._wires:
            raise TimeoutError
        accept_one(leader, SOON)

    monkeypatch.setattr(Leader, "_accept_one", accept_the_first)
    leader = Leader(3, ["127.0.0.1"])
    with ThreadPoolExecutor() as threads:
        connecting = threads.submit(Follower, 1, leader.endpoint)
        with pytest.raises(EngineError, match=rf"Rank 2 did not connect .* {LEADER_VARIABLE} names another"):
            leader.accept_followers(timeout=0.5)
        connecting.result(SOON).close()
    leader.close()


def test_a_rank_that_cannot_reach_rank_0_says_where_it_looked() -> None:
    port = free_port()
    with pytest.raises(EngineError, match=rf"Rank 1 cannot reach rank 0 at 127.0.0.1, port {port} "):
        Follower(1, Endpoint(["127.0.0.1"], port, b"key"))


def test_the_address_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEADER_VARIABLE, "localhost")
    leader = Leader(2, ["192.0.2.1"])
    assert leader.endpoint.addresses == ["localhost"]
    assert Endpoint.from_json(leader.endpoint.to_json()) == leader.endpoint
    assert leader.endpoint.authkey.hex() not in repr(leader.endpoint)
    leader.close()
    monkeypatch.setenv(LEADER_VARIABLE, "host:port")
    with pytest.raises(EngineError, match=f"{LEADER_VARIABLE} must be a host or host:port, not host:port"):
        Leader(2, [])


def test_a_rank_that_ends_without_a_word_is_named_before_those_that_report_a_failure() -> None:
    with connected(3) as (leader, (first, second)):
        errors: queue.SimpleQueue[EngineStopped] = queue.SimpleQueue()
        leader.on_lost(errors.put)
        second.report_failure("the connection to a peer was lost")
        second.close()
        first.close()
        assert str(errors.get(timeout=SOON)).startswith("Rank 1 was lost")


def test_a_rank_that_reports_a_failure_is_quoted() -> None:
    with connected() as (leader, [follower]):
        follower.report_failure("there is no such model")
        follower.close()
        with pytest.raises(EngineStopped, match="Rank 1 has ended: there is no such model"):
            leader.all_gather(None)


def test_when_a_rank_is_lost_the_others_are_told_to_stop() -> None:
    with connected(3) as (_, (first, second)):
        first.close()
        assert second.receive()["stop"].startswith("Rank 1 was lost")


def test_a_rank_learns_that_rank_0_has_gone() -> None:
    with connected() as (leader, [follower]):
        leader.close()
        assert follower.receive() is None


STUCK = """
import sys, threading
from mlx_backend.engine.distributed.transport import Follower, Leader
leader = Leader(2, ["127.0.0.1"], exit_timeout=0.1)
accepting = threading.Thread(target=leader.accept_followers)
accepting.start()
follower = Follower(1, leader.endpoint, exit_timeout=0.1)
accepting.join()
if sys.argv[1] == "leader": follower.close()
else: leader.close()
threading.Event().wait()
"""


@pytest.mark.parametrize("who", ["leader", "follower"])
def test_a_process_that_still_waits_for_one_that_has_gone_is_ended(who: str) -> None:
    done = subprocess.run([sys.executable, "-c", STUCK, who], capture_output=True, text=True, timeout=SOON)
    assert done.returncode == 1
    assert "This process ends." in done.stderr
