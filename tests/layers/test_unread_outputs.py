"""Layers whose outputs reach nothing that is kept are found by NaN, and left out of runs that only keep it."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from mlx_backend.layers.many_rows import ManyRows, use_many_rows_layers
from mlx_backend.layers.unread_outputs import find_unread

MODULE = "mlx_backend.layers.many_rows"
WIDTH = 64


class Blocks(nn.Module):  # type: ignore[misc]  # MLX's modules have no types
    """Blocks of two layers each; of what goes into the second layer of each but the last, something is kept."""

    def __init__(self, count: int) -> None:
        super().__init__()
        mx.random.seed(1)
        self.layers = [nn.Linear(WIDTH, WIDTH).to_quantized(bits=4, group_size=64) for _ in range(2 * count)]
        self.keep: Callable[[mx.array], mx.array] = lambda x: x

    def __call__(self, x: mx.array) -> list[mx.array]:
        kept = []
        for number, layer in enumerate(self.layers):
            if number % 2 and number + 1 < len(self.layers):
                kept.append(self.keep(x))
            x = x + layer(x)
        return kept


@pytest.fixture(autouse=True)
def always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every layer replaced."""
    monkeypatch.setattr(f"{MODULE}.MIN_WEIGHTS", 0)
    monkeypatch.setattr(f"{MODULE}.MIN_ROWS", 2)
    monkeypatch.setattr(f"{MODULE}.MIN_ROWS_OF_SMALL_FLOATS", 2)


def prepare(network: Any) -> ManyRows:
    many_rows = use_many_rows_layers([network], mx.float32, dequantize=True)
    assert many_rows is not None
    return many_rows


def kept_of(network: Any) -> Callable[[], list[mx.array]]:
    return lambda: network(mx.ones((1, 8, WIDTH)))


def unread(network: Any) -> list[bool]:
    return [layer.is_unread for layer in network.layers]


def test_the_layers_after_the_last_one_that_something_kept_depends_on_are_unread() -> None:
    network = Blocks(3)
    many_rows = prepare(network)
    assert find_unread(many_rows, kept_of(network)) == 3
    assert unread(network) == [False] * 3 + [True] * 3, "what the second block keeps is its first layer's"


def test_unread_layers_are_left_out_only_where_nothing_but_what_is_kept_is_needed() -> None:
    network = Blocks(2)
    many_rows, x = prepare(network), mx.ones((1, 8, WIDTH))
    last = network.layers[-1]
    expected, output = network(x), last(x)
    find_unread(many_rows, kept_of(network))
    assert mx.array_equal(last(x), output)
    with many_rows.without_unread():
        assert not last(x).any()
        assert all(map(mx.array_equal, network(x), expected))
    assert mx.array_equal(last(x), output)


def test_a_layer_that_is_called_again_later_is_not_left_out() -> None:
    network = Blocks(2)
    network.layers[-1] = network.layers[0]
    many_rows = prepare(network)
    assert find_unread(many_rows, kept_of(network)) == 2
    assert unread(network) == [False, True, True, False]


def test_nothing_is_left_out_if_the_last_outputs_are_kept() -> None:
    network = Blocks(2)
    assert (
        find_unread(
            prepare(network), lambda: [*network(mx.ones((1, 8, WIDTH))), network.layers[-1](mx.ones(WIDTH))]
        )
        == 0
    )
    assert unread(network) == [False] * 4


def test_nothing_is_left_out_if_what_is_kept_is_nan_anyway() -> None:
    network = Blocks(2)
    network.keep = lambda x: x + mx.nan
    assert find_unread(prepare(network), kept_of(network)) == 0


def test_integers_that_are_computed_from_outputs_show_what_they_depend_on() -> None:
    network = Blocks(2)
    network.keep = lambda x: (x > 0).astype(mx.int32)
    assert find_unread(prepare(network), kept_of(network)) == 3
