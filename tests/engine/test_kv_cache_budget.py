"""What is set aside for the caches of an engine's sequences, and who is refused, now or for good."""

import pytest

from mlx_backend.device.memory import MemoryBudget
from mlx_backend.engine.kv_cache_budget import MAX_TOKENS, NO_IMAGES, KVCacheBudget
from mlx_backend.errors import EngineBusy, EngineRefused

WEIGHTS, BYTES_PER_TOKEN = 1000, 10


def budget_of(memory: MemoryBudget, *, max_padded: int = MAX_TOKENS) -> KVCacheBudget:
    return KVCacheBudget(
        memory.reserve(WEIGHTS), lambda tokens: BYTES_PER_TOKEN * tokens, max_padded=max_padded
    )


def test_sequences_of_one_adapter_are_counted_as_long_as_the_longest_of_them() -> None:
    padded, alone = (budget_of(MemoryBudget(10_000), max_padded=each) for each in (MAX_TOKENS, 0))
    for budget in (padded, alone):
        budget.reserve(0, 10)
        budget.reserve(1, 30)
        budget.reserve(2, 100, "poet")
    assert padded.used == 10 * (30 + 30 + 100)
    assert alone.used == 10 * (10 + 30 + 100)
    padded.release(1)
    padded.release(1)
    assert padded.used == 10 * (10 + 100)
    assert not padded.extend(2, 99, 200)


def test_a_sequence_is_padded_no_further_than_to_what_is_decoded_together() -> None:
    budget = budget_of(MemoryBudget(10_000), max_padded=50)
    budget.reserve(0, 10)
    budget.reserve(1, 30)
    assert budget.used == 10 * (30 + 30)
    budget.reserve(2, 400)
    assert budget.used == 10 * (50 + 50 + 400)
    budget.release(0)
    budget.release(1)
    budget.reserve(3, 300)
    assert budget.used == 10 * (400 + 300)


def test_a_sequence_fits_while_what_is_set_aside_leaves_room_for_it() -> None:
    alone, padded = (budget_of(MemoryBudget(4000), max_padded=each) for each in (0, MAX_TOKENS))
    for budget in (alone, padded):
        assert budget.reservation.room == 3800 - WEIGHTS  # 5 % of the limit are left to a step
        budget.reserve(0, 200)
    assert alone.fits(80)
    assert not alone.fits(81)
    assert not padded.fits(80), "it would be padded to 200 tokens"
    assert padded.fits(80, "poet")


def test_cached_prefixes_are_reserved_on_the_device() -> None:
    memory = MemoryBudget(10_000)
    budget = budget_of(memory)
    budget.reserve(0, 20)
    budget.set_prefix_bytes(500)
    assert memory.reserved == WEIGHTS + 200 + 500
    budget.set_prefix_bytes(0)
    assert memory.reserved == WEIGHTS + 200


def test_what_could_not_run_even_alone_is_refused_and_what_others_keep_out_is_to_come_again() -> None:
    memory = MemoryBudget(4000)
    budget, other = budget_of(memory), memory.reserve(0)
    budget.check(280, "The request")
    with pytest.raises(
        EngineRefused, match=r"^The request would need 2\.74 KB .* the model leaves 2\.73 KB of"
    ):
        budget.check(281, "The request")
    other.set_working(2000)
    with pytest.raises(EngineBusy, match=r"other models' work leaves 0\.781 KB .* Try again in 10 s"):
        budget.check(280, "The request")
    budget.check(80, "The request")


def with_chunks(memory: MemoryBudget, per_token: int) -> KVCacheBudget:
    """Return a budget where a chunk needs so many bytes for each of its tokens."""
    return KVCacheBudget(
        memory.reserve(WEIGHTS),
        lambda tokens: BYTES_PER_TOKEN * tokens,
        max_padded=MAX_TOKENS,
        chunk_bytes=lambda tokens, _end: per_token * tokens,
    )


