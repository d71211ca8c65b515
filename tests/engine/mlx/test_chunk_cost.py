"""What a chunk takes, from what a few chunks took when the model was loaded."""

import pytest

from mlx_backend.engine.mlx.chunk_cost import ChunkCost, WorkingMemory
from mlx_backend.engine.mlx.prefill_pacer import PrefillPacer

NONE = WorkingMemory()


def test_chunks_are_as_long_as_fits_into_the_longest_stall_beside_what_dequantising_takes() -> None:
    # As on an H100 with gpt-oss-20b's shapes in mxfp4: 0.086 s for 64 tokens and 0.255 for 2,048.
    cost = ChunkCost(11_700, NONE, overhead=945)
    pacer = PrefillPacer(None, cost.rate, cost.work)
    assert pacer.chunk_size(0, others_wait=True) == 2048
    for _ in range(3):
        pacer.record(2048, 0.4)  # after many tokens
    assert pacer.chunk_size(0, others_wait=True) == 1024
    assert PrefillPacer(None, 1_500).chunk_size(0, others_wait=True) == 256


def test_a_chunk_without_many_rows_needs_no_memory_for_dequantised_weights() -> None:
    cost = ChunkCost(1_000, WorkingMemory(per_token=10), many_rows_from=64, many_rows_bytes=5_000)
    assert (cost.working_bytes(63, 63), cost.working_bytes(64, 64)) == (630, 5_640)


# -- working memory ---------------------------------------------------------------------------------------------


def test_what_a_gpu_holds_by_chance_counts_for_little_in_long_chunks() -> None:
    """17 MB more in a chunk of 64 tokens after 64, than in those, once counted as 4 KB for each pair of tokens."""
    memory = WorkingMemory(per_token=2_600_000)
    first, second = memory(512, 512), memory(512, 1024)
    assert WorkingMemory.from_two(512, first, second + 17e6)(2048, 32_768) < 2 * memory(2048, 32_768)
    assert WorkingMemory.from_two(64, 1e6, 18e6)(2048, 32_768) > 200e9


def test_of_two_chunks_one_behind_the_other_all_that_the_second_needs_more_counts_for_each_pair() -> None:
    memory = WorkingMemory(per_token=5_000, per_pair=16)
    found = WorkingMemory.from_two(64, memory(64, 64), memory(64, 128))
    assert found(2048, 32_768) == pytest.approx(memory(2048, 32_768))
    assert WorkingMemory.from_two(64, 500, 400).per_pair == 0
