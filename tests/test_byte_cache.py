"""A cache of what clients make large is bounded by bytes, and no one waits for another's value."""

from __future__ import annotations

import threading
from operator import itemgetter

import pytest

from mlx_backend.byte_cache import ByteCache, CacheBudget


def test_a_value_is_made_once_and_the_least_recently_used_go_first() -> None:
    cache, made = ByteCache[str, str](CacheBudget(20)), list[str]()

    def get(key: str, nbytes: int = 4) -> str:
        def make() -> str:
            made.append(key)
            return key

        return cache.get(key, nbytes, make)

    assert [get(key) for key in "abab"] == ["a", "b", "a", "b"]
    get("a")
    get("c")  # the third of four bytes: b goes
    get("a")
    get("b")
    assert (made, cache.nbytes, len(cache)) == (["a", "b", "c", "b"], 8, 2)
    get("d", 11)
    get("d", 11)  # larger than the cache: made each time
    assert (made[-2:], cache.nbytes) == (["d", "d"], 8)


def test_caches_share_a_budget_and_what_was_used_longest_ago_goes_first_wherever_it_is() -> None:
    budget = CacheBudget(lambda: 20)
    texts, numbers = ByteCache[str, str](budget), ByteCache[int, str](budget)
    third = ByteCache[str, str](budget)
    texts.put("a", "A", 9)
    numbers.put(1, "one", 4)
    numbers.put(2, "two", 4)
    assert texts.find("a") == "A"
    third.put("x", "X", 5)  # two bytes too many: 1 was used before all others
    assert (numbers.values(), texts.values(), budget.nbytes) == (["two"], ["A"], 18)
    third.put("y", "Y", 5)
    assert numbers.values() == []
    third.put("z", "Z", 5)  # a cache has half of the budget at most, so one of its own goes
    assert (third.values(), texts.values()) == (["Y", "Z"], ["A"])
    del third
    assert budget.nbytes == 9, "a cache that no one has any more holds nothing"


def test_a_value_takes_the_place_of_another_and_can_be_dropped() -> None:
    cache = ByteCache[str, str](CacheBudget(20))
    cache.put("a", "A", 8)
    cache.put("a", "B", 5)
    assert (cache.find("a"), cache.nbytes, cache.values()) == ("B", 5, ["B"])
    cache.put("a", "C", 11)
    assert (cache.find("a"), cache.nbytes) == (None, 0), "the old one is wrong, and the new one is too large"
    cache.put("b", "B", 5)
    cache.drop("b")
    cache.drop("b")
    assert (len(cache), cache.nbytes) == (0, 0)


def test_who_has_most_loses_first_and_pushes_out_nothing_of_others() -> None:
    cache = ByteCache[tuple[str, int], int](CacheBudget(40), max_entries=4, owner_of=itemgetter(0))
    cache.put(("a", 0), 0, 2)
    for number in range(9):
        cache.put(("b", number), number, 6)
    assert cache.values() == [0, 6, 7, 8]
    cache.put(("c", 0), 10, 1)
    assert cache.values() == [0, 7, 8, 10], "a fifth entry is too many"
    cache.put(("c", 0), 10, 20)
    assert cache.values() == [0, 7, 8], "now it is c that has most"


def test_what_fails_is_not_kept() -> None:
    cache = ByteCache[str, int](CacheBudget(20))
    with pytest.raises(ZeroDivisionError):
        cache.get("a", 1, lambda: 1 // 0)
    assert cache.get("a", 1, lambda: 2) == 2


def test_while_a_value_is_made_others_are_had_and_only_those_who_want_it_wait() -> None:
    cache, may_end, made = ByteCache[str, str](CacheBudget(20)), threading.Event(), list[str]()
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
