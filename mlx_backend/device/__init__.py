"""The device that models share: which of them may compute now, and how much memory each has reserved.

One `Device` is made at start and handed to every engine and every embedding worker. Nothing here is global: two
devices know nothing of each other. Only `device/mlx.py` imports MLX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.device.lock import FairLock
from mlx_backend.device.memory import MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Callable


class Device:
    """What the models of one machine share: `lock` for computing, `memory` for room.

    `limit` is how many bytes models and caches may take together. A callable is called when the limit is first
    needed, so that a device can be made before MLX is imported.
    """

    def __init__(self, limit: int | Callable[[], int]) -> None:
        self.lock = FairLock()
        self.memory = MemoryBudget(limit)
