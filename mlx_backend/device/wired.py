"""How much of the models' memory macOS may not page out: one limit in the process, the sum over the loaded models.

MLX keeps what fits below the limit in a Metal residency set, and macOS then wires those pages. That keeps a model fast
which nearly fills the machine's memory. It also lets concurrent requests panic the kernel: in ml-explore/mlx#3186 a
server that wired all it might panicked 3 times of 3 within two minutes, and one that wired nothing ran 10 of 10 times;
ml-explore/mlx-lm#1666 has the same under continuous batching. So "auto" wires only where the models are large for the
machine, and never more than their weights: those stay in place until a model is unloaded, whereas caches, which come
and go with every request, find the set full.

Knows no MLX: what sets the limit is handed in. Where the system recommends no size (Linux), nothing is wired.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

type Wired = Literal["auto", "on", "off"]

AUTO_SHARE = 0.5
"""Share of the recommended working set above which "auto" wires the weights."""


class WiredMemory:
    """The owner of MLX's wired limit. Safe to use from any thread.

    `recommended` returns the system's own limit in bytes, None where there is none; it is first called when a model
    is loaded. `set_limit` is called with the new limit in bytes, while `idle` is held: no step may be running.
    """

    def __init__(
        self,
        choice: Wired,
        *,
        recommended: Callable[[], int | None],
        set_limit: Callable[[int], None],
        idle: AbstractContextManager[None],
    ) -> None:
        self._choice = choice
        self._recommended = recommended
        self._set_limit = set_limit
        self._idle = idle
        self._guard = threading.Lock()
        self._models: list[WiredWeights] = []
        self._limit = 0  # MLX's own default

    def add(self, weights: int) -> WiredWeights:
        """Count a model in by the bytes of its weights, until it is closed. Call this once they are in memory."""
        model = WiredWeights(self, weights)
        if self._choice != "off":
            with self._guard:
                self._models.append(model)
                self._update()
        return model

    def remove(self, model: WiredWeights) -> None:
        """Count a model out. Idempotent."""
        with self._guard:
            if model in self._models:
                self._models.remove(model)
                self._update()

    def _update(self) -> None:
        recommended = self._recommended()
        if recommended is None:
            return
        weights = sum(model.weights for model in self._models)
        is_large = self._choice == "on" or weights > AUTO_SHARE * recommended
        limit = min(weights, recommended) if is_large else 0  # MLX refuses a limit above the system's
        if limit != self._limit:
            with self._idle:
                self._set_limit(limit)
            self._limit = limit


class WiredWeights:
    """The weights of one loaded model."""

    def __init__(self, owner: WiredMemory, weights: int) -> None:
        self._owner = owner
        self.weights = weights

    def close(self) -> None:
        """Count the model out, once its memory has been freed: of what is still there, MLX would unwire any part."""
        self._owner.remove(self)
