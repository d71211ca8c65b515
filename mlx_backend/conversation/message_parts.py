"""The fields and parts of messages that mean more than text: reasoning and images.

The names under which servers and clients send reasoning stand in the order of preference: the first that holds text
counts. An image part's form is the caller's: clients send `image_url` and `input_image`; inside the server it is
{"type": "image"} with the image's number. Knows nothing of what an image is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REASONING_CONTENT = "reasoning_content"
"""The canonical name: histories are brought to it, and replies use it unless a setting says otherwise."""

MESSAGE_FIELDS = (REASONING_CONTENT, "reasoning", "thinking")
"""Fields of a message whose value is reasoning, as a text or something that holds one."""

DELTA_FIELDS = (*MESSAGE_FIELDS, "reasoning_text", "thinking_blocks", "reasoning_details")
"""Fields of a streamed delta."""

TEMPLATE_KEYS = ("thinking", REASONING_CONTENT, "reasoning")
"""Message keys from which chat templates render reasoning (gpt-oss's reads `thinking`)."""

PART_TYPES = ("thinking", "reasoning", "reasoning_text", "reasoning.text", "reasoning.summary")
"""Types of content parts that are reasoning."""

SEALED_PART_TYPES = ("redacted_thinking", "reasoning.encrypted")
"""Types of parts whose reasoning only their maker can read."""


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
    before, after = _parts(first), _parts(second)
    if before and after and "text" in before[-1] and "text" in after[0]:
        text = f"{before[-1]['text']}\n\n{after[0]['text']}"
        return [*before[:-1], {"type": "text", "text": text}, *after[1:]]
    return [*before, *after]


def _parts(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def hash_of(message: Mapping[str, Any]) -> int:
    """Return a hash of what a canonical message says, but for its reasoning."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return hash(repr((message["role"], message["content"], calls)))
