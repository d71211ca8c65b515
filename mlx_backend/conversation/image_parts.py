"""The image parts of messages: which they are, and what stands for one where it cannot be seen.

Their form is the caller's: clients send `image_url` and `input_image`; inside the server a part is {"type": "image"}
with the image's number. Knows nothing of what an image is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

IMAGE_TYPES = ("image_url", "input_image", "image")
UNSEEN = "[image]"
"""What a model reads in place of an image that it is not shown."""


def is_image(part: Any) -> bool:
    """Whether a part of a content is an image."""
    return isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES


def has_images(content: Any) -> bool:
    """Whether a message's content holds an image."""
    return isinstance(content, list) and any(map(is_image, content))


def joined(first: Any, second: Any) -> Any:
    """Join two contents with an empty line between their texts: two texts to one, else to a list of parts."""
    if isinstance(first, str) and isinstance(second, str):
        return "\n\n".join(filter(None, (first, second)))
    before, behind = _parts(first), _parts(second)
    if before and behind and "text" in before[-1] and "text" in behind[0]:
        text = f"{before[-1]['text']}\n\n{behind[0]['text']}"
        return [*before[:-1], {"type": "text", "text": text}, *behind[1:]]
    return [*before, *behind]


def _parts(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []
