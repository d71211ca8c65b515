"""What MLX reports on a Mac, and what follows from it: the limits of a Mac with 16 GB, on any machine."""

from collections.abc import Mapping

import mlx.core as mx
import pytest

from mlx_backend.device import this_device
from mlx_backend.device.mlx import recommended_memory, set_wired_limit, working_set_limit

GB = 1 << 30
WORKING_SET = 16 * GB * 2 // 3
# The keys that MLX's Metal backend has.
A_MAC: Mapping[str, str | int] = {
    "architecture": "applegpu_g16g",
    "device_name": "Apple M4",
    "max_buffer_length": 9 * GB,
    "max_recommended_working_set_size": WORKING_SET,
    "memory_size": 16 * GB,
    "resource_limit": 499000,
}


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """MLX's functions as on that Mac; the wired limits that were set."""
    limits: list[int] = []
    monkeypatch.setattr(mx, "device_info", lambda: A_MAC)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "set_wired_limit", limits.append)
    return limits


def test_models_may_take_most_of_what_macos_recommends(mac: list[int]) -> None:
    assert recommended_memory() == int(WORKING_SET * 0.9)
    assert this_device().memory.limit == recommended_memory()
    assert this_device(20 * GB).memory.limit == 20 * GB, "an operator may insist"
    assert working_set_limit() == WORKING_SET


def test_the_devices_choice_reaches_mlx(mac: list[int]) -> None:
    model = this_device().wired.add(8 * GB)
    assert mac == [8 * GB]
    model.close()
    assert mac == [8 * GB, 0]
    this_device(wired="off").wired.add(8 * GB)
    assert mac == [8 * GB, 0]


@pytest.mark.skipif(mx.metal.is_available(), reason="this is a Mac")
def test_other_systems_wire_nothing() -> None:
    assert working_set_limit() is None
    set_wired_limit(0)  # is allowed, and does nothing
    assert recommended_memory() > 0
