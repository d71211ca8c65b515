"""How short of memory the system is: what macOS says, with a stand-in for its C function, and what follows from it."""

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from engine_models import write_qwen
from engine_requests import reply_tokens

from mlx_backend.device import Device
from mlx_backend.device.machine import Pressure, memory_pressure, read_pressure
from mlx_backend.device.memory import MemoryBudget
from mlx_backend.engine.base import Finished, GenerationRequest, Progress
from mlx_backend.engine.kv_cache_budget import MAX_PRESSED_CHUNK, KVCacheBudget
from mlx_backend.engine.mlx import load_engine


@pytest.mark.parametrize(
    ("level", "pressure"), [(1, "none"), (2, "warning"), (4, "critical"), (None, "none")]
)
def test_the_level_that_macos_gives_is_read(level: int | None, pressure: Pressure) -> None:
    asked: list[bytes] = []

    def sysctlbyname(name: bytes, value: Any, size: Any, _new: None, _new_size: int) -> int:
        asked.append(name)
        if level is None:  # no such name
            return -1
        assert size._obj.value == 4
        value._obj.value = level
        return 0

    assert read_pressure(sysctlbyname) == pressure
    assert asked == [b"kern.memorystatus_vm_pressure_level"]


@pytest.mark.skipif(sys.platform == "darwin", reason="there the system says what is so")
def test_elsewhere_no_system_is_short_of_memory() -> None:
    assert memory_pressure() == "none"


@pytest.mark.parametrize("pressure", ["none", "warning", "critical"])
def test_under_pressure_chunks_are_short_and_at_last_no_prefix_is_kept(pressure: Pressure) -> None:
    reservation = MemoryBudget(1 << 30).reserve(0)
    budget = KVCacheBudget(reservation, lambda tokens: tokens, max_padded=0, pressure=lambda: pressure)
    assert budget.fitting_chunk(0, 2048) == MAX_PRESSED_CHUNK.get(pressure, 2048)
    assert budget.fitting_chunk(0, 64) == 64
    assert bool(budget.prefix_room()) == (pressure != "critical")


def test_a_prompt_is_prefilled_in_short_chunks_while_the_system_is_short_of_memory(tmp_path: Path) -> None:
    says: list[Pressure] = ["none"]
    device = Device(8 << 30, pressure=lambda: says[0])
    asked = GenerationRequest(prompt=[20 + at % 200 for at in range(400)], max_tokens=5)
    with load_engine(write_qwen(tmp_path), device=device, prefill_chunk=1024) as engine:
        expected = reply_tokens(engine, asked)
        says[0] = "critical"
        *items, last = engine.generate(asked)
        assert isinstance(last, Finished)
        assert last.cached_tokens in (
            0,
            399,
        )  # what was cached before may still be found, or is dropped by then
        assert reply_tokens(engine, asked) == expected
        *items, last = engine.generate(asked)
        assert isinstance(last, Finished)
        assert last.cached_tokens == 0
        done = [0, *(item.processed for item in items if isinstance(item, Progress))]
        assert max(b - a for a, b in pairwise(done)) <= MAX_PRESSED_CHUNK["critical"]