def test_chunks_get_shorter_where_their_working_memory_does_not_fit_beside_the_caches() -> None:
    budget = with_chunks(MemoryBudget(10_000), per_token=4)
    assert budget.reservation.room == 9_500 - WEIGHTS
    assert budget.fitting_chunk(0, 2_048) == 2_048  # 8,192 bytes of 8,900, the margin of 400 included
    budget.reserve(0, 400)
    assert budget.fitting_chunk(0, 2_048) == 1_024
    budget.reserve(0, 835)  # 550 bytes are left
    assert budget.fitting_chunk(0, 2_048) == 128
    assert budget.fitting_chunk(0, 7) == 7
    budget.reserve(0, 900)
    assert budget.fitting_chunk(0, 2_048) == 8, "what runs must be able to go on"


def test_cached_prefixes_make_room_for_a_chunk() -> None:
    budget = with_chunks(MemoryBudget(10_000), per_token=4)
    budget.reserve(0, 400)
    assert budget.prefix_room() == 8_500 - 4_000
    assert budget.prefix_room(0, 100) == 8_500 - 4_000, "the margin is enough for it"
    assert budget.prefix_room(0, 1_024) == 8_500 - 4_000 - (4_096 - 400)


def test_only_what_leaves_no_room_for_the_shortest_chunk_is_refused_and_told_what_would_fit() -> None:
    memory = MemoryBudget(10_000)
    budget = with_chunks(memory, per_token=100)  # 800 bytes for the shortest: 400 more than the margin
    assert budget.fitting_tokens() == 810
    budget.check(810, "The request")
    words = r"enough for 810 tokens of prompt and reply together\. Ask for .* maximum context length is 810 tokens"
    with pytest.raises(EngineRefused, match=words) as refused:
        budget.check(811, "The request")
    assert refused.value.code == "context_length_exceeded"
    memory.reserve(0).set_working(1_000)
    assert budget.fitting_tokens() == 710
    with pytest.raises(EngineBusy, match=r"enough for 710 tokens of prompt and reply together\. Try again"):
        budget.check(711, "The request")
    budget.reserve(0, 20)
    assert budget.fits(340)
    assert not budget.fits(361)


def test_what_another_model_frees_just_before_it_is_asked_is_seen_by_who_asks() -> None:
    """Nobody would wake it: when that was freed it had not asked yet."""
    memory = MemoryBudget(4000)
    budget, other = budget_of(memory), memory.reserve(0)
    other.set_working(2500, cached=2500)
    reservation = memory.others(other)[0]
    ask = reservation.ask

    def ask_late(nbytes: int) -> None:
        other.set_working(0)
        ask(nbytes)

    reservation.ask = ask_late  # type: ignore[method-assign]
    assert budget.fits(200)
    other.set_working(2500, cached=2500)
    assert other.needed_by_others == 0
    assert budget.fits_alone(200, NO_IMAGES, asks=True)


def test_a_request_that_has_been_admitted_or_has_ended_asks_for_nothing_any_more() -> None:
    memory = MemoryBudget(4000)
    budget, other = budget_of(memory), memory.reserve(0)
    other.set_working(2500, cached=500)
    assert not budget.fits(200)
    assert other.needed_by_others == 500
    assert budget.fits(20)
    assert other.needed_by_others == 0
    budget.reserve(0, 70)
    assert other.needed_by_others == 400, "it has outgrown what there was room for"
    budget.release(0)
    assert other.needed_by_others == 0


def test_chunks_ask_for_as_much_as_makes_them_longer_and_for_nothing_that_does_not() -> None:
    memory = MemoryBudget(100_000)
    budget = KVCacheBudget(
        memory.reserve(0),
        lambda tokens: BYTES_PER_TOKEN * tokens,
        max_padded=0,
        chunk_bytes=lambda tokens, _: 1000 * tokens,
    )
    other = memory.reserve(0)
    other.set_working(80_000, cached=20_000)
    assert budget.fitting_chunk(0, 64, asks=False) == 16
    assert other.needed_by_others == 0, "as of a warm-up"
    assert budget.fitting_chunk(0, 64) == 16
    assert other.needed_by_others == 32_000 - 15_000 - 4000, "64 tokens would not fit beside its requests"
    other.set_working(80_000, cached=5000)
    budget.release(0)
    assert budget.fitting_chunk(0, 64) == 16
