"""The store of reasoning behind tool calls."""

from mlx_backend.byte_cache import CacheBudget
from mlx_backend.chat.chat_prompt import ReasoningStore


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


def test_the_least_recently_used_entries_are_evicted_when_the_bytes_are_used_up() -> None:
    store = ReasoningStore(CacheBudget(12_000))  # of which one cache has half
    for name in "ab":
        store.put([name], name * 2000)
    store.get("a")
    store.put(["c"], "c" * 2000)
    assert [store.get(name) for name in "abc"] == ["a" * 2000, None, "c" * 2000]
    store.put(["d"], "d" * 7000)
    assert store.get("d") is None, "it would take more than there is"


def test_an_entry_of_its_own_size_takes_no_more_when_it_is_put_again() -> None:
    store = ReasoningStore(CacheBudget(4000))
    for _ in range(100):
        store.put(["a"], "x" * 1000)
    assert (len(store), store.get("a")) == (1, "x" * 1000)
