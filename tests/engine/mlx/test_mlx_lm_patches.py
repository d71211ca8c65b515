"""What the engine replaces in mlx-lm fits the installed version, changes nothing else, and can be left out."""

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from engine_models import write_model
from known_sources import KNOWN_SOURCES, changed_sources
from mlx import nn
from mlx_lm.models import base
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.utils import load_model

from mlx_backend.device import Device
from mlx_backend.engine.base import GenerationRequest, TokenDelta
from mlx_backend.engine.mlx.batch import MLXBatch
from mlx_backend.engine.mlx.mlx_lm_patches.packing import patch_for_packing
from mlx_backend.engine.mlx.mlx_lm_patches.sliding_windows import RewindableRotatingKVCache
from mlx_backend.models.engine_options import EngineOptions


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), eos_token_id=[])


def test_the_installed_mlx_and_mlx_lm_have_the_sources_that_the_patches_were_written_for() -> None:
    changed = "".join(f'\n    "{name}": "{digest}",' for name, digest in changed_sources().items())
    assert not changed, (
        "Functions or classes that mlx_lm_patches replaces or relies on are not the ones it knows. Read what has "
        "changed in each, run tests/engine/mlx (packing, speculation, the prefix cache) and the benchmarks, adapt the "
        f"patches, then state the versions and these digests in tests/known_sources.py:{changed}"
    )


def test_a_source_that_has_changed_and_one_that_is_gone_are_both_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = KNOWN_SOURCES["mlx_lm.models.cache.KVCache"]
    monkeypatch.setitem(KNOWN_SOURCES, "mlx_lm.models.cache.KVCache", "0" * 16)
    monkeypatch.setitem(KNOWN_SOURCES, "mlx_lm.models.cache.NoSuchCache", "0" * 16)
    monkeypatch.setitem(KNOWN_SOURCES, "mlx_lm.no_such_module.Cache", "0" * 16)
    assert changed_sources() == {
        "mlx_lm.models.cache.KVCache": known,
        "mlx_lm.models.cache.NoSuchCache": "missing",
        "mlx_lm.no_such_module.Cache": "missing",
    }


def test_a_patched_network_computes_what_it_computed_before(model: Path) -> None:
    network, _ = load_model(model)
    tokens = mx.array([[9, 10, 11, 12, 13]])
    before = network(tokens, cache=make_prompt_cache(network))
    patch_for_packing(network)
    assert mx.array_equal(network(tokens, cache=make_prompt_cache(network)), before)
    assert base.scaled_dot_product_attention.__module__ == "mlx_lm.models.base"
    assert base.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"


def test_a_window_that_was_rewound_continues_as_if_the_tokens_had_never_come(model: Path) -> None:
    network, _ = load_model(model)
    prompt, wrong, right = mx.arange(10, 60)[None], mx.array([[8, 8, 8]]), mx.array([[8, 20, 21]])
    once, twice = (make_prompt_cache(network) for _ in range(2))
    for layers in (once, twice):
        network(prompt, cache=layers)
    expected = network(right, cache=once)
    twice = [RewindableRotatingKVCache.of(layer) for layer in twice]
    assert [type(layer) is RewindableRotatingKVCache for layer in twice] == [
        type(layer) is RotatingKVCache for layer in once
    ]
    network(wrong, cache=twice)
    for layer in twice:
        layer.trim(2)
    assert mx.allclose(network(right[:, 1:], cache=twice), expected[:, 1:], rtol=1e-3, atol=1e-4)


@pytest.fixture
def unpacked(model: Path) -> Iterator[MLXBatch]:
    batch = MLXBatch(model, EngineOptions(cache_bytes=0, packing=False), device=Device(1 << 30))
    batch.load(lambda _share: None)
    yield batch
    batch.unload()


def test_without_packing_a_network_keeps_mlx_lms_own_rotary_embeddings_and_replies_the_same(
    model: Path, unpacked: MLXBatch
) -> None:
    rotations = [
        each for each in unpacked.runtime.networks.by_adapter[""].modules() if isinstance(each, nn.RoPE)
    ]
    assert rotations
    assert all(type(each) is nn.RoPE for each in rotations)
    packed = MLXBatch(model, EngineOptions(cache_bytes=0), device=Device(1 << 30))
    packed.load(lambda _share: None)
    try:
        assert (packed.runtime.abilities.can_pack, unpacked.runtime.abilities.can_pack) == (True, False)
        assert _replies(unpacked) == _replies(packed)
    finally:
        packed.unload()


def _replies(batch: MLXBatch) -> dict[int, list[int]]:
    for key in range(3):
        batch.insert(key, GenerationRequest(prompt=[10 + key] * (20 + key), max_tokens=8))
    replies: dict[int, list[int]] = {}
    while batch.sequences:
        for key, outcome in batch.step():
            if isinstance(outcome, TokenDelta):
                replies.setdefault(key, []).append(outcome.token)
    return replies
