"""The caches: how long an entry lives, what a failure does, and which entries go first."""

from __future__ import annotations

from dify_mlx_provider.upstream.cache import BoundedMap, TtlCache


def test_a_value_is_kept_for_its_time_and_no_longer() -> None:
    now = [0.0]
    cache: TtlCache[int] = TtlCache(30, clock=lambda: now[0])
    values = iter([1, 2])
    assert cache.get("a", lambda: next(values)) == 1
    now[0] = 29.9
    assert cache.get("a", lambda: next(values)) == 1
    now[0] = 30.0
    assert cache.get("a", lambda: next(values)) == 2


def test_a_failure_is_kept_too_and_does_not_wipe_out_what_was_known() -> None:
    now = [0.0]
    cache: TtlCache[int] = TtlCache(30, clock=lambda: now[0])
    tries: list[None] = []

    def fail() -> None:
        tries.append(None)

    assert cache.get("a", fail) is None
    assert cache.get("a", fail) is None
    assert len(tries) == 1
    now[0] = 31
    assert cache.get("a", lambda: 7) == 7
    now[0] = 62
    assert cache.get("a", fail) == 7
    assert cache.get("a", fail) == 7
    assert len(tries) == 2


def test_a_value_fetched_before_the_cache_was_cleared_is_not_kept() -> None:
    cache: TtlCache[int] = TtlCache(30, clock=lambda: 0.0)

    def clear_meanwhile() -> int:
        cache.clear()
        return 1

    assert cache.get("a", clear_meanwhile) == 1
    assert cache.get("a", lambda: 2) == 2


def test_a_full_cache_drops_its_oldest_entry() -> None:
    cache: TtlCache[int] = TtlCache(30, max_entries=2, clock=lambda: 0.0)
    for number, key in enumerate("abc"):
        cache.get(key, lambda number=number: number)  # type: ignore[misc]  # mypy infers no type for the default
    assert cache.get("c", lambda: 9) == 2
    assert cache.get("a", lambda: 9) == 9


def test_a_full_map_drops_the_entry_written_longest_ago() -> None:
    entries: BoundedMap[str, int] = BoundedMap(max_entries=2)
    for number, key in enumerate("abac"):
        entries.set(key, number)
    assert [entries.get(key, -1) for key in "abc"] == [2, -1, 3]
