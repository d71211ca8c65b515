"""The fields and parts of messages that mean more than text: reasoning, images, and media that no model is shown.

The names under which servers and clients send reasoning stand in the order of preference: the first that holds text
counts. An image part's form is the caller's: clients send `image_url` and `input_image`; inside the server it is
{"type": "image"} with the image's number. Knows nothing of what an image is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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


_MEDIA = re.compile(r"(?:input_)?(image|audio|video|file|document)(?:_url)?\Z")


def media_in_result(messages: Sequence[Any]) -> tuple[str, str] | None:
    """Return where the first medium in a tool's result is, and a sentence about it; None if there is none."""
    names: dict[str, Any] = {}
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            continue
        _note_calls(message, names)
        for at, part in enumerate(_items(message.get("content"))):
            where = f"messages[{index}].content[{at}]"
            if part.get("type") == "tool_result":
                inner = [_media(each) for each in _items(part.get("content"))]
                if found := next(filter(None, inner), None):
                    return where, _sentence(found, _tool(names.get(str(part.get("tool_use_id")))))
            elif (
                message.get("role") in ("tool", "function") and not is_image(part) and (found := _media(part))
            ):
                return where, _sentence(found, _answering(message, names))
    return None


def tool_of_result(messages: Sequence[Any], index: int) -> str:
    """Return whose result a message is, for a sentence: the tool's name if the messages say it."""
    names: dict[str, Any] = {}
    for message in messages[:index]:
        if isinstance(message, Mapping):
            _note_calls(message, names)
    return _answering(messages[index], names)


def _note_calls(message: Mapping[str, Any], names: dict[str, Any]) -> None:
    for call in _items(message.get("tool_calls")):
        function = call.get("function")
        names[str(call.get("id"))] = (function if isinstance(function, Mapping) else call).get("name")
    for part in _items(message.get("content")):
        if part.get("type") == "tool_use":
            names[str(part.get("id"))] = part.get("name")


def _answering(message: Mapping[str, Any], names: Mapping[str, Any]) -> str:
    return _tool(message.get("name") or names.get(str(message.get("tool_call_id"))))


def _tool(name: Any) -> str:
    return f"the tool {name!r}" if isinstance(name, str) and name else "a tool"


def _items(value: Any) -> Sequence[Mapping[str, Any]]:
    # Places in a list are named in errors: what is no object keeps its own.
    return [each if isinstance(each, Mapping) else {} for each in value] if isinstance(value, list) else []


def _media(part: Mapping[str, Any]) -> str | None:
    kind = part.get("type")
    found = _MEDIA.match(kind) if isinstance(kind, str) else None
    return found[1] if found else None


def _sentence(media: str, tool: str) -> str:
    what = {"image": "an image", "audio": "audio", "video": "a video"}.get(media, "a file")
    return (
        f"The result of {tool} holds {what}, and models can be shown results only as text. Have the tool return text, "
        "or leave this part out."
    )
