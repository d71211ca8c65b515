"""The wired limit: one owner counts every model in and out, and wires no more than weights, if anything."""

from pathlib import Path

import mlx.core as mx
import pytest
from embedding_models import write_bert
from engine_models import write_model

from mlx_backend.device import Device
from mlx_backend.device.wired import Wired
from mlx_backend.embedding.embedding_config import EmbeddingOptions
from mlx_backend.embedding.mlx import load_worker
from mlx_backend.engine.mlx import load_engine

GB = 1 << 30
MEMORY_SHARE = 0.9  # as tolerances.held_memory allows


class Mac:
    """MLX's two functions as on a Mac that recommends `working_set` bytes, and the limits that were set."""

    def __init__(self, working_set: int | None) -> None:
        self.working_set = working_set
        self.limits: list[int] = []
        self.device: Device

    def with_choice(self, wired: Wired) -> Device:
        self.device = Device(
            64 * GB, wired=wired, wired_limit=lambda: self.working_set, set_wired_limit=self.set_limit
        )
        return self.device

    def set_limit(self, limit: int) -> None:
        assert self.device.lock._held, "no step of another model may be running"
        assert self.working_set is not None
        assert limit <= self.working_set, "MLX refuses more"
        self.limits.append(limit)

    @property
    def limit(self) -> int:
        return self.limits[-1] if self.limits else 0


def test_each_model_that_comes_or_goes_leaves_the_limit_of_those_that_are_there() -> None:
    mac = Mac(working_set=48 * GB)
    wired = mac.with_choice("on").wired
    first = wired.add(10 * GB)
    assert mac.limit == 10 * GB
    second = wired.add(5 * GB)
    assert mac.limit == 15 * GB
    first.close()
    assert mac.limit == 5 * GB
    first.close()
    assert mac.limit == 5 * GB, "closing twice counts once"
    second.close()
    assert mac.limit == 0


def test_auto_wires_only_what_is_large_for_the_machine() -> None:
    mac = Mac(working_set=16 * GB)
    wired = mac.with_choice("auto").wired
    small = wired.add(5 * GB)
    assert mac.limits == [], "MLX is left alone"
    large = wired.add(6 * GB)
    assert mac.limit == 11 * GB
    small.close()
    assert mac.limit == 0
    large.close()
    assert mac.limits == [11 * GB, 0]


def test_never_more_is_wired_than_the_system_allows() -> None:
    mac = Mac(working_set=16 * GB)
    wired = mac.with_choice("on").wired
    wired.add(12 * GB)
    wired.add(12 * GB)
    assert mac.limit == 16 * GB


@pytest.mark.parametrize(("choice", "working_set"), [("off", 16 * GB), ("on", None), ("auto", None)])
def test_off_and_systems_without_a_limit_leave_mlx_alone(choice: Wired, working_set: int | None) -> None:
    mac = Mac(working_set)
    model = mac.with_choice(choice).wired.add(12 * GB)
    model.close()
    assert mac.limits == []


def test_an_engine_and_an_embedding_model_are_counted_while_they_are_loaded(tmp_path: Path) -> None:
    mac = Mac(working_set=GB)
    device = mac.with_choice("on")
    engine = load_engine(write_model(tmp_path / "chat"), device=device)
    chat = device.memory.reserved
    assert mac.limit == chat > 0
    worker = load_worker(
        str(write_bert(tmp_path / "bert")), "embedding", EmbeddingOptions(allow_download=False), device=device
    )
    assert mac.limit == device.memory.reserved > chat
    embedding = device.memory.reserved - chat
    engine.stop()
    assert mac.limit == embedding
    worker.stop()
    assert mac.limit == 0


def test_the_weights_are_freed_before_the_limit_falls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mac = Mac(working_set=GB)
    device = mac.with_choice("on")
    active: list[int] = []
    monkeypatch.setattr(device.wired, "_set_limit", lambda _limit: active.append(mx.get_active_memory()))
    engine = load_engine(write_model(tmp_path / "chat"), device=device)
    weights = device.memory.reserved
    engine.stop()
    loaded, unloaded = active
    assert loaded - unloaded >= weights * MEMORY_SHARE
