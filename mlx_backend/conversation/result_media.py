"""Pictures and other media in the results of tools: images become parts of the message, all else a short sentence.

Tools hand them on in many ways, and most agents write a result as text, in which a screenshot is 30,000 tokens of
base64. What is recognised, as a part of the content or anywhere in its text if that is JSON:

    {"type": "image", "data": …, "mimeType": …}                          MCP; also audio
    {"type": "resource", "resource": {"blob": …, "mimeType": …}}         MCP
    {"type": "image", "source": {"type": "base64", "media_type": …, "data": …}}    Anthropic
    {"type": "image_url", "image_url": {"url": …}}, input_image, input_audio, file  OpenAI
    "data:image/png;base64,…", and base64 that begins as a file of a known format does

    ─▶ {"type": "image_url", "image_url": {"url": "data:…"}} where it stood, or `[audio/wav, 120 kB, not shown: …]`

A result that is a list of such parts, or `{"content": [...]}`, becomes parts in their order. In other JSON `[image 1]`
stands in an image's place, and the images follow. Decodes no more than the first and the last bytes of a file.
"""

from __future__ import annotations

import base64
import binascii
import json
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mlx_backend.conversation.json_values import is_too_deep
from mlx_backend.conversation.message_parts import is_image

_FORMATS: Final = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif")
_MAGIC: Final = {
    "iVBORw0KGgo": "image/png",
    "/9j/": "image/jpeg",
    "R0lGOD": "image/gif",
    "UklGR": "image/webp",
    "JVBERi0": "application/pdf",
    "UEsDB": "application/zip",
    "H4sI": "application/gzip",
    "SUQz": "audio/mpeg",
    "T2dnUw": "audio/ogg",
    "GkXfo": "video/webm",
}
"""How base64 of known formats begins."""
_SIGNS: Final = (
    *_MAGIC,
    "base64",
    "imeType",
    "ime_type",
    "edia_type",
    "ediaType",
    '"blob"',
    "_audio",
    "_data",
)
"""A text without any of them holds no media."""
_ENDS: Final = {
    "image/png": b"IEND\xaeB`\x82",
    "image/jpeg": b"\xff\xd9",
    "image/jpg": b"\xff\xd9",
    "image/gif": b";",
}
_BASE64: Final = r"[A-Za-z0-9+/_-]"
_MIN_OPAQUE: Final = 20_000
"""Characters of base64 in one piece that no model can make anything of, whatever it is."""
_IN_TEXT: Final = re.compile(
    rf"data:(?P<mime>[\w.+-]{{1,60}}/[\w.+-]{{1,60}})(?:;[\w=.-]{{1,60}}){{0,4}};base64,(?P<data>{_BASE64}+={{0,2}})"
    rf"|(?<![A-Za-z0-9+/_-])(?P<bare>(?:(?:{'|'.join(map(re.escape, _MAGIC))}){_BASE64}{{500,}}"
    rf"|{_BASE64}{{{_MIN_OPAQUE},}})={{0,2}})"
)
_WHOLE: Final = re.compile(r"\s*[A-Za-z0-9+/_\r\n-]+={0,2}\s*")
_MIN_BARE: Final = 200
"""Characters of base64 that nothing but its beginning tells from text."""
_MIN_LINE: Final = 60
"""The fewest characters of a line of base64, except the last: those that break it into lines do so after 64 or 76."""
_MAX_VALUES: Final = 500_000
"""Of a JSON text that is read: lists and objects of so many values take some 100 MB."""
_MAX_NESTED: Final = 4
"""Levels of JSON texts within JSON texts."""
_KIND: Final = re.compile(r"(?:input_)?(image|audio|video|file|document)(?:_url)?\Z")
_TYPE_KEYS: Final = ("mimeType", "mime_type", "media_type", "mediaType")
_DATA_KEYS: Final = ("data", "blob", "base64", "file_data")
_OF_MEDIA: Final = frozenset(
    ("type", "resource", "source", "annotations", "_meta", "format", "encoding", *_TYPE_KEYS, *_DATA_KEYS)
)
"""Keys of a medium, with those of its kind. What stands under any other is text about it."""
_URL_SAFE: Final = str.maketrans("-_", "+/")
_ONLY: Final = "only text and images are"
_UNKNOWN: Final = "application/octet-stream"

