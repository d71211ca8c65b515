"""What a chunk takes, from what a few chunks took when the model was loaded."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_backend.engine.mlx.chunk_cost import ChunkCost, ManyRowsCost, WorkingMemory
from mlx_backend.engine.mlx.kv_cache import can_lengthen, lengthen
from mlx_backend.engine.mlx.prefill_pacer import PrefillPacer

NONE = WorkingMemory()


def test_chunks_are_as_long_as_fits_into_the_longest_stall_beside_what_dequantising_takes() -> None:
    # As on an H100 with gpt-oss-20b's shapes in mxfp4, where 1,500 tokens a second would be chunks of 256.
    cost = ChunkCost(1_500, NONE, ManyRowsCost({64: 0.086, 128: 0.145, 512: 0.15, 2048: 0.255}, 1 << 30))
    pacer = PrefillPacer(None, cost.rate, cost.work)
    assert pacer.chunk_size(0, others_wait=True) == 2048
    for _ in range(3):
        pacer.record(2048, 0.4)  # after many tokens
    assert pacer.chunk_size(0, others_wait=True) == 1024
    assert PrefillPacer(None, cost.rate).chunk_size(0, others_wait=True) == 256


def test_the_time_of_a_chunk_lies_between_those_measured_next_to_it() -> None:
    cost = ManyRowsCost({64: 1.0, 256: 2.0, 1024: 4.0}, 0)
    assert cost.seconds_of(160) == 1.5
    assert [cost.seconds_of(each) for each in cost.seconds] == [1.0, 2.0, 4.0]
    assert cost.seconds_of(2560) == 8.0
    assert ManyRowsCost({64: 1.0}, 0).seconds_of(128) == 2.0
    assert ManyRowsCost({64: 1.0, 128: 0.5}, 0).seconds_of(256) == 0.5, "a longer one is never faster"


def test_a_chunk_without_many_rows_needs_no_memory_for_dequantised_weights() -> None:
    cost = ChunkCost(1_000, WorkingMemory(per_token=10), ManyRowsCost({64: 0.1}, 5_000))
    assert (cost.working_bytes(63, 63), cost.working_bytes(64, 64)) == (630, 5_640)
    assert cost.work(63) == 127
    assert cost.work(64) == 100


# -- working memory ---------------------------------------------------------------------------------------------


def measured(memory: WorkingMemory, tokens: int, context: int) -> WorkingMemory:
    near = [memory(each, each) for each in (tokens, 2 * tokens)]
    far = [memory(each, context) for each in (tokens, 2 * tokens)]
    return WorkingMemory.from_four(tokens, context, near, far)


@pytest.mark.parametrize(
    "memory",
    [
        WorkingMemory(per_token=5_000),
        WorkingMemory(5_000, per_inner_pair=50),
        WorkingMemory(5_000, per_context=4_096),
        WorkingMemory(5_000, per_pair=16),
        WorkingMemory(5_000, 50, 4_096, 16),
    ],
)
def test_what_any_chunk_needs_follows_from_four(memory: WorkingMemory) -> None:
    found = measured(memory, 64, 2048)
    for tokens, context in ((8, 8), (64, 2048), (2048, 2048), (2048, 131_072)):
        assert found(tokens, context) == pytest.approx(memory(tokens, context), rel=1e-3)


def test_no_chunk_is_thought_to_need_less_than_it_was_seen_to_need() -> None:
    near, far = (
        [900_000, 1_000_000],
        [500_000, 3_000_000],
    )  # as a device that is late in freeing memory shows them
    found = WorkingMemory.from_four(64, 2048, near, far)
    assert min(found.per_token, found.per_inner_pair, found.per_context, found.per_pair) >= 0
    assert found(64, 64) >= near[0] - 1
    assert found(64, 2048) >= far[0] - 1
    assert found(128, 2048) >= far[1] - 1


def test_what_a_gpu_holds_by_chance_counts_for_little_in_long_chunks() -> None:
    """17 MB more in a chunk of 64 tokens after 64, than in those, once counted as 4 KB for each pair of tokens."""
    memory = WorkingMemory(per_token=2_600_000)
    near = [memory(512, 512), memory(1024, 1024)]
    found = WorkingMemory.from_four(512, 16_384, near, [near[0] + 17e6, near[1] + 34e6])
    assert found(2048, 32_768) < 2 * memory(2048, 32_768)
    assert WorkingMemory.from_two(64, 1e6, 18e6)(2048, 32_768) > 200e9


def test_of_two_chunks_one_behind_the_other_all_that_the_second_needs_more_counts_for_each_pair() -> None:
    memory = WorkingMemory(per_token=5_000, per_pair=16)
    found = WorkingMemory.from_two(64, memory(64, 64), memory(64, 128))
    assert found(2048, 32_768) == pytest.approx(memory(2048, 32_768))
    assert WorkingMemory.from_two(64, 500, 400).per_pair == 0


# -- a long text that was not computed -------------------------------------------------------------------------


def filled(layer: KVCache | QuantizedKVCache | RotatingKVCache | ChunkedKVCache) -> None:
    layer.update_and_fetch(mx.ones((1, 2, 1, 64)), mx.ones((1, 2, 1, 32)))


@pytest.mark.parametrize(
    "layer",
    [
        KVCache(),
        QuantizedKVCache(group_size=32, bits=4),
        QuantizedKVCache(group_size=32, bits=8),
        ChunkedKVCache(4096),
    ],
)
def test_caches_get_longer_and_have_room_for_a_chunk(
    layer: KVCache | QuantizedKVCache | ChunkedKVCache,
) -> None:
    filled(layer)
    assert can_lengthen([layer])
    lengthen([layer], 999, 500)
    assert layer.offset == 1000
    nbytes = layer.nbytes
    layer.update_and_fetch(mx.ones((1, 2, 500, 64)), mx.ones((1, 2, 500, 32)))
    assert (layer.offset, layer.nbytes) == (1500, nbytes)


def test_windows_are_filled_and_no_longer() -> None:
    layer = RotatingKVCache(128)
    filled(layer)
    lengthen([layer], 5_000, 64)
    assert layer.offset == 129
    assert layer.keys.shape[2] <= 2 * 128


def test_states_and_what_holds_nothing_are_left_alone_and_the_parts_of_a_layer_are_lengthened() -> None:
    inner, empty, state = KVCache(), KVCache(), ArraysCache(2)
    filled(inner)
    layers = [CacheList(inner, empty), state, KVCache()]
    assert can_lengthen(layers)
    lengthen(layers, 10, 0)
    assert (inner.offset, empty.offset) == (11, 0)
    assert state.cache == [None, None]


def test_a_cache_of_a_kind_that_is_not_known_is_not_lengthened() -> None:
    layer = ConcatenateKVCache()
    filled(layer)
    assert not can_lengthen([layer])
    assert not can_lengthen([object()]), "as a model's own, which has not all methods of mlx-lm's"
