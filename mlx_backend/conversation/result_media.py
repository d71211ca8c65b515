"""Finds media in tool results that no model is shown. They are refused, with the tool's name in the error.

Images in messages of the role `tool` stay, since some models see. Other media, and images among the parts of
another message, would be megabytes of base64 in the prompt. Knows nothing else of messages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_backend.conversation.image_parts import is_image

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
