"""Gemma 4's calls: `call:f{a:<|"|>text<|"|>,n:1,l:[true,null]}`. FunctionGemma's are the same with `<escape>`.

Keys are bare and texts stand between delimiters of their own, so that nothing in them has to be escaped. Models also
write JSON's quotation marks there; both are read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.argument_values import (
    convert,
    fitted,
    parse_json,
    property_names,
    property_schema,
    resolve,
    types_of,
)
from mlx_backend.conversation.dialects.base import Piece
from mlx_backend.conversation.dialects.calls.base import beginnings, to_json
from mlx_backend.conversation.dialects.calls.stream import CallStream, StreamedSyntax, folded
from mlx_backend.conversation.json_values import MAX_DEPTH

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from mlx_backend.conversation.dialects.calls.base import DecodedCall
    from mlx_backend.conversation.dialects.calls.stream import Reading
    from mlx_backend.conversation.tools import ToolSet

_CALL = re.compile(r"\s*(?:call:\s*)?([\w.:/-]{1,256})\s*(?=\{)")
_CALL_BEGUN = re.compile(r"\s*(?:call:\s*)?[\w.:/-]{0,256}\s*")
_NEXT_CALL = re.compile(r",?\s*call:\s*[\w.:/-]{1,256}\s*\{")
_NEXT_CALL_BEGUN = re.compile(r",?\s*(?:c(?:a(?:l(?:l(?::\s*[\w.:/-]{0,256}\s*)?)?)?)?)?")
_BLANKS, _SEPARATORS = re.compile(r"\s*"), re.compile(r"[\s,]*")
_KEY = re.compile(
    r"""\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|([^:{}\[\]<>",'\s][^:{}\[\]<>",]{0,255}?))\s*:"""
)
_KEY_BEGUN = re.compile(r"""\s*(?:"[^"]*"?|'[^']*'?|[^:{}\[\]<>",]{0,256})\s*""")
_IDENTIFIER = re.compile(r"[^\W\d][\w-]*")
_UNQUOTED_KEY = re.compile(r"[^\s()=;]+")
_BRACKETS = re.compile(r"[,{}\[\]]")
_MARKS = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
_UNESCAPED = re.compile(r'((?<!\\)(?:\\\\)*)"')
_MAX_AHEAD = 600
"""Characters that are looked at to tell whether a value ends."""


class GemmaCalls(StreamedSyntax):
    """`delimiter` stands at both ends of a text."""

    def __init__(self, delimiter: str) -> None:
        self.head = re.compile(r"\s*(?:(?:call:\s*)?[\w.:/-]{0,128}\s*(?:\{.*)?|\[.*)?", re.DOTALL)
        self.delimiter = delimiter

    def encode(self, name: str, arguments: Mapping[str, Any]) -> tuple[Piece, ...]:
        return Piece(f"call:{name}"), *_joined(self._encode(dict(arguments)))

    def is_open(self, body: str) -> bool:
        """Whether the last bracket is open."""
        return not body.rstrip().endswith(("}", "]"))

    def reader(self, tools: ToolSet) -> _GemmaStream:
        return _GemmaStream(tools, self.delimiter)

    def _encode(self, value: Any) -> Iterator[Piece]:
        match value:
            case str():
                yield Piece(self.delimiter, marker=True)
                yield Piece(value)
                yield Piece(self.delimiter, marker=True)
            case dict():
                yield Piece("{")
                for at, (key, item) in enumerate(value.items()):
                    yield Piece(f"{',' if at else ''}{key}:")
                    yield from self._encode(item)
                yield Piece("}")
            case list():
                yield Piece("[")
                for at, item in enumerate(value):
                    if at:
                        yield Piece(",")
                    yield from self._encode(item)
                yield Piece("]")
            case _:
                yield Piece(to_json(value))


class UnwrappedGemmaCalls(GemmaCalls):
    """Calls without markers: the whole answer is calls, so that nothing of them is known before its end."""

    def __init__(self, delimiter: str) -> None:
        super().__init__(delimiter)
        self.head = re.compile(r"\s*" + beginnings("call:", r"\s*[\w.:/-]{0,256}\s*(?:\{.*)?"), re.DOTALL)

    def stream(self, body: str, tools: ToolSet) -> None:
        """Return nothing: the answer has to end first."""

    def decode(self, body: str, tools: ToolSet) -> Sequence[DecodedCall]:
        """Return the calls, if nothing else is there."""
        stream = self.reader(tools)
        calls = folded([*stream.feed(body), *stream.finish()])
        return () if stream.has_rest else calls


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a value stands: in an object or a list, how deep, and what its schema says."""

    schema: Any
    depth: int
    names: Sequence[str] | None = None
    """Keys that may follow it, if they are known."""
    in_list: bool = False
    key: str = ""
    """The parameter, of which nothing was put out yet."""


