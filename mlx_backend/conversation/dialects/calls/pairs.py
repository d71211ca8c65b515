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
from mlx_backend.conversation.dialects.calls.base import DecodedCall, to_json
from mlx_backend.conversation.dialects.calls.stream import CallStream, OpenValue, StreamedSyntax

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mlx_backend.conversation.dialects.calls.stream import NextTag, Reading
    from mlx_backend.conversation.tools import ToolSet

_TAG = re.compile(
    r"<(?P<close>/?)(?:longcat_|ifm\|)?(?P<kind>arg_key|arg_value|arg_type|tool_sep)(?::[\w-]{1,32})?>"
)
# What may become one.
_BEGUN = re.compile(r"</?[a-z_|]{0,17}(?::[\w-]{0,32})?\Z")
_NAME = re.compile(r"[\w.:/-]{1,256}\Z")
_WHOLE = re.compile(r"</[^<>]{0,64}arg_value[^<>]{0,32}>\s*\Z|\A[^<]{1,512}\Z")


class PairCalls(StreamedSyntax):
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

    def reader(self, tools: ToolSet) -> CallStream:
        return _PairStream(tools)

    def decode_other(self, body: str, tools: ToolSet) -> Sequence[DecodedCall]:
        """Read a name alone, a name with JSON after it, or JSON objects."""
        text = body.strip()
        if text[:1] in ("{", "["):
            return super().decode_other(text, tools)
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


class _PairStream(CallStream):
    """Reads a name, keys and values. A value ends at its closing tag, or where the next key begins."""

    tag, begun_tag = _TAG, _BEGUN

    __slots__ = ()

    def read(self) -> Reading:
        before: list[str] = []
        tag = yield from self.next_tag(before.append)
        name, key = "".join(before).strip(), ""
        if tag and tag["kind"] == "arg_key" and tag["close"]:  # the tag before the first key is missing
            offered = max((each for each in self.tools.names if name.startswith(each)), key=len, default=name)
            name, key = offered, name.removeprefix(offered).strip()
        if tag is None or not name or "\n" in name or len(name) > 256:
            return
        self.begin_call(name)
        while tag is not None:
            opened = tag["kind"] if not tag["close"] else ""
            if opened == "arg_value":
                tag = yield from self._read_value(key)
                key = ""
                continue
            parts: list[str] = []
            tag = yield from self.next_tag(parts.append)
            text = "".join(parts)
            if opened == "arg_key":
                key = text.strip()
            elif key and text.strip() and opened != "arg_type" and (tag or "<" not in text):
                self._put_text(key, text)  # a value without the tag before it
                key = ""
        self.end_call()

    def _read_value(self, key: str) -> NextTag:
        """Read a value. Return the tag that ends it."""
        value = OpenValue(self, key, untyped="json", breaks="first", may_be_text=bool(key))
        while tag := (yield from self.next_tag(value.add)):
            if tag["kind"] == "arg_value" and tag["close"]:
                break
            if tag["kind"] == "arg_key" and not tag["close"]:
                self.is_plain = False  # until it is known whether it begins a key
                parts: list[str] = []
                following = yield from self.next_tag(parts.append)
                self.read_again("".join([*parts, following[0] if following else ""]))
                if following and following["kind"] == "arg_key" and following["close"]:
                    break
            value.add(tag[0])
        text = value.end()
        if key and text is not None:
            self._put_text(key, text)
        return tag

    def _put_text(self, key: str, text: str) -> None:
        schema = property_schema(self.parameters, key)
        self.put(key, convert(text, schema, self.parameters, untyped="json"))
