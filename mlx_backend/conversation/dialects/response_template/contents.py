"""What stands in a field of a response template: its content as a value (`content`), and its shape (`transform`).

The contents are those of transformers' `chat_parsing`: text, int, float, bool, json (also with bare keys and delimiters
of its own), xml-inline and kv-lines. Values that have no types stay texts here; a schema may know them. A content that
is not what it should be raises ValueError.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.argument_values import parse_json
from mlx_backend.conversation.dialects.calls.base import to_json
from mlx_backend.conversation.dialects.response_template.pattern_parser import parse_pattern
from mlx_backend.conversation.dialects.response_template.patterns import Blanks, ResponseTemplateError, Text
from mlx_backend.conversation.json_values import MAX_DEPTH

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_STRING_OR_KEY = re.compile(
    r'"(?:[^"\\]|\\.)*+"|(?<=[{,])(\s*+)([A-Za-z_][\w.-]{0,255}+)(?=\s{0,16}:)', re.DOTALL
)
_MAX_DELIMITERS = 16


class Untyped(str):
    """A value that was written as bare text: its schema gives it its type."""


class Content:
    """How the text of a field becomes a value."""

    is_json = False
    """Its text is JSON as it stands."""
    head = ".*"
    """A pattern of every beginning of such a text."""

    def decode(self, text: str) -> Any:
        """Return the value. Raises ValueError."""
        raise NotImplementedError

    def encode(self, value: Any) -> str:
        """Write a value."""
        raise NotImplementedError


class _Scalar(Content):
    def __init__(self, convert: Callable[[str], Any]) -> None:
        self._convert = convert

    def decode(self, text: str) -> Any:
        return self._convert(text)

    def encode(self, value: Any) -> str:
        return value if isinstance(value, str) else to_json(value)


class _Json(Content):
    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._has_bare_keys = arguments.get("unquoted_keys") is True
        self._may_be_text = arguments.get("allow_non_json") is True
        pairs = arguments.get("string_delims") or []
        if not isinstance(pairs, list) or len(pairs) > _MAX_DELIMITERS:
            raise ResponseTemplateError("string_delims is not a list of pairs of texts")
        self._delimiters: dict[str, str] = {}
        for pair in pairs:
            match pair:
                case [str(opening), str(closing)] if opening and closing:
                    self._delimiters[opening] = closing
                case _:
                    raise ResponseTemplateError("string_delims is not a list of pairs of texts")
        self._opening = re.compile("|".join(map(re.escape, self._delimiters)) or r"(?!)")
        self.head = ".*" if self._may_be_text else r"\s*(?:[{\[].*)?"
        self.is_json = not (self._has_bare_keys or self._delimiters or self._may_be_text)

    def decode(self, text: str) -> Any:
        try:
            return parse_json(self._as_json(text))
        except ValueError:
            if self._may_be_text:
                return text.strip()
            raise

    def _as_json(self, text: str) -> str:
        written: list[str] = []
        at = 0
        while opening := self._opening.search(text, at):
            written.append(self._with_keys(text[at : opening.start()]))
            closing = self._delimiters[opening[0]]
            end = text.find(closing, opening.end())
            if end < 0:
                raise ValueError("a text without its end")
            written.append(to_json(text[opening.end() : end]))
            at = end + len(closing)
        return "".join([*written, self._with_keys(text[at:])])

    def _with_keys(self, text: str) -> str:
        if not self._has_bare_keys:
            return text
        return _STRING_OR_KEY.sub(lambda found: f'{found[1]}"{found[2]}"' if found[2] else found[0], text)

    def encode(self, value: Any) -> str:
        match value:
            case str() if self._delimiters:
                opening, closing = next(iter(self._delimiters.items()))
                return f"{opening}{value}{closing}"
            case dict():
                items = (
                    f"{key if self._has_bare_keys else to_json(key)}:{self.encode(item)}"
                    for key, item in value.items()
                )
                return f"{{{','.join(items)}}}" if not self.is_json else to_json(value)
            case list() if not self.is_json:
                return f"[{','.join(map(self.encode, value))}]"
        return to_json(value)


class _Pairs(Content):
    """Keys with values: bare texts, or what `value_parser` makes of them."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        parser = arguments.get("value_parser")
        self.value: Content | None = None
        if parser is not None:
            if not isinstance(parser, dict):
                raise ResponseTemplateError("value_parser is not an object")
            self.value = content(parser.get("name", "text"), parser.get("args", {}))

    def _decoded(self, text: str) -> Any:
        if self.value is None or isinstance(self.value, _Scalar):
            return Untyped(text)
        return self.value.decode(text)

    def _encoded(self, value: Any) -> str:
        if self.value is not None:
            return self.value.encode(value)
        return value if isinstance(value, str) else to_json(value)


