"""One connection between two ranks: messages arrive whole, are never unpickled, and end when the connection does."""

import json
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlx_backend.engine.distributed.wire import Wire, accept, connect, open_listener

SOON = 60
KEY = b"the group's"


@pytest.fixture
def wires() -> Iterator[tuple[Wire, Wire]]:
    """The end that accepted a connection, and the end that opened it."""
    with open_listener(["127.0.0.1"], 0) as listener, ThreadPoolExecutor() as threads:
        accepting = threads.submit(accept, listener, KEY, timeout=SOON)
        there = connect("127.0.0.1", listener.getsockname()[1], KEY, timeout=SOON)
        here = accepting.result(SOON)
    assert here is not None
    here.set_timeout(None)
    yield here, there
    here.close()
    there.close()


def test_messages_arrive_whole_in_both_directions(wires: tuple[Wire, Wire]) -> None:
    here, there = wires
    large = {"text": "\u6771\u4eac" * 100_000}
    with ThreadPoolExecutor() as threads:
        sending = threads.submit(here.send, large)
        assert there.receive() == large
        sending.result(SOON)
    there.send([1, None, "two"])
    assert here.receive() == [1, None, "two"]


def test_a_message_that_is_too_long_ends_the_connection_unread(wires: tuple[Wire, Wire]) -> None:
    here, there = wires
    here.send("x" * 100)
    assert there.receive(50) is None


def test_nothing_is_unpickled_even_from_a_rank(wires: tuple[Wire, Wire]) -> None:
    here, there = wires
    here._connection.send_bytes(pickle.dumps({"stop": ""}))
    assert there.receive() is None
    here._connection.send_bytes(json.dumps({"stop": ""}).encode())
    assert there.receive() == {"stop": ""}


def test_closing_one_end_wakes_whoever_receives_at_either(wires: tuple[Wire, Wire]) -> None:
    here, _ = wires
    with ThreadPoolExecutor() as threads:
        receiving = [threads.submit(wire.receive) for wire in wires]
        here.close()
        here.close()
        assert [each.result(SOON) for each in receiving] == [None, None]
    with pytest.raises(OSError, match=r".*"):
        here.send("too late")


def test_what_was_sent_before_the_end_still_arrives(wires: tuple[Wire, Wire]) -> None:
    here, there = wires
    here.send("last words")
    here.close()
    assert there.receive() == "last words"
    assert there.receive() is None


def test_an_end_that_does_not_answer_in_time_is_given_up(wires: tuple[Wire, Wire]) -> None:
    here, _ = wires
    here.set_timeout(0.01)
    with pytest.raises(TimeoutError, match="does not answer"):
        here.authenticate(KEY, accepted=False)
