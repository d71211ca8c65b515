"""The prefix cache: which prefixes are found, what they share, and which are evicted first."""

import gc
import random
import sys
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache
from tolerances import held_memory

from mlx_backend.common_prefix import common_prefix_length
from mlx_backend.engine.mlx.arrays import as_floats
from mlx_backend.engine.mlx.chunk_cost import CacheCost
from mlx_backend.engine.mlx.kv_cache import alias, rewind_copies
from mlx_backend.engine.mlx.mlx_lm_patches.attention import Quantization
from mlx_backend.engine.mlx.mlx_lm_patches.kv_caches import GrowingKVCache, SharedArrays
from mlx_backend.engine.mlx.prefix_cache import PrefixCache, own_memory


def layers(length: int, size: int = 4) -> list[Any]:
    """Return a full and a sliding layer that hold the tokens 0 … length - 1: each token's key is its number."""
    full, window = GrowingKVCache(), RotatingKVCache(max_size=8)
    numbers = mx.broadcast_to(mx.arange(length, dtype=mx.float32)[None, None, :, None], (1, 2, length, size))
    for layer in (full, window):
        layer.update_and_fetch(numbers + 0, -numbers)
    mx.eval(full.state, window.state)
    return [full, window]


def contents(kept: list[Any]) -> list[float]:
    return as_floats(kept[0].keys_and_values()[0][0, 0, :, 0])


def test_the_longest_prefix_is_found_among_many_and_holds_what_it_should() -> None:
    cache = PrefixCache(1 << 30)
    chooser = random.Random(5)
    kept: set[tuple[int, ...]] = set()
    for _ in range(150):
        tokens = [chooser.choice((1, 2)) for _ in range(chooser.randrange(1, 9))]
        cache.insert(tokens, layers(len(tokens)))
        kept.add(tuple(tokens))
    assert len(cache) == len(kept)
    for _ in range(300):
        prompt = tuple(chooser.choice((1, 2)) for _ in range(chooser.randrange(10)))
        expected = max((len(tokens) for tokens in kept if prompt[: len(tokens)] == tokens), default=0)
        length, found = cache.find_longest(prompt)
        assert length == expected
        if found is not None:
            assert contents(found) == list(range(length))


def test_a_part_of_a_prefix_is_found_where_it_can_be_cut_and_saves_enough() -> None:
    cache = PrefixCache(1 << 30)
    chooser = random.Random(6)
    for size, cuttable in ((8, True), (30, False)):  # the window holds 8
        stored = {tuple(chooser.choice((1, 2)) for _ in range(size)) for _ in range(20)}
        for tokens in stored:
            cache.insert(tokens, layers(size))
        for _ in range(100):
            prompt = tuple(chooser.choice((1, 2)) for _ in range(12))
            common = max(common_prefix_length(prompt, each) for each in stored)
            length, found = cache.find_longest(prompt, cut=True)
            assert cache.covered_tokens((*prompt, 3), cut=True) == length
            assert length == (common if cuttable and common >= 3 else 0)
            assert cache.find_longest(prompt)[0] == 0 or common == size
            if found is not None:
                full, window = found
                assert (full.offset, window.offset) == (length, length)
                for layer in found:
                    assert as_floats(layer.keys[0, 0, :length, 0]) == list(range(length))
                    more = mx.full((1, 2, 2, 4), 77.0)
                    keys, _ = layer.update_and_fetch(more, more)
                    assert as_floats(keys[0, 0, -2:, 0]) == [77.0, 77.0]
        for tokens in stored:
            assert contents(cache.find_longest(tokens)[1] or []) == list(range(size))
        cache.clear()


@pytest.mark.parametrize("chunk", [60, 600])
def test_prefixes_hold_their_windows_and_nothing_else_of_the_chunk_that_computed_them(chunk: int) -> None:
    gc.collect()
    mx.synchronize()
    mx.clear_cache()  # or larger freed buffers may be reused
    before = mx.get_active_memory()
    cache, marks = PrefixCache(1 << 30), (5, 7)
    stepped = [GrowingKVCache(), RotatingKVCache(max_size=8)]
    for layer in stepped:
        layer.update_and_fetch(*(mx.random.normal((1, 2, chunk, 1 << 10)) for _ in "kv"))
    for length in marks:
        cache.insert(range(length), rewind_copies(stepped, chunk - length))
    del stepped, layer
    nbytes = cache.nbytes
    mx.synchronize()
    mx.clear_cache()
    assert mx.get_active_memory() - before == held_memory(nbytes, buffers=3 * 2)
    apart = PrefixCache(1 << 30)
    for length in marks:
        apart.insert(range(length), layers(length, size=1 << 10))
    assert cache.nbytes == apart.nbytes


