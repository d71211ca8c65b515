"""Where an image may stand in a body, in all APIs; anywhere else the same characters are a text.

messages, input     in a part `image_url`, `input_image` or `image` of a content, also within a document
                    in the result of a tool, anywhere: tools hand images on in many ways, also in JSON as a text
                    in `images`, the list of Ollama's
images              of Ollama's /api/generate
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

MIN_IMAGE: Final = 1000
"""Characters of base64. Many small values take a hundred times their bytes, whatever they begin with."""
IMAGE: Final = (
    r"(?:(?i:data:image)\\?/[\w.+-]{1,60}(?:;[\w.=-]{1,60}){0,4};base64,|(?=iVBORw|\\?/9j|R0lGOD|UklGR))"
    rf"[A-Za-z0-9+/=%\\_\s-]{{{MIN_IMAGE},}}"
)
"""A data URI, or the base64 in which tools hand on images: it begins as a PNG, a JPEG, a GIF or a WebP does.

PHP's encoder puts a backslash before a slash; line breaks may be escaped.
"""
_IMAGE: Final = re.compile(rf'(?:\A|"){IMAGE}')
_IMAGE_PARTS: Final = ("image_url", "input_image", "image")
_RESULT_ROLES: Final = ("tool", "function")


def misplaced_characters(body: Any) -> int:
    """Return how many characters of a decoded body are images where none may stand."""
    return _count(_texts(body)) - _count(_placed(body))


def _count(texts: Iterator[str]) -> int:
    return sum(match.end() - match.start() for text in texts for match in _IMAGE.finditer(text))


def _placed(body: Any) -> Iterator[str]:
    """Yield the texts that may hold images."""
    if not isinstance(body, Mapping):
        return
    yield from _texts(body.get("images"))
    for message in (each for name in ("messages", "input") for each in _listed(body.get(name))):
        if not isinstance(message, Mapping):
            continue
        yield from _texts(message.get("images"))
        if message.get("role") in _RESULT_ROLES:
            yield from _texts(message.get("content"))
        elif str(message.get("type")).endswith("_output"):
            yield from _texts(message.get("output"))
        else:
            yield from _in_parts(message.get("content"))


def _in_parts(content: Any) -> Iterator[str]:
    for part in _listed(content):
        match part:
            case {"type": "tool_result", "content": result}:
                yield from _texts(result)
            case {"type": "document", "source": {"content": inner}}:
                yield from _in_parts(inner)
            case {"type": kind} if kind in _IMAGE_PARTS:
                yield from _texts([part.get("image_url"), part.get("source")])


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case list():
            for each in value:
                yield from _texts(each)
        case Mapping():
            for each in (*value, *value.values()):
                yield from _texts(each)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
