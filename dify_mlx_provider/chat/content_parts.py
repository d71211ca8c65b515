"""A message's content in OpenAI's parts: text, images, documents, audio and video, in Dify's order.

Images become `image_url`, by address or as a data URI, as Dify gives them. A plain-text document becomes its text,
which every model reads; other documents become `file`. Only the server knows which of them a model accepts, and refuses
the rest in its own words; images are refused here if the form says that the model takes none.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any

from dify_plugin.entities.model.message import (
    AudioPromptMessageContent,
    DocumentPromptMessageContent,
    ImagePromptMessageContent,
    MultiModalPromptMessageContent,
    TextPromptMessageContent,
    VideoPromptMessageContent,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dify_plugin.entities.model.message import PromptMessage

_PLAIN_TYPES = ("json", "xml", "yaml", "x-yaml", "csv", "markdown", "javascript", "x-sh", "toml", "sql")
_PLAIN_FORMATS = (
    "txt",
    "md",
    "markdown",
    "mdx",
    "csv",
    "tsv",
    "json",
    "jsonl",
    "xml",
    "yaml",
    "yml",
    "html",
    "log",
)


def message_content(message: PromptMessage, *, accepts_images: bool = True) -> str | list[dict[str, Any]]:
    """Return a message's content, a text or parts. Raises ValueError with a sentence for the user."""
    if not isinstance(message.content, list):
        return message.content or ""
    return [_part(part, accepts_images=accepts_images) for part in message.content]


def document_texts(messages: Sequence[PromptMessage]) -> list[tuple[str, str]]:
    """Return the names of the plain-text documents, each with the text that `message_content` makes of it."""
    return [
        (_name(part), _document(part)["text"])
        for message in messages
        if isinstance(message.content, list)
        for part in message.content
        if isinstance(part, DocumentPromptMessageContent) and _is_plain(part)
    ]


def _part(part: Any, *, accepts_images: bool) -> dict[str, Any]:
    match part:
        case TextPromptMessageContent():
            return {"type": "text", "text": part.data}
        case ImagePromptMessageContent() if accepts_images:
            return {"type": "image_url", "image_url": {"url": part.data, "detail": part.detail.value}}
        case DocumentPromptMessageContent():
            return _document(part)
        case AudioPromptMessageContent():
            kind = part.format.lower().removeprefix(".") or part.mime_type.rpartition("/")[2]
            return {"type": "input_audio", "input_audio": {"data": _encoded(part), "format": kind}}
        case VideoPromptMessageContent():
            return {"type": "video_url", "video_url": {"url": part.data}}
        case _:
            raise ValueError(
                f"this model reads text only, and the message holds a file of type {part.type.value}. Remove it, or "
                "choose a model that accepts it."
            )


def _document(part: DocumentPromptMessageContent) -> dict[str, Any]:
    name = _name(part)
    encoded = _encoded(part)
    if not _is_plain(part):
        data = f"data:{part.mime_type};base64,{encoded}"
        return {"type": "file", "file": {"filename": name, "file_data": data}}
    return {"type": "text", "text": f"{name}:\n\n{_decoded(name, encoded)}"}


def _name(part: DocumentPromptMessageContent) -> str:
    return part.filename or f"document.{part.format or 'bin'}"


def _is_plain(part: DocumentPromptMessageContent) -> bool:
    kind, _, subtype = part.mime_type.lower().partition(";")[0].partition("/")
    subtype = subtype.strip().rpartition("+")[2]
    return (
        kind == "text"
        or (kind == "application" and subtype in _PLAIN_TYPES)
        or part.format.lower().removeprefix(".") in _PLAIN_FORMATS
    )


def _encoded(part: MultiModalPromptMessageContent) -> str:
    if part.base64_data:
        return part.base64_data
    raise ValueError(
        f"Dify gave only an address of the file {part.filename or part.format!r}, and files are not fetched from "
        "addresses. Set MULTIMODAL_SEND_FORMAT=base64 in Dify's environment."
    )


def _decoded(name: str, encoded: str) -> str:
    try:
        data = base64.b64decode(encoded, validate=True)
        is_utf_16 = data.startswith((b"\xff\xfe", b"\xfe\xff"))
        return data.decode("utf-16" if is_utf_16 else "utf-8-sig")
    except (binascii.Error, UnicodeDecodeError) as error:
        raise ValueError(
            f"the document {name!r} is not text in UTF-8. Save it as UTF-8 and send it again."
        ) from error