def test_checkpoints_of_one_conversation_share_what_they_have_in_common() -> None:
    apart, together = PrefixCache(1 << 30), PrefixCache(1 << 30)
    for length in (1024, 256, 512, 768):  # caches grow by 256
        apart.insert([length] * length, layers(length))
        together.insert([9] * length, layers(length))
    windows = 4 * 2 * 2 * 8 * 4 * 4
    one = 2 * 2 * 1024 * 4 * 4
    assert together.nbytes == one + windows
    assert apart.nbytes == 2.5 * one + windows


def test_when_the_longest_is_evicted_the_others_still_hold_theirs() -> None:
    cache = PrefixCache(1 << 30)
    for length in (60, 20, 40, 90):
        cache.insert([9] * length, layers(length))
    while len(cache):
        for length in (20, 40, 60, 90):
            known, found = cache.find_longest([9] * length)
            assert contents(found) == list(range(known)) if found is not None else known == 0
        before = cache.nbytes
        cache.evict_to(before - 1)
        assert cache.nbytes < before
    assert cache.nbytes == 0


def test_the_next_checkpoint_of_a_long_conversation_takes_no_more_work_than_that_of_a_short_one() -> None:
    cache = PrefixCache(1 << 30)
    inserts = []
    for turn in range(1, 60):
        held = layers(10 * turn)
        calls = 0

        def count(_frame: object, _event: str, _argument: object) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        cache.insert([9] * 10 * turn, held)
        sys.setprofile(None)
        inserts.append(calls)
    assert max(inserts[3:]) == inserts[2]
    for turn in (1, 17, 58):
        length, found = cache.find_longest([9] * 10 * turn)
        assert found is not None
        assert contents(found) == list(range(length)) == list(range(10 * turn))


def test_a_beginning_shared_by_two_branches_is_stored_once_whichever_of_them_is_evicted() -> None:
    for first in (1, 2):
        cache = PrefixCache(1 << 30)
        for tokens in ([9] * 512, [9] * 512 + [1] * 512, [9] * 512 + [2] * 512):
            cache.insert(tokens, layers(len(tokens)))
        window = 2 * 2 * 8 * 4 * 4
        branch = 2 * 2 * 1024 * 4 * 4 + window
        assert cache.nbytes == 2 * branch + window
        kept = [9] * 512 + [3 - first] * 512
        for _ in range(3):  # so that the other is evicted first
            cache.find_longest(kept)
            cache.find_longest([9] * 512)
        cache.evict_to(2 * branch)
        assert cache.nbytes == branch + window, "the beginning is the other branch's"
        for tokens in ([9] * 512, kept):
            length, found = cache.find_longest(tokens)
            assert found is not None
            assert contents(found) == list(range(length)) == list(range(len(tokens)))


