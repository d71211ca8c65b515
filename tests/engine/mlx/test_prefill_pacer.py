"""How long chunks are: sizes of a short list, on a grid, by what the machine was measured to do."""

import pytest

from mlx_backend.engine.mlx.chunk_cost import (
    CHUNK_SIZES,
    MAX_SPARE_TOKENS,
    PADDED_SIZES,
    RUN_OVERHEAD,
    padded_sizes,
)
from mlx_backend.engine.mlx.prefill_queue import PrefillPacer


def chunks(pacer: PrefillPacer, start: int, end: int, *, others_wait: bool = True) -> list[int]:
    """Return the sizes of the chunks from one position to another."""
    sizes = []
    while start < end:
        sizes.append(min(end - start, pacer.chunk_size(start, others_wait=others_wait)))
        start += sizes[-1]
    return sizes


@pytest.mark.parametrize("rate", [1, 300, 1_000, 1_500, 4_000, 1e9])
def test_chunks_have_sizes_of_a_short_list_whatever_the_rate(rate: float) -> None:
    *full, _ = chunks(PrefillPacer(None, rate), 0, 10_000)
    assert len(set(full)) == 1
    assert full[0] in CHUNK_SIZES


@pytest.mark.parametrize("rate", [1, 1_000, 10_000])
def test_behind_a_cached_prefix_of_any_length_chunks_soon_end_at_multiples_of_their_size(rate: float) -> None:
    for start in range(300):
        pacer, at, sizes = PrefillPacer(None, rate), start, []
        full = pacer.chunk_size(0, others_wait=True)
        while at < 20_000:
            sizes.append(pacer.chunk_size(at, others_wait=True))
            at += sizes[-1]
        assert min(sizes) >= full // 2
        assert max(sizes[1:]) == full
        assert sizes[0] < full + 32
        assert sizes.count(full) >= len(sizes) - 6
        assert at % full == 0


def test_chunks_are_as_long_as_fits_into_the_longest_stall() -> None:
    pacer = PrefillPacer(None, 1_150)  # tokens a second, measured on an H200
    assert pacer.chunk_size(0, others_wait=True) == 256
    assert pacer.chunk_size(0, others_wait=False) == 1024


def test_one_chunk_that_took_very_long_changes_nothing_and_two_do() -> None:
    pacer = PrefillPacer(None, 1_150)
    before = pacer.rate
    pacer.record(256, 30.0)  # the device prepared for a length it had not seen
    assert pacer.rate == before
    pacer.record(256, 0.25)
    assert pacer.chunk_size(0, others_wait=True) == 256
    for _ in range(2):
        pacer.record(256, 2.0)
    assert pacer.chunk_size(0, others_wait=True) == CHUNK_SIZES[0]


def test_the_size_grows_again_once_chunks_are_fast() -> None:
    pacer = PrefillPacer(None, 10)
    seconds = {size: (size + RUN_OVERHEAD) / 2_000 for size in CHUNK_SIZES}
    sizes = []
    for _ in range(8):
        sizes.append(pacer.chunk_size(0, others_wait=True))
        pacer.record(sizes[-1], seconds[sizes[-1]])
    assert sizes[0] == CHUNK_SIZES[0]
    assert sizes[-1] == 512


def test_a_given_chunk_is_taken_as_it_is() -> None:
    assert chunks(PrefillPacer(100, 5.0), 0, 350) == [100, 100, 100, 50]


def test_nothing_measured_is_no_reason_for_chunks_that_hold_others_up() -> None:
    assert chunks(PrefillPacer(None), 0, 600) == [256, 256, 88]


def test_padded_chunks_hold_their_tokens_and_less_than_a_run_costs_in_addition() -> None:
    for tokens in range(1, 3 * CHUNK_SIZES[-1]):
        sizes = padded_sizes(tokens)
        assert {*sizes} <= {*PADDED_SIZES}
        assert tokens <= sum(sizes) < tokens + MAX_SPARE_TOKENS
        assert sum(sizes[:-1]) < tokens
