"""The body of a server's answer: bytes to lines, lines to JSON objects, all of it bounded.

Servers and the proxies before them end lines in three ways, begin with a byte order mark, cut lines and characters
anywhere, spread one object over several `data:` lines or leave the `data:` out. All of that is read. What is not JSON,
or larger than any answer is, raises a `Malformed`. Knows neither sockets nor what the objects mean.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LONGEST_LINE = 8 * 2**20
"""Bytes of one line: far beyond any delta, and beyond a whole answer sent as one event."""

LARGEST_BODY = 32 * 2**20
"""Bytes of an answer in one piece."""

_MAX_DATA_LINES = 1000  # of one event
_LINE_END = re.compile(rb"\r\n|\r|\n")
_EVENT_STREAM = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:data:|event:|id:|retry:|:)")


DONE = object()
"""The event that ends a stream."""


class Malformed(ValueError):
    """The body cannot be read on."""


def lines(pieces: Iterable[bytes]) -> Iterator[str]:
    """Cut a byte stream into lines; a last line without its end is given too."""
    held: list[bytes] = []
    size = 0
    after_return = False
    for piece in pieces:
        # A line feed behind the carriage return that ended the piece before is the rest of the same line end.
        rest = piece[1:] if after_return and piece.startswith(b"\n") else piece
        after_return = piece.endswith(b"\r")
        first, *others = _LINE_END.split(rest)
        for line in others:
            yield _text([*held, first])
            held, size, first = [], 0, line
        held.append(first)
        size += len(first)
        if size > LONGEST_LINE:
            raise Malformed("a line without an end")
    if size:
        yield _text(held)


def _text(pieces: list[bytes]) -> str:
    return b"".join(pieces).decode("utf-8", "replace").removeprefix("\ufeff")


def objects(pieces: Iterable[bytes]) -> Iterator[Any]:
    """Read an event stream; yield each event's JSON value as soon as it is whole, and DONE where it says so."""
    data: list[str] = []
    for line in lines(pieces):
        if line.startswith("data:"):
            text = line[5:].strip()
            if text == "[DONE]" and not data:
                yield DONE
                return
            data.append(text)
        elif not data and line.startswith("{"):
            data.append(line)  # an error, as some servers write it in mid-stream: without a field name
        elif line or not any(data):
            continue  # comments keep the connection alive; other fields say nothing to us
        value = parsed("\n".join(data))
        if value is not _NOT_WHOLE:
            data = []
            yield value
        elif not line or len(data) > _MAX_DATA_LINES:
            raise Malformed("an event that is no JSON")
    if any(data):
        raise Malformed("an event that is no JSON")


def whole(pieces: Iterable[bytes]) -> Any:
    """Read a body that is one JSON value."""
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size > LARGEST_BODY:
            raise Malformed("a body without an end")
    value = parsed(_text(held))
    if value is _NOT_WHOLE:
        raise Malformed("a body that is no JSON")
    return value


def is_event_stream(beginning: bytes) -> bool:
    """Whether a body is an event stream by its first bytes, whatever its headers say."""
    return _EVENT_STREAM.match(beginning) is not None


def number(value: Any) -> float | None:
    """Return a value as a number; None if it is not a finite one, or one too large to calculate with."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # JSON's whole numbers have any number of digits
        return None


def parsed(text: str) -> Any:
    """Read JSON; what is none, or nested beyond reason, is `_NOT_WHOLE`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _NOT_WHOLE


_NOT_WHOLE = object()
