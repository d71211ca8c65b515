"""Calls as a name, and pairs of a key and a value.

    f<arg_key>a</arg_key><arg_value>1</arg_value>                      GLM 4.5 to 5, Laguna, Ling 3; line breaks or not
    f<tool_sep><arg_key>a</arg_key><arg_value>1</arg_value>            Hunyuan 3; its tags may have a suffix
    f<longcat_arg_key>a</longcat_arg_key><longcat_arg_value>…          LongCat
    f<ifm|arg_key>a</ifm|arg_key><ifm|arg_type>…<ifm|arg_value>…       K2-Horizon

Texts stand as they are and other values as JSON; where the schema does not tell, what is JSON and no text is JSON.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.argument_values import convert, parse_json, property_schema
from mlx_backend.conversation.dialects.base import Piece
from mlx_backend.conversation.dialects.calls.base import CallSyntax, DecodedCall, to_json
from mlx_backend.conversation.dialects.calls.json_object import JsonObjects

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_backend.conversation.tools import ToolSet

_TAG = re.compile(
    r"<(?P<close>/?)(?:longcat_|ifm\|)?(?P<kind>arg_key|arg_value|arg_type|tool_sep)(?::[\w-]{1,32})?>"
)
_NAME = re.compile(r"[\w.:/-]{1,256}\Z")
_WHOLE = re.compile(r"</[^<>]{0,64}arg_value[^<>]{0,32}>\s*\Z|\A[^<]{1,512}\Z")
_OBJECTS = JsonObjects()


class PairCalls(CallSyntax):
    """`prefix`, `suffix` and `separator` are how it is written; every spelling is read.

    `lines`: each tag has its own line.
    """

    reserved = r"</?(?:longcat_|ifm\|)?arg_(?:key|value)[:>]"

    def __init__(
        self, *, prefix: str = "", separator: str = "", suffix: str = "", lines: bool = False
    ) -> None:
        self.head = re.compile(r"\s*(?:[\w.:/-]{1,128}\s*(?:[<{\[].*)?|[<{\[].*)?", re.DOTALL)
        self._prefix, self._separator, self._suffix = prefix, separator, suffix
        self._break = "\n" if lines else ""

    def encode(self, name: str, arguments: Mapping[str, Any]) -> tuple[Piece, ...]:
        """Write a call."""
        pieces = [Piece(name)]
        if self._separator:
            pieces.append(Piece(self._separator, marker=True))
        if self._break:
            pieces.append(Piece(self._break))
        for key, value in arguments.items():
            for word, text in (
                ("arg_key", key),
                ("arg_value", value if isinstance(value, str) else to_json(value)),
            ):
                pieces += [
                    Piece(f"<{self._prefix}{word}{self._suffix}>", marker=True),
                    Piece(text),
                    Piece(f"</{self._prefix}{word}{self._suffix}>", marker=True),
                ]
                if self._break:
                    pieces.append(Piece(self._break))
        return tuple(piece for piece in pieces if piece.text)

    def is_open(self, body: str) -> bool:
        """Whether a key or a value is open."""
        tags = [*_TAG.finditer(body)]
        return bool(tags) and not tags[-1]["close"] and tags[-1]["kind"] != "tool_sep"

    def is_whole(self, body: str) -> bool:
        """Whether no value is open."""
        return _WHOLE.search(body[-600:]) is not None

    def decode(self, body: str, tools: ToolSet) -> list[DecodedCall]:
        """Return the call, with the values that its schema says."""
        first = _TAG.search(body)
        if first is None:
            return self._without_pairs(body, tools)
        name = body[: first.start()].strip()
        if not name or "\n" in name or len(name) > 256:
            return []
        parameters = tools.parameters(tools.offered_name(name))
        arguments = {
            key: convert(text, property_schema(parameters, key), parameters, untyped="json")
            for key, text in _pairs(body).items()
        }
        return [DecodedCall(name, to_json(arguments))]

    def _without_pairs(self, body: str, tools: ToolSet) -> list[DecodedCall]:
        """Read a name alone, a name with JSON after it, or JSON objects."""
        text = body.strip()
        if text[:1] in ("{", "["):
            return _OBJECTS.decode(text, tools)
        name, brace, rest = text.partition("{")
        name = name.strip()
        if not _NAME.match(name) or (
            not brace and tools.names and tools.offered_name(name) not in tools.names
        ):
            return []
        try:
            arguments = parse_json(brace + rest) if brace else {}
        except ValueError:
            return []
        return [DecodedCall(name, to_json(arguments))] if isinstance(arguments, dict) else []


def _pairs(body: str) -> dict[str, str]:
    """Return the text of each key. A value ends at its closing tag, or where the next key begins."""
    pairs: dict[str, str] = {}
    key, opened, at = "", "", 0
    tags = [*_TAG.finditer(body)]
    for tag, following in zip(tags, [*tags[1:], None], strict=True):
        kind, closes = tag["kind"], bool(tag["close"])
        if opened == "arg_value" and (kind, closes) != ("arg_value", True):
            is_key = following is not None and following["kind"] == "arg_key" and bool(following["close"])
            if (kind, closes) != ("arg_key", False) or not is_key:
                continue
        text = body[at : tag.start()]
        if opened == "arg_key":
            key = text.strip()
        elif key and (opened == "arg_value" or (text.strip() and opened != "arg_type")):
            pairs[key] = text
            key = ""
        opened = kind if not closes and kind != "tool_sep" else ""
        at = tag.end()
    if key and (opened == "arg_value" or (body[at:].strip() and "<" not in body[at:])):
        pairs[key] = body[at:]
    return pairs
