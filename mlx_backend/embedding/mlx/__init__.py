"""Embedding and rerank models on MLX. Importing this is free: mlx and mlx_lm are imported when a model is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.device import this_device
from mlx_backend.device.importing import importing_mlx
from mlx_backend.embedding.embedding_config import EmbeddingOptions
from mlx_backend.embedding.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlx_backend.device import Device
    from mlx_backend.models.files import ModelType


def load_worker(
    model: str,
    model_type: ModelType,
    options: EmbeddingOptions | None = None,
    *,
    device: Device | None = None,
    model_id: str | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> Worker:
    """Load a model folder or Hugging Face repository and start its thread.

    `device` is shared with the other models of the process; without one the model has a device of its own.
    `on_progress` is called on that thread with the progress, from 0 to 1. Raises EngineError with a message for users.
    """
    chosen = options or EmbeddingOptions()
    device = device or this_device(chosen.memory_bytes)
    with importing_mlx(device.blas):
        from mlx_backend.embedding.mlx.network import MLXNetwork

    network = MLXNetwork(model, model_type, chosen, device=device, model_id=model_id)
    return Worker(network, device.lock, max_waiting=chosen.max_waiting, on_progress=on_progress)