class _Tags(_Pairs):
    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__(arguments)
        source = arguments.get("tag_pattern")
        if not isinstance(source, str):
            raise ResponseTemplateError("xml-inline needs a tag_pattern")
        pattern = parse_pattern(source)
        parts = pattern.parts
        while parts and isinstance(parts[0], Blanks):
            parts = parts[1:]
        if not parts or not isinstance(parts[0], Text) or not all(parts[0].choices):
            raise ResponseTemplateError(f"the tag_pattern {source!r} does not begin with a text")
        if "key" not in pattern.names:
            raise ResponseTemplateError(f"the tag_pattern {source!r} captures no key")
        self._pattern = type(pattern)(parts)
        self._merges = arguments.get("merge_duplicates") is True

    def decode(self, text: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        merged: set[str] = set()
        for found in self._pattern.each(text):
            key = found.captures["key"].strip() if "key" in found.captures else ""
            if not key:
                continue
            value = self._decoded(found.captures.get("value", ""))
            if key not in values or not self._merges:
                values[key] = value
            elif key in merged:
                values[key].append(value)
            else:
                values[key] = [values[key], value]
                merged.add(key)
        return values

    def encode(self, value: Any) -> str:
        items = value.items() if isinstance(value, dict) else ()
        return "".join(
            self._pattern.written({"key": str(key), "value": self._encoded(item)}) for key, item in items
        )


class _Lines(_Pairs):
    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__(arguments)
        line, pair = arguments.get("line_sep", "\n"), arguments.get("kv_sep", ":")
        if not (isinstance(line, str) and line and isinstance(pair, str) and pair):
            raise ResponseTemplateError("line_sep and kv_sep must be texts")
        self._line, self._pair = line, pair

    def decode(self, text: str) -> dict[str, Any]:
        pairs = (line.partition(self._pair) for line in text.split(self._line) if self._pair in line)
        return {key.strip(): self._decoded(value.strip()) for key, _, value in pairs}

    def encode(self, value: Any) -> str:
        items = value.items() if isinstance(value, dict) else ()
        return self._line.join(f"{key}{self._pair} {self._encoded(item)}" for key, item in items)


def content(name: Any, arguments: Any) -> Content:
    """Return the content of a name. Raises ResponseTemplateError."""
    if not isinstance(arguments, dict):
        raise ResponseTemplateError("content_args is not an object")
    match name:
        case "text":
            return _Scalar(str.strip if arguments.get("strip", True) else str)
        case "int":
            return _Scalar(int)
        case "float":
            return _Scalar(float)
        case "bool":
            return _Scalar(lambda text: text.strip().lower() in ("true", "1"))
        case "json":
            return _Json(arguments)
        case "xml-inline":
            return _Tags(arguments)
        case "kv-lines":
            return _Lines(arguments)
    raise ResponseTemplateError(f"the content {json.dumps(name)[:80]} is not known")


def check_transform(transform: Any, names: set[str] | None, depth: int = 0) -> None:
    """Raise ResponseTemplateError for a transform that refers to what is not there; None: any name may be."""
    if depth > MAX_DEPTH:
        raise ResponseTemplateError("the transform is nested too deeply")
    match transform:
        case dict():
            for value in transform.values():
                check_transform(value, names, depth + 1)
        case list():
            for value in transform:
                check_transform(value, names, depth + 1)
        case str() if placeholder := _PLACEHOLDER.search(transform):
            if placeholder[0] != transform:
                raise ResponseTemplateError(f"the transform {transform[:80]!r} mixes a placeholder with text")
            if names is not None and placeholder[1].partition(".")[0] not in names:
                raise ResponseTemplateError(f"the transform has no {transform[:80]}")


def transformed(transform: Any, scope: Mapping[str, Any]) -> Any:
    """Fill a transform. Raises ValueError where a value is missing."""
    match transform:
        case dict():
            return {key: transformed(value, scope) for key, value in transform.items()}
        case list():
            return [transformed(value, scope) for value in transform]
        case str() if placeholder := _PLACEHOLDER.fullmatch(transform):
            value: Any = scope
            for key in placeholder[1].split("."):
                if not isinstance(value, dict) or key not in value:
                    raise ValueError(f"there is no {transform}")
                value = value[key]
            return value
    return transform
