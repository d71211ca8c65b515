"""The image parts of chat messages, in the forms that OpenAI's clients send: each becomes one part of ours.

    {"type": "image_url", "image_url": {"url": …, "detail": …}}     Chat Completions; also with the URL as the value
    {"type": "input_image", "image_url": …, "detail": …}            the Responses API's form, which some send here too
    ─▶ {"type": "image", "image": 3}, and the fourth `ImageSource`

From here on a part is a number, and nobody else handles megabytes of base64. Fetches and decodes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mlx_backend.api.errors import refuse
from mlx_backend.conversation.json_values import excerpt, json_type
from mlx_backend.images.source import Detail, ImageSource

if TYPE_CHECKING:
    from collections.abc import Sequence

PART_TYPES = ("image_url", "input_image")

_ROLES = ("user", "tool", "function")
"""Whose messages may hold images: models were trained to see those of users and of tools."""
IMAGE_FORM = 'Write it as {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}.'


def take_images(messages: Sequence[Any]) -> tuple[list[Any], list[ImageSource]]:
    """Return the messages with a number for each image, and the images. Changes nothing in place. Raises ApiError."""
    sources: list[ImageSource] = []
    taken: list[Any] = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list) or not any(map(_is_image, content)):
            taken.append(message)
            continue
        if (role := message.get("role")) not in _ROLES:
            at = next(at for at, part in enumerate(content) if _is_image(part))
            raise refuse(
                f"An image stands in a message of the role {excerpt(role)}: only users' messages and tools' results "
                "can show one.",
                f"messages[{index}].content[{at}]",
                "unsupported_content",
            )
        parts: list[Any] = []
        for at, part in enumerate(content):
            if _is_image(part):
                sources.append(_source(part, f"messages[{index}].content[{at}]"))
                part = {"type": "image", "image": len(sources) - 1}
            parts.append(part)
        taken.append({**message, "content": parts})
    return taken, sources


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in PART_TYPES


def _source(part: Mapping[str, Any], where: str) -> ImageSource:
    written = part.get("image_url")
    url, detail = (
        (written.get("url"), written.get("detail"))
        if isinstance(written, Mapping)
        else (written, part.get("detail"))
    )
    if not isinstance(url, str) or not url:
        found = "is empty" if url == "" else "is missing" if url is None else f"is {json_type(url)}"
        raise refuse(f"The address of an image {found}. {IMAGE_FORM}", f"{where}.image_url", "invalid_image")
    try:
        wanted = Detail.AUTO if detail is None else Detail(detail)
    except ValueError:
        raise refuse(
            f"An image's detail is {excerpt(detail)}: send low, high or auto.",
            f"{where}.image_url.detail" if isinstance(written, Mapping) else f"{where}.detail",
        ) from None
    return ImageSource(where=where, url=url, detail=wanted)
