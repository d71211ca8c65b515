"""The memory that models share: what each sees of the others, and that closing gives everything back."""

import pytest

from mlx_backend.device.memory import (
    MAX_HOST_CACHE_BYTES,
    MemoryBudget,
    format_bytes,
    host_cache_bytes,
    room_for_weights,
    step_margin,
)


def test_what_one_model_reserves_is_no_room_for_another() -> None:
    budget = MemoryBudget(1000)
    first, second = budget.reserve(100), budget.reserve(200)
    assert (first.room, second.room) == (950 - 100 - 200, 950 - 200 - 100)
    first.set_working(50)
    assert second.room == 950 - 200 - 150
    assert second.max_room == 950 - 200 - 100, "as if the other had nothing to do"
    assert first.room == 950 - 100 - 200, "its own work is part of its room"
    assert budget.reserved == 350


def test_closing_a_reservation_gives_everything_back_and_what_ends_later_reserves_nothing() -> None:
    budget = MemoryBudget(1000)
    first, second = budget.reserve(100), budget.reserve(200)
    first.set_working(300)
    first.close()
    first.set_working(400)
    first.close()
    assert budget.reserved == 200
    assert second.room == 950 - 200


def test_two_budgets_know_nothing_of_each_other() -> None:
    one, other = MemoryBudget(1000), MemoryBudget(1000)
    one.reserve(900)
    assert other.reserved == 0
    assert other.reserve(100).room == 850


def test_a_model_may_have_a_limit_of_its_own() -> None:
    budget = MemoryBudget(1000)
    own = budget.reserve(100, limit=2000)
    assert (own.limit, own.room) == (2000, 1800)
    assert budget.reserve(0).room == 850


def test_the_limit_is_asked_for_once_and_only_when_it_is_needed() -> None:
    asked: list[int] = []

    def limit() -> int:
        asked.append(1)
        return 1000

    budget = MemoryBudget(limit)
    budget.reserve(100, limit=500)
    assert not asked
    assert budget.limit == budget.reserve(100).limit == 1000
    assert asked == [1]


def test_caches_outside_of_the_devices_memory_and_a_step_share_the_margin() -> None:
    limit = 1 << 30
    assert host_cache_bytes(limit) + step_margin(limit) + room_for_weights(limit) == limit
    assert host_cache_bytes(limit) == MemoryBudget(limit).host_caches.max_bytes == limit // 100
    assert host_cache_bytes(1 << 50) == MAX_HOST_CACHE_BYTES
    budget = MemoryBudget(lambda: pytest.fail("the limit is not needed yet"))
    assert budget.host_caches is budget.host_caches


def test_sizes_are_written_in_the_unit_that_fits() -> None:
    assert [format_bytes(count) for count in (512, 3 << 20, 1020 << 20, 5 << 30, 16_100_000_000)] == [
        "0.500 KB",
        "3 MB",
        "1020 MB",
        "5 GB",
        "15.0 GB",
    ]


def test_a_model_that_lacks_memory_asks_the_others_for_what_they_have_cached() -> None:
    budget = MemoryBudget(1000)
    one, two, three = (budget.reserve(100) for _ in range(3))
    told: list[str] = []
    for name, each in (("one", one), ("two", two), ("three", three)):
        each.on_change = lambda name=name: told.append(name)  # type: ignore[misc]  # the default is that of the loop
    one.set_working(400, cached=300)
    two.set_working(50)
    assert (three.room, three.reclaimable_room) == (200, 500)
    three.ask(250)
    assert told == ["one"], "the second has nothing cached"
    assert (one.needed_by_others, two.needed_by_others) == (250, 0)
    one.set_working(150, cached=50)
    assert told == ["one", "three"]
    assert one.needed_by_others == 0
    assert three.room == 450
    two.close()
    assert told == ["one", "three"], "who has asked for nothing is not woken"


def test_who_got_too_little_may_ask_again_and_nobody_gives_up_more_than_is_cached() -> None:
    budget = MemoryBudget(1000)
    one, two = budget.reserve(100), budget.reserve(100)
    one.set_working(500, cached=100)
    two.ask(300)
    assert one.needed_by_others == 100
    one.set_working(400)
    assert one.needed_by_others == 0
    two.ask(200)
    one.close()
    assert two.asked == 0, "the weights of the one that was unloaded are free, too"


def test_weights_that_do_not_fit_beside_what_others_have_cached_ask_for_it() -> None:
    budget = MemoryBudget(1000)
    one = budget.reserve(300)
    one.set_working(600, cached=500)
    budget.reserve(400)
    assert one.needed_by_others == 300 + 600 + 400 - 950
