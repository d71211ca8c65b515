"""The engine on MLX: the only package that imports mlx and mlx_lm, and only once an engine is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..options import EngineOptions
from ..threaded import ThreadedEngine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def load_engine(
    model: str | Path,
    options: EngineOptions | None = None,
    *,
    model_id: str | None = None,
    report: Callable[[float], None] | None = None,
    **changes: Any,
) -> ThreadedEngine:
    """Load a model folder or Hugging Face repository and start its engine thread.

    `model_id` is the name clients use (else the repository's or the folder's name). `changes` are single
    fields of `EngineOptions`. `report` hears on the engine's thread how far loading has come, from 0 to 1.
    Raises EngineError with a text for people.
    """
    from .batching import MLXBatch

    chosen = replace(options or EngineOptions(), **changes)
    return ThreadedEngine(
        MLXBatch(model, chosen, model_id=model_id),
        max_concurrent=chosen.max_concurrent,
        max_waiting=chosen.max_waiting,
        report=report,
    )
