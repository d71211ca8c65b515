"""A message's content in OpenAI's parts: text, images, documents, audio and video, in Dify's order.

Images become `image_url`, by address or as a data URI, as Dify gives them. A plain-text document becomes its text,
which every model reads; other documents become `file`. What the form, or the server, says that a model does not take is
refused here, in words for the user; of a model that was never described only its server knows. An image of an earlier
turn is not refused but named, so that a conversation can go on with a model that cannot see.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from dify_plugin.entities.model.message import (
    AudioPromptMessageContent,
    DocumentPromptMessageContent,
    ImagePromptMessageContent,
    MultiModalPromptMessageContent,
    TextPromptMessageContent,
    ToolPromptMessage,
    VideoPromptMessageContent,
)

from mlx_backend.conversation.message_parts import UNSEEN
from mlx_backend.conversation.result_media import result_content, unseen, without_image

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dify_plugin.entities.model.message import PromptMessage, PromptMessageContentUnionTypes

    from dify_mlx_provider.servers.base import ServedModel
    from dify_mlx_provider.upstream.credentials import Credentials

_PLAIN_TYPES = ("json", "xml", "yaml", "x-yaml", "csv", "markdown", "javascript", "x-sh", "toml", "sql")
_PLAIN_FORMATS = (
    *("txt", "md", "markdown", "mdx", "csv", "tsv", "json", "jsonl", "xml", "yaml", "yml", "html"),
    "log",
)


# What a model does with each type of content: the capability, what it cannot do, what the user calls it, the remedy.
_MEDIA = {
    "image": ("vision", "see images", "image", "choose a model with vision"),
    "audio": ("audio", "hear audio", "audio file", "choose a model that can"),
    "video": ("video", "watch videos", "video", "choose a model that can"),
    "document": ("document", "open documents of this kind", "document", "send its text"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedMedia:
    """Which types of content a model takes. `refused` are those known not to be taken, as Dify calls them."""

    model_label: str
    refused: frozenset[str] = frozenset()
    shows_results: bool = False
    """Whether the model is known to see, and so is shown images that tools return."""

    @classmethod
    def of(cls, model: str, credentials: Credentials, described: ServedModel | None) -> Self:
        """Return what a model takes, by its form and else by what its server says of it."""
        capabilities = described.capabilities if described is not None else None
        refused = {
            content_type
            for content_type, (capability, *_) in _MEDIA.items()
            if capabilities is not None and capability not in capabilities
        }
        if credentials.vision is not None:
            refused = refused - {"image"} if credentials.vision else refused | {"image"}
        sees = (
            capabilities is not None and "vision" in capabilities
            if credentials.vision is None
            else credentials.vision
        )
        own_name = described.name if described is not None and model == "default" else model
        return cls(
            model_label=credentials.display_name or own_name, refused=frozenset(refused), shows_results=sees
        )

    def hides(self, content_type: str, *, is_earlier: bool) -> bool:
        """Whether the model reads that there was such content, in place of it."""
        return is_earlier and content_type == "image" and content_type in self.refused

    def check(self, content_type: str, *, is_earlier: bool) -> None:
        """Raise ValueError for content that the model does not take; `is_earlier`: not in the last user message."""
        if content_type not in self.refused:
            return
        _, cannot, what, remedy = _MEDIA[content_type]
        article = "an" if what[0] in "aeiou" else "a"
        if is_earlier:
            raise ValueError(
                f"the model {self.model_label} cannot {cannot}, and an earlier message of this conversation has "
                f"{article} {what}. Start a new conversation, or {remedy}."
            )
        raise ValueError(f"the model {self.model_label} cannot {cannot}. Remove the {what}, or {remedy}.")


def message_content(
    message: PromptMessage, media: AcceptedMedia, *, is_earlier: bool = False
) -> str | list[dict[str, Any]]:
    """Return a message's content, a text or parts. Raises ValueError with a sentence for the user."""
    if isinstance(message, ToolPromptMessage):
        return _result(message.content or "", media)
    if not isinstance(message.content, list):
        return message.content or ""
    parts: list[dict[str, Any]] = []
    for part in message.content:
        if media.hides(part.type.value, is_earlier=is_earlier):
            parts.append({"type": "text", "text": UNSEEN})
            continue
        if not (isinstance(part, DocumentPromptMessageContent) and _is_plain(part)):
            media.check(part.type.value, is_earlier=is_earlier)
        parts.append(_part(part))
    return parts


def _result(
    content: str | list[PromptMessageContentUnionTypes], media: AcceptedMedia
) -> str | list[dict[str, Any]]:
    """Return a tool's result, with a sentence for what the model is not shown: the user did not send it."""
    given = content if isinstance(content, str) else [_part_of_result(part) for part in content]
    shown: str | list[dict[str, Any]] = result_content(given)
    if isinstance(shown, list) and not media.shows_results:
        shown = list(map(without_image, shown))
    return shown


def _part_of_result(part: Any) -> dict[str, Any]:
    try:
        return _part(part)
    except ValueError:  # there is only its address, or it is no text
        return {
            "type": "text",
            "text": unseen(part.mime_type or part.type.value, 0, "only text and images are"),
        }


def document_texts(messages: Sequence[PromptMessage]) -> list[tuple[str, str]]:
    """Return the names of the plain-text documents, each with the text that `message_content` makes of it."""
    return [
        (_name(part), _document(part)["text"])
        for message in messages
        if isinstance(message.content, list)
        for part in message.content
        if isinstance(part, DocumentPromptMessageContent) and _is_plain(part)
    ]


def _part(part: Any) -> dict[str, Any]:
    match part:
        case TextPromptMessageContent():
            return {"type": "text", "text": part.data}
        case ImagePromptMessageContent():
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
                f"the message has a part of type {part.type.value}, which cannot be sent. Remove it."
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