@pytest.mark.parametrize("shared", [False, True])
def test_what_cannot_be_copied_when_the_longest_is_evicted_goes_with_it(
    shared: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gc.collect()
    mx.synchronize()
    mx.clear_cache()  # or larger freed buffers may be reused
    before = mx.get_active_memory()
    cache = PrefixCache(1 << 30, shared=shared)
    cache.insert([7] * 1000, layers(1000))
    for length in (60, 20, 1000, 40):
        cache.insert([9] * length, layers(length))
    cache.find_longest([7] * 1000)  # used later than the others

    def refused(parts: Any) -> None:
        own_memory(parts)
        raise RuntimeError("[malloc] Unable to allocate 99 bytes")

    with monkeypatch.context() as patched:
        patched.setattr("mlx_backend.engine.mlx.prefix_cache.own_memory", refused)
        if shared:  # the other processes would still have what is missing here
            with pytest.raises(RuntimeError, match="Unable to allocate"):
                cache.evict_to(cache.nbytes - 1)
        else:
            cache.evict_to(cache.nbytes - 1)
    assert "3 cached prefixes could not be copied: RuntimeError" in caplog.text
    assert cache.find_longest([9] * 1001) == (0, None)
    mx.synchronize()
    assert mx.get_active_memory() - before == held_memory(cache.nbytes, buffers=2 * len(layers(1)))
    cache.evict_to(0)
    assert (cache.nbytes, len(cache)) == (0, 0)


def test_every_prefix_holds_its_own_whatever_is_inserted_and_evicted() -> None:
    chooser = random.Random(8)
    for _ in range(20):
        cache = PrefixCache(1 << 30)
        for _ in range(40):
            tokens = [chooser.choice((1, 2)) for _ in range(chooser.randrange(1, 12))]
            cache.insert(tokens, layers(len(tokens)))
            if chooser.random() < 0.4:
                cache.evict_to(chooser.randrange(cache.nbytes + 1))
            for _ in range(4):
                length, found = cache.find_longest([chooser.choice((1, 2)) for _ in range(12)])
                assert found is None or contents(found) == list(range(length))
        cache.evict_to(0)
        assert (cache.nbytes, len(cache)) == (0, 0)


def append(caches: list[Any], tokens: list[int]) -> None:
    keys = mx.broadcast_to(mx.array(tokens, dtype=mx.float32)[None, None, :, None], (1, 2, len(tokens), 32))
    for layer in caches:
        layer.update_and_fetch(keys + 0, -keys)


@pytest.mark.parametrize("cut", [False, True])
def test_every_sequence_and_prefix_holds_its_own_while_they_share_arrays(cut: bool) -> None:
    """Sequences start at cached prefixes, append, take back, are stored half-way, and end in any order.

    One of their layers is quantised; equal numbers are exact in any number of bits.
    """
    chooser = random.Random(9)
    for _ in range(12):
        cache = PrefixCache(1 << 30)
        running: list[tuple[list[int], list[Any]]] = []
        for _ in range(60):
            match chooser.randrange(6):
                case 0 | 1:
                    prompt = chooser.choices((1, 2), k=chooser.choice((2, 9, 40)))
                    if running and chooser.random() < 0.7:
                        prompt = running[0][0][: chooser.randrange(60)] + prompt
                    length, found = cache.find_longest(prompt, cut=cut)
                    caches = found or [
                        GrowingKVCache(),
                        GrowingKVCache(SharedArrays((), Quantization(32, 4))),
                    ]
                    append(caches, prompt[length:] + [7] * 2)  # as a chunk that is filled up
                    for layer in caches:
                        layer.trim(2)
                    running.append((prompt, caches))
                case 2 | 3 if running:
                    tokens, caches = chooser.choice(running)
                    more = chooser.choices((1, 2), k=chooser.choice((1, 3, 300)))
                    append(caches, more)
                    tokens += more
                    surplus = chooser.randrange(len(more))
                    before = rewind_copies(caches, surplus)
                    cache.insert(tokens[: len(tokens) - surplus], before)
                    del before
                case 4 if running:
                    del running[chooser.randrange(len(running))]
                case 5:
                    cache.evict_to(chooser.randrange(cache.nbytes + 1))
            for tokens, caches in running:
                for layer in caches:
                    assert contents([layer]) == tokens
            caches, layer = [], None
        running.clear()
        for _, key in sorted(cache._entries):
            length, found = cache.find_longest(key)
            tokens = list(memoryview(key).cast("I"))
            assert found is not None
            assert length == len(tokens)
            assert contents(found) == contents(found[1:]) == tokens
            assert as_floats(found[1].keys_and_values()[1][0, 1, :length, 3]) == [-each for each in tokens]
            del found
        cache.evict_to(0)
        assert (cache.nbytes, len(cache)) == (0, 0)


def test_a_layer_that_fills_no_cache_is_stored_shared_and_evicted_beside_the_others() -> None:
    cache = PrefixCache(1 << 30)
    for length in (60, 20, 40):
        cache.insert([9] * length, [*layers(length), KVCache()])
    for length in (20, 40, 60):
        known, found = cache.find_longest([9] * length)
        assert known == length
        assert found is not None
        assert found[-1].empty()
    while len(cache):
        cache.evict_to(cache.nbytes - 1)
    assert cache.nbytes == 0


@pytest.mark.parametrize("lengths", [(1, 40), (200, 600)])
def test_the_counted_bytes_are_those_really_held(lengths: tuple[int, int]) -> None:
    cache = PrefixCache(1 << 30)
    chooser = random.Random(6)
    gc.collect()
    mx.synchronize()
    mx.clear_cache()  # or larger freed buffers may be reused
    before = mx.get_active_memory()
    for _ in range(60):
        length = chooser.randrange(*lengths)
        tokens = [chooser.randrange(2)] * 100 + [chooser.randrange(3)] * length
        cache.insert(tokens, layers(100 + length, size=64))
        if chooser.random() < 0.3:
            cache.evict_to(cache.nbytes // 2)
    mx.synchronize()
    held = mx.get_active_memory() - before
    assert held == held_memory(cache.nbytes, buffers=60 * 2 * len(layers(1)))
    cache.clear()
    assert mx.get_active_memory() - before < 100_000


def test_what_saves_least_for_its_size_is_evicted_first_and_use_protects() -> None:
    cache = PrefixCache(1 << 30)
    for name in range(1, 6):
        cache.insert([name] * 50, layers(50))
    one = cache.nbytes // 5
    cache.find_longest([1] * 60)  # used again
    cache.evict_to(cache.nbytes - one)
    cache.insert([7] * 50, layers(50))
    cache.evict_to(cache.nbytes - one)
    cache.insert([8] * 50, layers(50))
    assert cache.covered_tokens([1] * 60) == 50
    assert cache.covered_tokens([2] * 60) == 0


def test_found_layers_can_be_written_to_without_changing_the_cached_ones() -> None:
    cache = PrefixCache(1 << 30)
    cache.insert([9] * 30, layers(30))
    for _ in range(2):
        _, mine = cache.find_longest([9] * 40)
        assert mine is not None
        for layer in mine:
            layer.update_and_fetch(mx.full((1, 2, 5, 4), 77.0), mx.full((1, 2, 5, 4), 77.0))
        assert contents(mine) == [*range(30), 77, 77, 77, 77, 77]
    live = layers(30)
    twin = [alias(layer) for layer in live]
    live[0].update_and_fetch(mx.full((1, 2, 1, 4), 5.0), mx.full((1, 2, 1, 4), 5.0))
    assert contents(twin) == list(range(30))


def test_a_prefix_larger_than_the_limit_is_not_cached() -> None:
    cache = PrefixCache(20_000)
    assert not cache.insert([9] * 500, layers(500))
    assert cache.insert([9] * 20, layers(20))
    assert (len(cache), cache.covered_tokens([9] * 501)) == (1, 20)


def test_a_prefix_is_never_found_for_another_adapter() -> None:
    cache = PrefixCache(1 << 30)
    cache.insert([9] * 20, layers(20), "pirate")
    assert cache.find_longest([9] * 30) == (0, None)
    assert cache.find_longest([9] * 30, "pirate")[0] == 20


def test_a_state_extracted_from_a_batch_does_not_hold_on_to_it() -> None:
    gc.collect()
    mx.synchronize()
    mx.clear_cache()  # or larger freed buffers may be reused
    before = mx.get_active_memory()
    batch = mx.ones((8, 4, 1 << 16))
    state = ArraysCache(1)
    state.cache = [batch[2:3]]
    cache = PrefixCache(1 << 30)
    cache.insert([9] * 20, [CacheList(state, *layers(20)), state])
    mx.eval(batch)
    del batch, state
    mx.synchronize()
    assert cache.nbytes < 3 << 20
    assert mx.get_active_memory() - before == held_memory(cache.nbytes, buffers=2 * len(layers(1)) + 2)


def test_caches_within_caches_cost_what_they_cost_alone() -> None:
    full, window = layers(8)
    alone, within = CacheCost.of([full, window], 8), CacheCost.of([CacheList(full, window)], 8)
    assert within(1000) == alone(1000) > within(100)
