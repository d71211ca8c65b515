"""Responses that clients refer to again: whose they are, for how long they are kept, and how many."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from mlx_backend.api.errors import ApiError
from mlx_backend.api.responses.store import TIME_TO_LIVE, ConnectionStore, ResponseStore

if TYPE_CHECKING:
    from mlx_backend.api.responses.store import StoredResponse


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def put(
    store: ResponseStore,
    name: str,
    owner: str = "a",
    previous: StoredResponse | None = None,
) -> None:
    response: dict[str, Any] = {"id": name, "output": [{"type": "message", "id": f"msg_{name}"}]}
    store.put(response, [{"role": "user", "content": name}], previous, owner)


def has(store: ResponseStore, name: str, owner: str = "a") -> bool:
    try:
        store.get(name, owner)
    except ApiError as error:
        return (error.status, error.code) != (404, "response_not_found")
    return True


def test_a_response_is_its_own_clients_alone() -> None:
    store = ResponseStore()
    put(store, "r1")
    assert has(store, "r1")
    assert not has(store, "r1", owner="b")
    assert "msg_r1" in store.items({"msg_r1"}, "a")
    assert "msg_r1" not in store.items({"msg_r1"}, "b")
    with pytest.raises(ApiError):
        store.delete("r1", "b")
    assert has(store, "r1")


def test_a_response_is_gone_after_its_time() -> None:
    clock = Clock()
    store = ResponseStore(clock=clock)
    put(store, "r1")
    clock.now = TIME_TO_LIVE
    assert has(store, "r1")
    clock.now += 1
    assert not has(store, "r1")


def test_what_was_used_longest_ago_makes_room() -> None:
    store = ResponseStore()
    put(store, "r0")
    store = ResponseStore(max_bytes=7 * store.get("r0", "a").nbytes)  # half of it for one cache
    for name in ("r1", "r2", "r3"):
        put(store, name)
    assert has(store, "r1")
    put(store, "r4")
    assert [has(store, name) for name in ("r1", "r2", "r3", "r4")] == [True, False, True, True]


def test_nobody_pushes_out_the_responses_of_who_holds_less() -> None:
    store = ResponseStore()
    put(store, "mine", owner="a")
    size = store.get("mine", "a").nbytes
    store = ResponseStore(max_bytes=10 * size)
    put(store, "mine", owner="a")
    for number in range(100):
        for owner in ("flood1", "flood2", "flood3"):
            put(store, f"r{number}", owner=owner)
    assert has(store, "mine", owner="a")
    assert (
        sum(has(store, f"r{at}", owner) for at in range(100) for owner in ("flood1", "flood2", "flood3")) <= 9
    )


def test_a_conversation_outlives_its_first_response() -> None:
    store = ResponseStore()
    put(store, "r1")
    put(store, "r2", previous=store.get("r1", "a"))
    first = store.get("r1", "a").nbytes
    store.delete("r1", "a")
    items = store.get("r2", "a").conversation()
    assert [item.get("content") or item["id"] for item in items] == ["r1", "msg_r1", "r2", "msg_r2"]
    assert store.get("r2", "a").nbytes == 2 * first, "what it refers to is counted"


def test_a_chain_of_any_length_is_followed_and_given_up() -> None:
    store = ResponseStore()
    put(store, "r0")
    for number in range(1, 10_000):
        put(store, f"r{number}", previous=store.get(f"r{number - 1}", "a"))
    last = store.get("r9999", "a")
    assert len(last.conversation()) == 20_000
    assert not has(store, "r0"), "the conversation of each is counted"


@pytest.mark.parametrize("item", [{}, {"type": "message", "id": "x"}, {"content": [{}] * 9}])
def test_what_is_held_in_memory_is_what_is_counted_however_small_the_values(item: dict[str, Any]) -> None:
    given = [{**item, "id": f"{number}"} if "id" in item else dict(item) for number in range(20_000)]
    store = ResponseStore()
    tracemalloc.start()
    try:
        store.put({"id": "r1", "output": []}, given, None, "a")
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1.2 * store.get("r1", "a").nbytes + 10_000


@pytest.mark.parametrize("closed", ["before", "meanwhile", "after"])
def test_nothing_of_a_connection_is_left_whenever_it_is_closed(
    closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[str] = []
    own_put = ResponseStore.put

    def noting_put(self: ResponseStore, *given: Any, identifier: str | None = None) -> None:
        if closed == "meanwhile":
            connection.close()
        own_put(self, *given, identifier=identifier)
        stored.extend([identifier] if identifier else [])

    monkeypatch.setattr(ResponseStore, "put", noting_put)
    store = ResponseStore()
    connection = ConnectionStore(store)
    if closed == "before":
        connection.close()
    connection.put({"id": "resp_1", "output": [], "store": False}, [], None, "a")
    if closed == "after":
        connection.close()
    assert [has(store, each) for each in stored] == [False]
