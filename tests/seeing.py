"""Requests with pictures to an engine whose tiny model sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mlx_backend.engine.base import Finished, GenerationRequest, TokenDelta
from mlx_backend.engine.images import PreparedImage, PromptImage
from mlx_backend.images import Picture

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vision_models import SeeingModel

    from mlx_backend.engine.threaded import Engine

REPLY = 10
TEXT = (20, 21, 22, 200, 201)


def noise(seed: int, width: int = 40, height: int = 20) -> Picture:
    return Picture(width, height, np.random.default_rng(seed).bytes(3 * width * height))


def plain(colour: Sequence[int], width: int = 40, height: int = 20) -> Picture:
    return Picture(width, height, bytes(colour) * (width * height))


@dataclass(frozen=True)
class Seeing:
    """A family's model, and an engine that it is loaded in."""

    model: SeeingModel
    engine: Engine

    def prepared(self, picture: Picture) -> PreparedImage:
        processor = self.engine.image_processor
        assert processor is not None
        return processor.prepare(picture)

    def request(
        self, *parts: Picture | Sequence[int], tokens: int = REPLY, **fields: Any
    ) -> GenerationRequest:
        """A prompt of pictures and token ids."""
        prompt: list[int] = []
        images = []
        for part in parts:
            if isinstance(part, Picture):
                prompt += self.model.before
                images.append(PromptImage(len(prompt), self.prepared(part)))
                prompt += images[-1].image.written.tokens
                prompt += self.model.behind
            else:
                prompt += part
        return GenerationRequest(prompt=prompt, images=images, max_tokens=tokens, **fields)

    def reply(self, request: GenerationRequest) -> list[int]:
        return [item.token for item in self.engine.generate(request) if isinstance(item, TokenDelta)]

    def cached(self, request: GenerationRequest) -> tuple[list[int], int]:
        """A reply, and how many tokens of the prompt were cached."""
        items = list(self.engine.generate(request))
        assert isinstance(items[-1], Finished)
        return [item.token for item in items if isinstance(item, TokenDelta)], items[-1].cached_tokens


LAYOUTS: dict[str, tuple[Any, ...]] = {
    "one image": ((2, 10, 11), noise(1), TEXT),
    "an image at the beginning": (noise(2), TEXT),
    "two images": ((2,), noise(3), (12,), noise(4, 64, 24), TEXT),
    "images side by side": ((2,), noise(5), noise(6, 16, 64), noise(5), TEXT),
    "an image at the end": ((2, 10, 11, 12), noise(7)),
    "an image after a long text": ([2, *range(100, 160)], noise(8, 33, 57), TEXT),
    "a long text after an image": ((2,), noise(9), [*range(100, 160)]),
}
