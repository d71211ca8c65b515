"""Quantised embedding models: many tokens at once are computed with dequantised weights, and the memory is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx_lm
import numpy as np
import pytest
from embedding_models import quantise_bert, write_bert
from engine_models import write_qwen
from tolerances import VECTOR_ATOL

from mlx_backend.device import Device
from mlx_backend.embedding.embedding_config import EmbeddingOptions
from mlx_backend.embedding.mlx.network import MLXNetwork
from mlx_backend.embedding.text_encoder import EncodedText

if TYPE_CHECKING:
    from array import array
    from pathlib import Path

MODULE = "mlx_backend.layers.many_rows"
TEXTS = [EncodedText([(7 * at + length) % 100 + 10 for at in range(length)]) for length in (3, 20, 60)]


@pytest.fixture
def always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the implementation for many rows used for a few."""
    monkeypatch.setattr(f"{MODULE}.MIN_WEIGHTS", 0)
    monkeypatch.setattr(f"{MODULE}.MIN_ROWS", 2)
    monkeypatch.setattr(f"{MODULE}.MIN_ROWS_OF_QUICK_BITS", 2)
    monkeypatch.setattr(f"{MODULE}.MIN_ROWS_OF_SMALL_FLOATS", 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = tmp_path_factory.mktemp("quantised")
    original = write_qwen(scratch / "original", architectures=["Qwen3Model"])
    quantised = scratch / "Qwen3-Embedding-4bit"
    mlx_lm.convert(str(original), mlx_path=str(quantised), quantize=True, q_bits=4, q_group_size=64)
    return quantised


def load(folder: Path, memory: int = 1 << 30) -> MLXNetwork:
    network = MLXNetwork(str(folder), "embedding", EmbeddingOptions(pooling="last"), device=Device(memory))
    network.load(lambda _: None)
    return network


def vectors(network: MLXNetwork, texts: list[EncodedText]) -> tuple[list[array[float]], int]:
    """Return the vectors, and the bytes that were reserved meanwhile."""
    stages = network.run(texts, None, 32)
    next(stages)
    reservation: Any = network._reservation
    reserved: int = reservation.working
    while True:
        try:
            next(stages)
        except StopIteration as end:
            return end.value, reserved


def many_rows_were_used(network: MLXNetwork) -> bool:
    many_rows = network._many_rows
    assert many_rows is not None
    was_used, many_rows.was_used = many_rows.was_used, False
    return was_used


def test_vectors_are_those_of_the_quantised_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch, always_faster: None
) -> None:
    found, reserved = vectors(network := load(folder), TEXTS)
    assert many_rows_were_used(network)
    monkeypatch.setattr(f"{MODULE}.MIN_WEIGHTS", 1 << 40)  # so no layer is replaced
    expected, plainly_reserved = vectors(plain := load(folder), TEXTS)
    assert plain._many_rows is None
    np.testing.assert_allclose(found, expected, atol=VECTOR_ATOL)
    many_rows = network._many_rows
    assert many_rows is not None
    assert reserved - plainly_reserved == many_rows.max_dequantized_bytes > 0


def test_where_there_is_no_room_for_dequantised_weights_the_quantised_ones_are_used(
    folder: Path, always_faster: None
) -> None:
    expected, reserved = vectors(network := load(folder), TEXTS)
    many_rows = network._many_rows
    assert many_rows is not None
    assert network._reservation is not None
    needed = network._reservation.weights + reserved
    for missing, is_used in ((0, True), (1, False), (many_rows.max_dequantized_bytes, False)):
        tight = load(folder, needed - missing)
        many_rows_were_used(tight)
        found, _ = vectors(tight, TEXTS)
        assert many_rows_were_used(tight) is is_used
        np.testing.assert_allclose(found, expected, atol=VECTOR_ATOL)


def test_the_layers_of_encoders_are_replaced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, always_faster: None
) -> None:
    plain = write_bert(tmp_path / "plain", hidden_size=64, intermediate_size=64)
    assert load(plain)._many_rows is None, "weights that are not quantised are left alone"
    folder = quantise_bert(plain)
    found, _ = vectors(network := load(folder), TEXTS)
    assert many_rows_were_used(network)
    monkeypatch.setattr(f"{MODULE}.MIN_WEIGHTS", 1 << 40)
    expected, _ = vectors(load(folder), TEXTS)
    np.testing.assert_allclose(found, expected, atol=VECTOR_ATOL)
