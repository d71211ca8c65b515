"""The engine on MLX: the only package that imports mlx and mlx_lm, and only once an engine is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..threaded import ThreadedEngine

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT_CACHE_BYTES = 2 << 30


def load_engine(
    model: str | Path,
    *,
    model_id: str | None = None,
    context_length: int | None = None,
    max_concurrent: int = 32,
    prefill_chunk: int = 512,
    max_waiting: int = 256,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
) -> ThreadedEngine:
    """Load a model folder or Hugging Face repository and start its engine thread.

    `model_id` is the name clients use (else the repository's or the folder's name), `context_length` a limit
    below the model's own. A running stream waits for at most one `prefill_chunk` of each prompt that is being
    read. `cache_bytes` bounds the memory for reusable prompt prefixes; 0 turns reuse off.
    Raises EngineError with a text for people.
    """
    from .batching import MLXBatch

    batch = MLXBatch(
        model,
        model_id=model_id,
        context_length=context_length,
        max_concurrent=max_concurrent,
        prefill_chunk=prefill_chunk,
        cache_bytes=cache_bytes,
    )
    return ThreadedEngine(batch, max_concurrent=max_concurrent, max_waiting=max_waiting)
