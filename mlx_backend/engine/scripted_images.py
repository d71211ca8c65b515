"""Images for an engine that replays transcripts: a processor that sees only how large an image is. Knows no MLX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_backend.engine.images import ImageMarkup, PreparedImage

if TYPE_CHECKING:
    from mlx_backend.engine.scripted import ScriptedTokenizer
    from mlx_backend.images.source import Picture

IMAGE_MARKERS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
"""What the tokenizer must have among its markers."""


@dataclass(frozen=True, slots=True)
class ScriptedImageProcessor:
    """Implements `ImageProcessor`: an image takes a token for every `side` by `side` pixels, begun ones included."""

    tokenizer: ScriptedTokenizer
    side: int = 28

    @property
    def pad_token(self) -> int:
        """The token of its pad marker."""
        return self.tokenizer.encode(IMAGE_MARKERS[1], control_tokens=True)[0]

    @property
    def markup(self) -> ImageMarkup:
        """Qwen's."""
        return ImageMarkup(part="".join(IMAGE_MARKERS), placeholder=IMAGE_MARKERS[1])

    def prepare(self, picture: Picture, beside: int = 0) -> PreparedImage:
        """Return the picture's size in tokens; its pixels are the only input."""
        return PreparedImage(
            picture.digest,
            -(-picture.height // self.side),
            -(-picture.width // self.side),
            {"rgb": memoryview(picture.rgb)},
        )
