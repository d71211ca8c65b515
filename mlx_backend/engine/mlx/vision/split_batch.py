"""A model whose texts run in the batch, and its pictures, if the batch cannot see them, on mlx-vlm's own network.

The two share the weights. Where even that is not possible the model answers text only, and the log says why.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from mlx_backend.engine.batch import Ended
from mlx_backend.engine.images import ImageSupport
from mlx_backend.engine.mlx.vision.families import lacking_options
from mlx_backend.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mlx_backend.engine.base import GenerationRequest
    from mlx_backend.engine.batch import Batch, ModelInfo, Outcome
    from mlx_backend.engine.mlx.batch import MLXBatch
    from mlx_backend.engine.mlx.vision.vlm_batch import VLMBatch
    from mlx_backend.models.engine_options import EngineOptions

log = logging.getLogger(__name__)

PICTURES_ONE_AT_A_TIME = (
    "replies about pictures run on mlx-vlm's own network, which holds one request's positions"
)
"""What is not decoded together with others."""


class SplitBatch:
    """Implements the scheduler's `Batch` with two: `text`, and `pictures` for what that cannot be shown."""

    def __init__(self, text: MLXBatch, pictures: VLMBatch, options: EngineOptions) -> None:
        self._text = text
        self._pictures = pictures
        self._options = options
        self._running: dict[int, Batch] = {}
        self._is_split = False

    def load(self, on_progress: Callable[[float], None]) -> ModelInfo:
        """Load the model; a second network only if the batch could not be shown pictures."""
        info = self._text.load(on_progress)
        model = self._text.runtime.networks.model
        self._is_split = False
        if info.image_support is not ImageSupport.NOT_HERE:
            return info
        if lacking := lacking_options(self._options):
            log.warning(
                "%s answers text only: mlx-vlm's network, which can be shown images, does not support %s.",
                *(model.name, ", ".join(lacking)),
            )
            return info
        self._pictures.text = model
        try:
            found = self._pictures.load(on_progress)
        except EngineError as error:
            self._pictures.unload()
            log.warning("%s answers text only: %s", model.name, error)
            return info
        self._is_split = True

        def set_waker(wake: Callable[[], None]) -> None:
            info.set_waker(wake)
            found.set_waker(wake)

        return replace(
            info,
            set_waker=set_waker,
            image_processor=found.image_processor,
            image_support=found.image_support,
            unbatched="; ".join(filter(None, (info.unbatched, PICTURES_ONE_AT_A_TIME))),
            has_to_wait=self._has_to_wait,
        )

    def unload(self) -> None:
        """Give the memory back, also after a failed load."""
        self._running.clear()
        self._pictures.unload()
        self._text.unload()

    def close(self) -> None:
        """Clean up this thread's MLX streams."""
        self._text.close()

    def admits(self, request: GenerationRequest) -> bool:
        """Whether there is room for a request where it would run."""
        return self._of(request).admits(request)

    def insert(self, key: int, request: GenerationRequest) -> None:
        """Begin a reply."""
        batch = self._of(request)
        batch.insert(key, request)
        self._running[key] = batch

    def remove(self, key: int) -> None:
        """Drop a reply, which was cancelled."""
        self._running.pop(key).remove(key)

    def step(self) -> Iterator[tuple[int, Outcome]]:
        """Advance the replies of both."""
        for batch in {id(each): each for each in self._running.values()}.values():
            for key, outcome in batch.step():
                if isinstance(outcome, Ended | EngineError):
                    del self._running[key]
                yield key, outcome

    def _has_to_wait(self, request: GenerationRequest) -> bool:
        batch = self._of(request)
        return batch is self._pictures and batch in self._running.values()

    def _of(self, request: GenerationRequest) -> Batch:
        return self._pictures if self._is_split and request.images else self._text
