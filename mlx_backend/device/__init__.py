"""The device that models share: which of them may compute now, and how much memory each has reserved or wired.

One `Device` is made at start and handed to every engine and every embedding worker. Nothing here is global: two
devices know nothing of each other. Only `device/mlx.py` imports MLX, and `device/importing.py` says how that is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_backend.device.importing import importing_mlx
from mlx_backend.device.machine import memory_pressure
from mlx_backend.device.memory import MemoryBudget
from mlx_backend.device.threads import FairLock
from mlx_backend.device.wired import WiredMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlx_backend.device.blas import BlasChoice
    from mlx_backend.device.machine import Pressure
    from mlx_backend.device.wired import Wired


class Device:
    """What the models of one machine share: `lock` for computing, `memory` for room, `wired` for what stays resident.

    `limit` is how many bytes models and caches may take together. A callable is called when the limit is first
    needed, so that a device can be made before MLX is imported. `wired_limit` returns how much the system allows to
    be wired, and `set_wired_limit` wires so much; without them nothing is wired. `pressure` says how short of memory
    the system is, `used` what MLX has allocated. `blas` is passed to `importing_mlx` when MLX is imported for this
    device.
    """

    def __init__(
        self,
        limit: int | Callable[[], int],
        *,
        wired: Wired = "auto",
        wired_limit: Callable[[], int | None] = lambda: None,
        set_wired_limit: Callable[[int], None] = lambda limit: None,
        pressure: Callable[[], Pressure] = lambda: "none",
        used: Callable[[], int] = lambda: 0,
        blas: BlasChoice = "auto",
    ) -> None:
        self.lock = FairLock()
        self.memory = MemoryBudget(limit, pressure, used)
        self.wired = WiredMemory(wired, recommended=wired_limit, set_limit=set_wired_limit, idle=self.lock)
        self.blas = blas


def this_device(memory_bytes: int | None = None, wired: Wired = "auto", blas: BlasChoice = "auto") -> Device:
    """Return a device for the machine's own: with a memory limit in bytes, or the one that is recommended.

    MLX is imported when the first model is loaded.
    """

    def mlx() -> Any:
        with importing_mlx(blas):
            from mlx_backend.device import mlx as adapter

        return adapter

    return Device(
        memory_bytes or (lambda: mlx().recommended_memory()),
        wired=wired,
        wired_limit=lambda: mlx().working_set_limit(),
        set_wired_limit=lambda limit: mlx().set_wired_limit(limit),
        pressure=memory_pressure,
        used=lambda: mlx().used_memory(),
        blas=blas,
    )