type Part = dict[str, Any]


def with_media_as_parts(messages: Sequence[Any]) -> list[Any]:
    """Return messages whose results of tools hold media only as image parts. Changes nothing in place.

    Results that Anthropic's clients put into a user's message become messages of their own where they hold images.
    """
    changed: list[Any] = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not content or not isinstance(content, str | list | Mapping):
            changed.append(message)
        elif message.get("role") in ("tool", "function"):
            shown = result_content(content)
            changed.append(message if shown is content else {**message, "content": shown})
        elif message.get("role") == "user" and isinstance(content, list):
            changed += _without_results(message, content)
        else:
            changed.append(message)
    return changed


def _without_results(message: Mapping[str, Any], content: Sequence[Any]) -> list[Any]:
    results: list[Any] = []
    others: list[Any] = []
    is_changed = False
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "tool_result":
            others.append(part)
            continue
        shown = result_content(inner := part.get("content"))
        is_changed |= shown is not inner
        is_changed |= isinstance(shown, list) and any(map(is_image, shown))
        results.append({"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": shown})
    if not is_changed:
        return [message]
    return [*results, {**message, "content": others}] if others else results


def result_content(content: Any) -> Any:
    """Return a result's content: the same object if it holds no media, else as text, or as parts if it holds images."""
    match content:
        case str():
            pieces = _of_text(content, 0)
        case list() | tuple():
            pieces = [piece for part in content for piece in _of_part(part, 0)]
        case Mapping():
            pieces = _of_part(content, 0)
        case _:
            return content
    given = content if isinstance(content, list | tuple) else [content]
    if len(pieces) == len(given) and all(map(operator.is_, pieces, given)):
        return content
    parts = [{"type": "text", "text": piece} if isinstance(piece, str) else piece for piece in pieces]
    if any(map(is_image, parts)) or not all(isinstance(part, Mapping) and "text" in part for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def result_text(content: Any) -> str:
    """Return a result's content for whoever is shown no images."""
    shown = result_content(content)
    if isinstance(shown, str):
        return shown
    return "\n".join(text_of_part(without_image(part)) for part in shown)


def without_image(part: Any) -> Any:
    """Return a part; of an image, the text that a model which does not see reads in its place."""
    if not is_image(part):
        return part
    written = part.get("image_url")
    url = written.get("url") if isinstance(written, Mapping) else written
    return {"type": "text", "text": unseen_image(url if isinstance(url, str) else "")}


def unseen(media_type: str, nbytes: int, why: str) -> str:
    """Return what a model reads in place of a medium that it is not shown."""
    kind = media_type if re.fullmatch(r"[\w.+*-]{1,60}(?:/[\w.+*-]{1,60})?", media_type) else _UNKNOWN
    size = (
        f"{nbytes} bytes"
        if nbytes < 1000
        else f"{nbytes / 1e3:.0f} kB"
        if nbytes < 1e6
        else f"{nbytes / 1e6:.1f} MB"
    )
    return f"[{kind}, {size}, not shown: {why}]" if nbytes else f"[{kind}, not shown: {why}]"


def unseen_image(url: str) -> str:
    """Return what a model that does not see reads in place of an image."""
    header, comma, data = url.partition(",")
    is_data = url[:5].lower() == "data:" and comma
    media_type = header[5:].partition(";")[0] if is_data else "image"
    return unseen(media_type or "image", 3 * len(data) // 4 if is_data else 0, "this model does not see")


_WHY: Final = {
    "image": "this model does not see",
    "audio": "this model does not hear",
    "video": "this model does not watch videos",
}


def _of_part(part: Any, depth: int) -> list[Any]:
    """Return what a part of a content is to the model: itself, or texts and image parts."""
    if isinstance(part, str):
        return _of_text(part, depth)
    if not isinstance(part, Mapping):
        return [part]
    if is_too_deep(part):
        return [part]
    if (medium := _medium(part, is_stated=depth == 0)) is not None:
        return [medium]
    if isinstance(text := part.get("text"), str):
        pieces = _of_text(text, depth)
        return [part] if pieces == [text] else pieces
    images: list[Part] = []
    value = _without_media(part, images, depth)
    return [part] if value == part else [_json(value), *images]


def _of_text(text: str, depth: int) -> list[Any]:
    """Return what a text is to the model: itself, or texts and image parts."""
    if not any(sign in text for sign in _SIGNS) and not any(
        len(each) >= _MIN_OPAQUE for each in text.split('"')
    ):
        return [text]
    value = _parsed(text)
    if value is None:
        return _of_plain_text(text)
    if isinstance(value, dict) and (medium := _medium(value, is_stated=False)) is not None:
        return [medium]
    parts = value.get("content") if isinstance(value, dict) else value
    if isinstance(parts, list) and parts and all(map(_is_typed, parts)) and depth < _MAX_NESTED:
        pieces = [piece for part in parts for piece in _of_part(part, depth + 1)]
        if pieces == parts:
            return [text]
        return [
            piece if isinstance(piece, str) or is_image(piece) else text_of_part(piece) for piece in pieces
        ]
    images: list[Part] = []
    changed = _without_media(value, images, depth)
    return [text] if changed == value else [_json(changed), *images]


def _is_typed(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("type"), str)


def text_of_part(part: Mapping[str, Any]) -> str:
    """Return a part's text, or what it says as JSON."""
    text = part.get("text")
    return text if isinstance(text, str) else _json(part)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _parsed(text: str) -> Any:
    """Return what a JSON text holds; None for any other, and for one that would take too much memory."""
    if text.lstrip()[:1] not in ("{", "[") or sum(map(text.count, ",:[{")) > _MAX_VALUES:
        return None
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return None if is_too_deep(value) else value


def _of_plain_text(text: str) -> list[Any]:
    """Return a text that is no JSON in pieces: what stands between images, and these."""
    pieces: list[Any] = []
    texts: list[str] = []
    end = 0
    for match in _IN_TEXT.finditer(text):
        data = match["data"] or match["bare"]
        if (media_type := match["mime"] or _type_of(data)) is None:
            continue
        shown = _shown(media_type, data, is_stated=False)
        texts.append(text[end : match.start()])
        end = match.end()
        if isinstance(shown, str):
            texts.append(shown)
        else:
            pieces += ["".join(texts), shown]
            texts = []
    pieces.append("".join([*texts, text[end:]]))
    return [piece for piece in pieces if piece] if end else [text]


def _without_media(value: Any, images: list[Part], depth: int) -> Any:
    """Return a JSON value with texts in place of media; images are appended to `images`."""

    def stand_in(shown: Any) -> str:
        if isinstance(shown, str):
            return shown
        images.append(shown)
        return f"[image {len(images)}]"

    match value:
        case str() if len(value) >= _MIN_BARE:
            media_type = _type_of(value) if _WHOLE.fullmatch(value) else None
            if media_type is not None:
                return stand_in(_shown(media_type, value, is_stated=False))
            pieces = _of_text(value, depth + 1) if depth < _MAX_NESTED else [value]
            return " ".join(map(stand_in, pieces)) if pieces != [value] else value
        case Mapping():
            medium = _medium(value, is_stated=False)
            shown = {
                name: _without_media(each, images, depth)
                for name, each in value.items()
                if medium is None or not (name in _OF_MEDIA or _KIND.match(name))
            }
            if medium is None:
                return shown
            return {**shown, "data": stand_in(medium)} if shown else stand_in(medium)
        case list():
            return [_without_media(each, images, depth) for each in value]
    return value


def _medium(part: Mapping[str, Any], *, is_stated: bool) -> Any:
    """Return the image part or the text that an object is to the model; None if it is no medium.

    Only what `is_stated` as a part of the content may name an address.
    """
    kind = part.get("type")
    matched = _KIND.match(kind) if isinstance(kind, str) else None
    found = matched[1] if matched else ""
    if kind in ("image_url", "input_image"):
        written = part.get("image_url")
        url = written.get("url") if isinstance(written, Mapping) else written
        return part if is_stated or (isinstance(url, str) and url.startswith("data:")) else None
    if is_stated and is_image(part) and "image" in part:
        return part  # one that has its number already
    keys = ("resource", "source", kind if isinstance(kind, str) else "")
    holder = next((part[key] for key in keys if isinstance(part.get(key), Mapping)), part)
    data = next((holder[key] for key in _DATA_KEYS if isinstance(holder.get(key), str)), "")
    if holder.get("type") == "text":
        return data or None  # a document of Anthropic's
    if is_stated and found == "image" and isinstance(url := holder.get("url"), str):
        return {"type": "image_url", "image_url": {"url": url}}
    media_type = next(
        (each[key] for each in (holder, part) for key in _TYPE_KEYS if isinstance(each.get(key), str)), ""
    )
    if data.startswith("data:"):
        header, _, data = data.partition(",")
        media_type = header[5:].partition(";")[0]
    if not data or not _WHOLE.fullmatch(data):
        if is_stated and found and isinstance(text := data or holder.get("content"), str):
            return text
        is_bare = is_stated and found and "text" not in part
        return unseen(found, 0, _WHY.get(found, _ONLY)) if is_bare else None
    if not (found or kind == "resource" or media_type.startswith(("image/", "audio/", "video/"))):
        return None
    if media_type.startswith("text/"):
        text = _bytes("".join(data.split())).decode("utf-8", "replace")
        is_base64 = bool(text) and "\ufffd" not in text
        return text if is_base64 or len(data) >= _MIN_BARE else data
    if not (is_stated or media_type or _type_of(data) or len(data) >= _MIN_BARE):
        return None
    if not media_type and found in ("audio", "video") and isinstance(form := holder.get("format"), str):
        media_type = f"{found}/{form}"
    if media_type.lower() not in _FORMATS:
        media_type = _type_of(data) or media_type
    return _shown(media_type or found or _UNKNOWN, data)


def _shown(media_type: str, data: str, *, is_stated: bool = True) -> Any:
    """Return an image part, or the text in place of any other medium, and of an image that was cut in a text."""
    media_type = media_type.lower()
    kind = media_type.partition("/")[0]
    why = _WHY.get(kind, _ONLY)
    if media_type in _FORMATS:
        if is_stated or _is_whole(media_type, data):
            return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{data}"}}
        why = "a part of it is missing"
    elif kind == "image":
        why = "its format is none of PNG, JPEG, WebP and GIF"
    return unseen(media_type, 3 * len(data) // 4, why)


def _type_of(data: str) -> str | None:
    """Return the media type of base64 by how it begins; of much that begins in no known way, that it is not known."""
    found = next((media_type for begin, media_type in _MAGIC.items() if data.startswith(begin)), None)
    if found == "image/webp":  # or another RIFF
        found = {b"WEBP": found, b"WAVE": "audio/wav"}.get(_bytes(data[:24])[8:12])
    if (
        found is None
        and len(data) >= _MIN_OPAQUE
        and all(len(line) >= _MIN_LINE for line in data.split()[:-1])
        and all(re.search(each, data[:400]) for each in ("[a-z]", "[A-Z]", "[0-9]"))
    ):
        return _UNKNOWN
    return found


def _is_whole(media_type: str, data: str) -> bool:
    """Whether an image's file ends as its format does."""
    body = "".join(data.split()).rstrip("=")
    tail = _bytes(body[max(0, len(body) - 64) // 4 * 4 :])
    return tail.rstrip(b"\0\r\n").endswith(_ENDS.get(media_type, b""))


def _bytes(data: str) -> bytes:
    try:
        return base64.b64decode(data.translate(_URL_SAFE) + "=" * (-len(data) % 4))
    except binascii.Error:
        return b""
