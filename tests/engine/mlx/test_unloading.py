"""A batch has its model between `load` and `unload`, and nothing of it afterwards."""

import gc
import weakref
from pathlib import Path

import pytest
from engine_models import write_model

from mlx_backend.device import Device
from mlx_backend.engine.base import GenerationRequest
from mlx_backend.engine.batch import Ended
from mlx_backend.engine.mlx.batch import MLXBatch
from mlx_backend.models.engine_options import EngineOptions


@pytest.fixture
def batch(tmp_path: Path) -> MLXBatch:
    return MLXBatch(write_model(tmp_path, eos_token_id=[]), EngineOptions(), device=Device(1 << 30))


def test_nothing_is_admitted_before_loading_and_after_unloading(batch: MLXBatch) -> None:
    with pytest.raises(RuntimeError, match="No model is loaded"):
        batch.admits(GenerationRequest(prompt=[9], max_tokens=1))
    batch.unload()  # as after a load that failed
    batch.load(lambda _share: None)
    assert batch.admits(GenerationRequest(prompt=[9], max_tokens=1))
    batch.unload()
    with pytest.raises(RuntimeError, match="No model is loaded"):
        batch.admits(GenerationRequest(prompt=[9], max_tokens=1))


def test_a_load_that_fails_half_way_leaves_nothing_and_may_be_repeated(
    batch: MLXBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("[malloc] Unable to allocate 99 bytes")

    with monkeypatch.context() as patch:
        patch.setattr("mlx_backend.engine.mlx.batch.text_token_mask", fail)
        with pytest.raises(RuntimeError, match="malloc"):
            batch.load(lambda _share: None)
    batch.unload()
    assert batch._device.memory.reserved == 0
    batch.load(lambda _share: None)
    assert batch.admits(GenerationRequest(prompt=[9], max_tokens=1))
    batch.unload()


def test_an_unloaded_model_is_freed_at_once_and_not_by_the_garbage_collector(batch: MLXBatch) -> None:
    gc.collect()
    gc.disable()
    try:
        batch.load(lambda _share: None)
        for key in range(2):
            batch.insert(key, GenerationRequest(prompt=[9 + key] * 50, max_tokens=5 + 90 * key))
        outcomes = [outcome for _ in range(9) for _, outcome in batch.step()]
        assert any(isinstance(outcome, Ended) for outcome in outcomes)
        gone = [weakref.ref(each) for each in (batch.runtime, batch.prefill_queue)]
        batch.unload()
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()
