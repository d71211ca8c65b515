"""The store of reasoning behind tool calls."""

from mlx_backend.chat.reasoning_store import ReasoningStore


def test_the_calls_of_one_message_share_their_reasoning() -> None:
    store = ReasoningStore()
    store.put(["call_a", "call_b"], "because")
    assert store.get("call_a") == store.get("call_b") == "because"
    assert store.get("call_c") is None


def test_a_finished_turn_is_dropped() -> None:
    store = ReasoningStore()
    store.put(["call_a", "call_b"], "because")
    store.drop(["call_a", "call_unknown"])
    assert store.get("call_a") is None
    assert store.get("call_b") == "because"


def test_the_least_recently_used_entry_is_evicted_first() -> None:
    store = ReasoningStore(max_entries=2)
    store.put(["a"], "1")
    store.put(["b"], "2")
    store.get("a")
    store.put(["c"], "3")
    assert [store.get(name) for name in "abc"] == ["1", None, "3"]


def test_it_is_bounded_in_bytes_too() -> None:
    store = ReasoningStore(max_bytes=100)
    store.put(["a"], "12345")
    store.put(["a"], "123456")
    store.put(["b"], "1234")
    assert len(store) == 2
    store.put(["c"], "x" * 60)
    assert len(store) == 0
