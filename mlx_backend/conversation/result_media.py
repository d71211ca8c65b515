"""Finds images and other media in tool results. They are refused, with the tool's name in the error.

Models are given results as text only, and these would be megabytes of base64 in the prompt. Knows nothing else of
messages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_MEDIA = re.compile(r"(?:input_)?(image|audio|video|file|document)(?:_url)?\Z")


def media_in_result(messages: Sequence[Any]) -> tuple[str, str] | None:
    """Return where the first medium in a tool's result is, and a sentence about it; None if there is none."""
    names: dict[Any, Any] = {}
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            continue
        for call in _items(message.get("tool_calls")):
            function = call.get("function")
            names[str(call.get("id"))] = (function if isinstance(function, Mapping) else call).get("name")
        for at, part in enumerate(_items(message.get("content"))):
            where = f"messages[{index}].content[{at}]"
            if part.get("type") == "tool_use":
                names[str(part.get("id"))] = part.get("name")
            elif part.get("type") == "tool_result":
                inner = [_media(each) for each in _items(part.get("content"))]
                if found := next(filter(None, inner), None):
                    return where, _sentence(found, names.get(str(part.get("tool_use_id"))))
            elif message.get("role") in ("tool", "function") and (found := _media(part)):
                return where, _sentence(
                    found, message.get("name") or names.get(str(message.get("tool_call_id")))
                )
    return None


def _items(value: Any) -> Sequence[Mapping[str, Any]]:
    # Places in a list are named in errors: what is no object keeps its own.
    return [each if isinstance(each, Mapping) else {} for each in value] if isinstance(value, list) else []


def _media(part: Mapping[str, Any]) -> str | None:
    kind = part.get("type")
    found = _MEDIA.match(kind) if isinstance(kind, str) else None
    return found[1] if found else None


def _sentence(media: str, name: Any) -> str:
    what = {"image": "an image", "audio": "audio", "video": "a video"}.get(media, "a file")
    tool = f"the tool {name!r}" if isinstance(name, str) and name else "a tool"
    return (
        f"The result of {tool} holds {what}, and models can be shown results only as text. Have the tool return text, "
        "or leave this part out."
    )
