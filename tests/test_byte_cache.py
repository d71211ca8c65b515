"""A cache of what clients make large is bounded by bytes, and nobody waits for another's value."""

from __future__ import annotations

import threading

import pytest

from mlx_backend.byte_cache import ByteCache


def test_a_value_is_made_once_and_the_least_recently_used_go_first() -> None:
    cache, made = ByteCache[str, str](10), list[str]()

    def get(key: str, nbytes: int = 4) -> str:
        return cache.get(key, nbytes, lambda: made.append(key) or key)  # type: ignore[func-returns-value]

    assert [get(key) for key in "abab"] == ["a", "b", "a", "b"]
    get("a")
    get("c")  # the third of four bytes: b goes
    get("a")
    get("b")
    assert (made, cache.nbytes, len(cache)) == (["a", "b", "c", "b"], 8, 2)
    get("d", 11)
    get("d", 11)  # larger than the cache: made each time
    assert (made[-2:], cache.nbytes) == (["d", "d"], 8)


def test_what_fails_is_not_kept() -> None:
    cache = ByteCache[str, int](10)
    with pytest.raises(ZeroDivisionError):
        cache.get("a", 1, lambda: 1 // 0)
    assert cache.get("a", 1, lambda: 2) == 2


def test_while_a_value_is_made_others_are_had_and_only_those_who_want_it_wait() -> None:
    cache, may_end, made = ByteCache[str, str](10), threading.Event(), list[str]()
    begun = threading.Event()

    def slow() -> str:
        begun.set()
        assert may_end.wait(60)
        made.append("slow")
        return "slow"

    threads = [threading.Thread(target=lambda: cache.get("slow", 1, slow)) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    assert cache.get("other", 1, lambda: "other") == "other"
    may_end.set()
    for thread in threads:
        thread.join(60)
    assert made == ["slow"]
