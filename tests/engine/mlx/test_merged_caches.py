"""Merged caches that know their rows' lengths: what mlx-lm's own give, without asking the device."""

import random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, KVCache, RotatingKVCache

from mlx_backend.engine.mlx.kv_cache import alias, merged, select_rows
from mlx_backend.engine.mlx.mlx_lm_patches.merged_caches import (
    MergedKVCache,
    MergedRotatingKVCache,
    merge_rows,
)

WINDOW = 12


def steps(rows: int, length: int, chooser: random.Random) -> mx.array:
    key = mx.random.key(chooser.randrange(1 << 30))
    return mx.random.normal((rows, 2, length, 4), key=key)


def filled(kind: str, length: int, chooser: random.Random) -> Any:
    """Return a cache that holds so many tokens, prefilled in a chunk or two, perhaps with some decoded after them."""
    layer = KVCache() if kind == "full" else RotatingKVCache(WINDOW)
    decoded = min(chooser.choice((0, 0, 3)), length)
    first = chooser.randrange(length - decoded + 1)
    for count in (first, length - decoded - first, *[1] * decoded):
        if count:
            chunk = steps(1, count, chooser)
            layer.update_and_fetch(chunk, -chunk)
    return layer


def theirs(layers: list[Any]) -> Any:
    """Merge as mlx-lm does."""
    kind = BatchKVCache if isinstance(layers[0], KVCache) else BatchRotatingKVCache
    return kind.merge([alias(layer) for layer in layers])


def same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and bool(mx.array_equal(one, other).item())


@pytest.mark.parametrize("kind", ["full", "window"])
@pytest.mark.parametrize("seed", range(12))
def test_rows_that_join_leave_and_are_taken_out_hold_what_mlx_lms_do(kind: str, seed: int) -> None:
    chooser = random.Random(seed)
    rows = [filled(kind, chooser.randrange(1, 40), chooser) for _ in range(2)]
    ours, reference = merge_rows(rows), theirs(rows)
    assert type(ours) in (MergedKVCache, MergedRotatingKVCache)
    count = len(rows)
    for _ in range(25):
        action = chooser.choice(("step", "step", "step", "join", "leave"))
        if action == "join" and count < 6:
            joining = [
                filled(kind, chooser.randrange(1, 40), chooser) for _ in range(chooser.choice((1, 1, 2)))
            ]
            ours.extend(merge_rows(joining))
            reference.extend(theirs(joining))
            count += len(joining)
        elif action == "leave" and count > 2:
            left = sorted(chooser.sample(range(count), count - 1))
            ours.filter(left)
            reference.filter(left)
            count -= 1
        else:
            for _ in range(chooser.choice((1, 1, 5, 20))):
                token = steps(count, 1, chooser)
                found = ours.update_and_fetch(token, -token)
                expected = reference.update_and_fetch(token, -token)
                assert all(same(*pair) for pair in zip(found, expected, strict=True))
        assert same(ours.offset, reference.offset)
        assert same(ours.left_padding, reference.left_padding)
        for row in range(count):
            own, other = ours.extract(row), reference.extract(row)
            assert isinstance(own, type(other))
            assert (own.offset, own.size()) == (other.offset, other.size())
            assert same(own.keys, other.keys)
            assert same(own.values, other.values)
            assert getattr(own, "_idx", None) == getattr(other, "_idx", None)


@pytest.mark.parametrize("kind", ["full", "window"])
def test_layers_that_hold_nothing_are_merged_and_taken_apart_too(kind: str) -> None:
    chooser = random.Random(3)
    for rows in ([filled(kind, 0, chooser)], [filled(kind, 0, chooser) for _ in range(3)]):
        ours = merge_rows(rows)
        ours.extend(merge_rows([filled(kind, 0, chooser)]))
        ours.filter([0, len(rows)])
        assert ours.extract(1).empty()


def test_to_take_rows_out_and_to_drop_some_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = random.Random(4)
    layers = merged([[filled(kind, 9 + 8 * at, chooser) for kind in ("full", "window")] for at in range(3)])
    for _ in range(10):
        token = steps(3, 1, chooser)
        for layer in layers:
            layer.update_and_fetch(token, token)

    def refuse(*_: Any) -> None:
        raise AssertionError("This waits for the device.")

    monkeypatch.setattr(mx, "eval", refuse)
    found = [layer.extract(1) for layer in layers]
    layers = select_rows([0, 2], layers)
    [alone, window] = select_rows([1], layers)
    assert [each.offset for each in (*found, alone, window)] == [27, 27, 35, 35]
