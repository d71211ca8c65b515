"""The batch on MLX: implements the scheduler's `Batch` by loading a model and delegating to a `LoadedBatch`.

Runs on the engine thread only (see scheduler.py), where the model is loaded too: MLX's streams belong to threads.
Requests arrive here checked; nothing of them may raise inside a step.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_backend.device.mlx import is_gpu
from mlx_backend.engine.batch import ModelInfo
from mlx_backend.engine.mlx.loaded_batch import LoadedBatch
from mlx_backend.engine.mlx.rehearsal import rehearse
from mlx_backend.engine.mlx.runtime import Runtime
from mlx_backend.engine.mlx.vision.tower import support_of
from mlx_backend.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mlx_backend.device import Device
    from mlx_backend.device.wired import WiredWeights
    from mlx_backend.engine.base import GenerationRequest
    from mlx_backend.engine.batch import Outcome
    from mlx_backend.engine.kv_cache_budget import KVCacheBudget
    from mlx_backend.engine.mlx.collectives import Ranks
    from mlx_backend.models.engine_options import EngineOptions


class MLXBatch:
    """A model that may be loaded and unloaded, and the requests it runs while it is loaded.

    `device` is shared with other models. With `ranks`, this process is one of several that share the model.
    """

    def __init__(
        self,
        model: str | Path,
        options: EngineOptions,
        *,
        device: Device,
        model_id: str | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        if options.prefill_chunk is not None and options.prefill_chunk < 1:
            raise EngineError(f"A prefill chunk of {options.prefill_chunk} tokens is too small.")
        self._source = model
        self._options = options
        self._device = device
        self._model_id = model_id
        self._ranks = ranks
        self._loaded: LoadedBatch | None = None
        self._wired: WiredWeights | None = None

    @property
    def loaded(self) -> LoadedBatch:
        """The batch of the loaded model. Only between `load` and `unload`."""
        if self._loaded is None:
            raise RuntimeError("No model is loaded.")
        return self._loaded

    def load(self, on_progress: Callable[[float], None]) -> ModelInfo:
        """Load the model on this thread, warm it up, and see how much memory is left."""
        runtime = Runtime(self._source, self._options, self._device, self._ranks, on_progress)
        self._loaded = LoadedBatch(runtime, self._device.lock, self._ranks)
        self._wired = self._device.wired.add(runtime.weight_bytes())
        model = runtime.model
        context_length = self._options.context_length or model.context_length
        if is_gpu() and self._options.warm_up_seconds and self._ranks is None:
            rehearse(self._loaded, context_length, self._options.warm_up_seconds / 2)
        return ModelInfo(
            model_id=self._model_id or model.name,
            context_length=context_length,
            tokenizer=model.tokenizer,
            sampling_defaults=model.sampling_defaults,
            adapters=tuple(self._options.adapters),
            unbatched=runtime.unbatched,
            image_processor=runtime.vision,
            image_support=support_of(model.folder, runtime.vision),
            available_context=partial(_available_context, runtime.cache_budget, context_length),
            set_waker=runtime.cache_budget.set_on_change,
            on_wake=self._on_wake,
        )

    def unload(self) -> None:
        """Give the memory back."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.runtime.close()
        del loaded
        mx.clear_cache()
        wired, self._wired = self._wired, None
        if wired is not None:
            wired.close()

    def close(self) -> None:
        """Clean up this thread's MLX streams.

        A thread that has used MLX and ends without this makes the process abort when the interpreter exits.
        """
        mx.synchronize()
        mx.clear_streams()

    def admits(self, request: GenerationRequest) -> bool:
        """Whether the request's caches fit beside those of the others. Raises EngineRefused or EngineBusy."""
        return self.loaded.admits(request)

    def insert(self, key: int, request: GenerationRequest) -> None:
        """Queue a request for prefill."""
        self.loaded.insert(key, request)

    def ready(self) -> bool:
        """Whether a step would do anything. It does, as long as there is a request."""
        return True

    def step(self) -> Iterator[tuple[int, Outcome]]:
        """Prefill one chunk, and generate one token for every reply."""
        return self.loaded.step()

    def remove(self, key: int) -> None:
        """Drop a cancelled request."""
        self.loaded.remove(key)

    def _on_wake(self) -> None:
        if self._loaded is not None:
            self._loaded.prefix_store.give_up_needed()

    @property
    def rate(self) -> float | None:
        """How many tokens a second are prefilled, as measured."""
        return self.loaded.prefill_queue.pacer.rate

    @rate.setter
    def rate(self, rate: float | None) -> None:
        self.loaded.prefill_queue.pacer.rate = rate


def _available_context(cache_budget: KVCacheBudget, context_length: int) -> int:
    return min(context_length, cache_budget.fitting_tokens())