class _GemmaStream(CallStream):
    """Reads values one in the other. What is cut or broken ends where the text does.

    A text without delimiters may hold anything: it ends before a comma and a key that the tool has, or at the bracket
    that closes what it stands in.
    """

    __slots__ = ("_delimiter", "_unclosed", "has_rest")

    def __init__(self, tools: ToolSet, delimiter: str) -> None:
        super().__init__(tools)
        self._delimiter = delimiter
        # Quotation marks, each with where it stands, that close no value up to the end of the body.
        self._unclosed: set[tuple[str, bool, bool]] = set()
        self.has_rest = False  # there is text that is no call

    def read(self) -> Reading:
        while True:
            while not (begins := _CALL.match(self.text)):
                if self.is_at_end or len(self.text) > _MAX_AHEAD or not _CALL_BEGUN.fullmatch(self.text):
                    self.has_rest = bool(self.text.strip())
                    return
                yield
            self.text = self.text[begins.end() :]
            self.begin_call(begins[1])
            yield from self._object(_Place(self.parameters, 0))
            self.end_call()
            yield from self.skip(_SEPARATORS)

    # values

    def _value(self, place: _Place) -> Reading:
        """Read a value and put it out."""
        first = yield from self.skip(_BLANKS)
        if first == self._delimiter[0] and (yield from self._has(self._delimiter)):
            yield from self._delimited(place)
        elif first in ("{", "[") and types_of(place.schema, self.parameters) != {"string"}:
            if place.depth > MAX_DEPTH:
                self.name = ""  # no call
                return
            self._open(place)
            schema = resolve(place.schema, self.parameters)
            inner = _Place(schema, place.depth + 1)
            self.write(first)
            yield from (self._object(inner) if first == "{" else self._list(inner))
            self.write("}" if first == "{" else "]")
        elif first in ('"', "'") and (text := (yield from self._quoted(place, first))) is not None:
            self._put_value(place, text)
        else:
            text = yield from self._bare(place)
            self._open(place)
            self.write(to_json(convert(text, place.schema, self.parameters, untyped="json")))

    def _object(self, place: _Place) -> Reading:
        """Read keys and values up to the closing bracket."""
        self.text = self.text[1:]
        left = property_names(place.schema)
        is_known = bool(left)
        is_first = True
        while (yield from self.skip(_SEPARATORS)) not in ("", "}", "]"):
            key = yield from self._key()
            if key is None:
                break
            left = [name for name in left if name != key]
            schema = property_schema(place.schema, key)
            if place.depth:
                self.write(f"{'' if is_first else ', '}{to_json(key)}: ")
                yield from self._value(_Place(schema, place.depth, left if is_known else None))
            else:
                yield from self._value(_Place(schema, 0, left if is_known else None, key=key))
            is_first = False
            if not self.name:
                return
        self.text = self.text[1:]

    def _list(self, place: _Place) -> Reading:
        self.text = self.text[1:]
        items = place.schema.get("items", {})
        is_first = True
        while (yield from self.skip(_SEPARATORS)) not in ("", "}", "]"):
            if not is_first:
                self.write(", ")
            is_first = False
            yield from self._value(_Place(items, place.depth, in_list=True))
            if not self.name:
                return
        self.text = self.text[1:]

    def _key(self) -> Generator[None, None, str | None]:
        """Read a key and its colon. None: there is none."""
        if (yield from self._has(self._delimiter)):
            self.text = self.text[len(self._delimiter) :]
            parts: list[str] = []
            yield from self._find(self._delimiter, parts.append)
            yield from self._find(":", lambda _: None)
            return "".join(parts)
        while not (found := _KEY.match(self.text)):
            if self.is_at_end or len(self.text) > _MAX_AHEAD:
                self.text = ""
                return None
            yield
        self.text = self.text[found.end() :]
        return _key_of(found)

    def _delimited(self, place: _Place) -> Reading:
        """Read a text between delimiters. It is put out as it comes, unless the schema has no texts."""
        self.text = self.text[len(self._delimiter) :]
        types = types_of(place.schema, self.parameters) if not place.depth else frozenset[str]()
        if types and "string" not in types:
            parts: list[str] = []
            yield from self._find(self._delimiter, parts.append)
            self._put_value(place, "".join(parts))
            return
        self._open(place)
        self.write('"')
        while True:
            self.is_plain = True
            yield from self._find(self._delimiter, lambda text: self.write(to_json(text)[1:-1]))
            self.is_plain = False
            while (ends := self._delimiter_ends(place)) is None:
                yield
            if ends:
                break
            self.write('\\"')  # the model's word for a quotation mark in the text
        self.write('"')

    def _quoted(self, place: _Place, quote: str) -> Generator[None, None, str | None]:
        """Read a text in quotation marks. None, and nothing is read: there is no such mark where a value may end."""
        kind = quote, place.in_list, place.depth > 0
        if kind in self._unclosed:
            return None
        parts = [quote]
        self.text = self.text[1:]
        while mark := (yield from self.scan(_MARKS[quote], parts.append)):
            if mark == "\\":
                if len(self.text) < 2 and not self.is_at_end:
                    yield
                    continue
                parts.append(self.text[:2])
                self.text = self.text[2:]
                continue
            self.text = self.text[1:]
            if (yield from self._ends(place, is_quoted=True)):
                return _unescaped("".join(parts)[1:])
            parts.append(quote)
        self._unclosed.add(kind)
        self.read_again("".join(parts))
        return None

    def _bare(self, place: _Place) -> Generator[None, None, str]:
        """Read a text without delimiters."""
        parts: list[str] = []
        open_brackets = 0
        while mark := (yield from self.scan(_BRACKETS, parts.append)):
            if mark in "{[":
                open_brackets += 1
            elif mark in "}]" and open_brackets:
                open_brackets -= 1
            elif (yield from self._ends(place, is_quoted=False)):
                break
            parts.append(mark)
            self.text = self.text[1:]
        text = "".join(parts).strip()
        if (
            not mark and not place.in_list and text.endswith("}")
        ):  # that of the object, after one too many in the text
            text = text[:-1].rstrip()
        return text

    def _ends(self, place: _Place, *, is_quoted: bool) -> Generator[None, None, bool]:
        """Whether a value ends where the text stands now: at a comma, at a bracket, or after a quotation mark."""
        while (found := self._ends_here(place, is_quoted=is_quoted)) is None:
            yield
        return found

    def _ends_here(self, place: _Place, *, is_quoted: bool) -> bool | None:
        after = self.text.lstrip()
        mark, rest = after[:1], after[1:].lstrip()
        is_all = self.is_at_end or len(self.text) > _MAX_AHEAD
        if not mark:
            return is_quoted if is_all else None
        if place.in_list:
            return mark in ",]"
        if mark == "}" and place.depth:
            return rest[:1] in ("", ",", "}", "]") if rest or is_all else None
        if mark == "}":
            if not is_all and _NEXT_CALL_BEGUN.fullmatch(rest):
                return None
            return not rest or _NEXT_CALL.match(rest) is not None
        if mark != ",":
            return False
        if key := _KEY.match(rest):
            after = rest[key.end() :]
            if len(after) < 2 and "//".startswith(after) and not is_all:
                return None
            return not after.startswith("//") and self._is_next_key(place, _key_of(key), is_quoted=is_quoted)
        if rest.startswith((self._delimiter, "}", "]")):
            return True
        is_begun = _KEY_BEGUN.fullmatch(rest) or self._delimiter.startswith(rest)
        return None if is_begun and not is_all else False

    def _delimiter_ends(self, place: _Place) -> bool | None:
        """Whether a delimiter ends its text. Models write it for a quotation mark in the text, too."""
        after = self.text.lstrip()
        rest = after[1:].lstrip()
        is_all = self.is_at_end or len(self.text) > _MAX_AHEAD
        if not after:
            return True if is_all else None
        if after[0] not in "}]":
            return self._ends_here(place, is_quoted=True) if after[0] == "," else False
        if not is_all and _NEXT_CALL_BEGUN.fullmatch(rest):
            return None
        return rest[:1] in ("", ",", "}", "]") or _NEXT_CALL.match(rest) is not None

    def _is_next_key(self, place: _Place, key: str, *, is_quoted: bool) -> bool:
        form = _UNQUOTED_KEY if is_quoted else _IDENTIFIER
        if place.names is None or key in place.names:
            return key in (place.names or ()) or form.fullmatch(key) is not None
        may_hold_it = not is_quoted and "string" in types_of(place.schema, self.parameters)
        return not may_hold_it and form.fullmatch(key) is not None

    def _open(self, place: _Place) -> None:
        if place.key:
            self.open_value(place.key)

    def _put_value(self, place: _Place, text: str) -> None:
        """Put out a text. Models put numbers between delimiters, too: then the schema says so."""
        self._open(place)
        self.write(to_json(text if place.depth else fitted(text, place.schema, self.parameters)))

    # text

    def _has(self, word: str) -> Generator[None, None, bool]:
        """Whether the text goes on with a word."""
        while len(self.text) < len(word) and word.startswith(self.text) and not self.is_at_end:
            yield
        return self.text.startswith(word)

    def _find(self, word: str, put: Callable[[str], object]) -> Reading:
        """Take the text up to a word, and skip that."""
        while (at := self.text.find(word)) < 0:
            sizes = range(0 if self.is_at_end else len(word) - 1, 0, -1)
            at = len(self.text) - next((size for size in sizes if self.text.endswith(word[:size])), 0)
            put(self.text[:at])
            self.text = self.text[at:]
            if self.is_at_end:
                return
            yield
        put(self.text[:at])
        self.text = self.text[at + len(word) :]


def _key_of(found: re.Match[str]) -> str:
    double, single, bare = found.groups()
    return bare if bare is not None else _unescaped(double if double is not None else single)


def _unescaped(text: str) -> str:
    """Return a text that stood in quotation marks; as it is, if its escapes are not JSON's."""
    if "\\" not in text:
        return text
    try:
        found = parse_json('"' + _UNESCAPED.sub(r"\1\"", text.replace("\\'", "'")) + '"')
    except ValueError:
        return text
    return found if isinstance(found, str) else text


def _joined(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Join neighbouring pieces of plain text."""
    text = ""
    for piece in pieces:
        if piece.marker:
            if text:
                yield Piece(text)
            text = ""
            yield piece
        else:
            text += piece.text
    if text:
        yield Piece(text)
