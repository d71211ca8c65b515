"""The body of a server's answer: from bytes to lines to JSON values, all of it bounded.

Servers, and proxies in front of them, end lines in three ways, begin with a byte order mark, cut lines and characters
anywhere, spread one object over several `data:` lines or leave `data:` out. All of that is read. What is not JSON, or
is larger than any answer, raises `MalformedBody`. Knows neither sockets nor what the objects mean.

JSON may spell a character beyond U+FFFF, such as an emoji, as two escapes (a surrogate pair); a server that cuts its
text between them sends each half in a delta of its own. A lone half cannot be sent on: UTF-8 has no bytes for it. So
the halves are joined again (`join_surrogates`, `SurrogateJoiner`).
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_LINE_BYTES = 8 * 2**20
"""Bytes of one line, and characters of one event: far beyond any delta, and beyond a whole answer as one event."""

MAX_BODY_BYTES = 32 * 2**20
"""Bytes of an answer in one piece."""

MAX_IGNORED_CHARACTERS = 4 * 2**20
"""Characters of comments and empty lines between two events; one comment a second does not reach it in a week."""

_MAX_DATA_LINES = 1000
"""Lines of one event."""

_MAX_TRIED_LINES = 16
"""Lines of one event, after each of which it may be complete; later only an empty line ends it."""

_LINE_END = re.compile(rb"\r\n|\r|\n")
_EVENT_STREAM = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:data:|event:|id:|retry:|:)")
_SURROGATE = re.compile("[\ud800-\udfff]")
_HIGH_SURROGATE_AT_END = re.compile("[\ud800-\udbff]\\Z")

INCOMPLETE = object()
"""What `parse_json` returns for a text that is not a JSON value."""

DONE = object()
"""What `iter_events` yields for `data: [DONE]`."""


class MalformedBody(ValueError):
    """The body is not JSON, or not within the limits."""


def iter_lines(pieces: Iterable[bytes]) -> Iterator[str]:
    """Split a byte stream into lines; a last line without a line end is yielded too."""
    pending: list[bytes] = []
    size = 0
    after_return = False
    for piece in pieces:
        # A line feed after the carriage return that ended the last piece belongs to the same line end.
        rest = piece[1:] if after_return and piece.startswith(b"\n") else piece
        after_return = piece.endswith(b"\r")
        first, *others = _LINE_END.split(rest)
        for line in others:
            yield _text([*pending, first])
            pending, size, first = [], 0, line
        pending.append(first)
        size += len(first)
        if size > MAX_LINE_BYTES:
            raise MalformedBody("a line without an end")
    if size:
        yield _text(pending)


def _text(pieces: list[bytes]) -> str:
    return b"".join(pieces).decode("utf-8", "replace").removeprefix("\ufeff")


def iter_events(pieces: Iterable[bytes]) -> Iterator[Any]:
    """Yield the JSON value of each event as soon as it is complete, and DONE for the last."""
    data: list[str] = []
    size = ignored = 0
    for line in iter_lines(pieces):
        if line.startswith("data:"):
            text = line[5:].strip()
            if text == "[DONE]" and not data:
                yield DONE
                return
            data.append(text)
        elif not data and line.startswith("{"):
            data.append(line)  # an error, as some servers write it in mid-stream: without a field name
        elif line or not any(data):
            ignored += len(line) + 1  # comments keep the connection alive; other fields mean nothing here
            if ignored > MAX_IGNORED_CHARACTERS:
                raise MalformedBody("lines without an event")
            continue
        size += len(line)
        if size > MAX_LINE_BYTES or len(data) > _MAX_DATA_LINES:
            raise MalformedBody("an event without an end")
        if line and len(data) > _MAX_TRIED_LINES:
            continue
        value = parse_json("\n".join(data))
        if value is not INCOMPLETE:
            data, size, ignored = [], 0, 0
            yield value
        elif not line:
            raise MalformedBody("an event that is not JSON")
    if any(data):
        value = parse_json("\n".join(data))
        if value is INCOMPLETE:
            raise MalformedBody("an event that is not JSON")
        yield value


def parse_body(pieces: Iterable[bytes]) -> Any:
    """Parse a body that is one JSON value."""
    pending: list[bytes] = []
    size = 0
    for piece in pieces:
        pending.append(piece)
        size += len(piece)
        if size > MAX_BODY_BYTES:
            raise MalformedBody("a body without an end")
    value = parse_json(_text(pending))
    if value is INCOMPLETE:
        raise MalformedBody("a body that is not JSON")
    return value


def skip_blank(pieces: Iterable[bytes]) -> bytes:
    """Return the first piece that is not blank; nothing if there is none."""
    ignored = 0
    for piece in pieces:
        if piece.strip():
            return piece
        ignored += len(piece)
        if ignored > MAX_IGNORED_CHARACTERS:
            raise MalformedBody("blanks without an end")
    return b""


def is_event_stream(beginning: bytes) -> bool:
    """Whether a body is an event stream by its first bytes, whatever its headers say."""
    return _EVENT_STREAM.match(beginning) is not None


def finite_number(value: Any) -> float | None:
    """Return a JSON number as a float; None if it is none, not finite, or too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer in JSON may have any number of digits
        return None


def parse_json(text: str) -> Any:
    """Parse JSON; return INCOMPLETE for what is not, or not yet, JSON, or is nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return INCOMPLETE


def join_surrogates(text: str) -> str:
    """Join adjacent halves; a half without its other becomes U+FFFD."""
    if _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class SurrogateJoiner:
    """Joins the halves of a text that comes in pieces."""

    def __init__(self) -> None:
        self._pending = ""

    def feed(self, piece: str) -> str:
        """Return the text that is complete; a first half waits for the second."""
        text, self._pending = self._pending + piece, ""
        if _HIGH_SURROGATE_AT_END.search(text):
            text, self._pending = text[:-1], text[-1]
        return join_surrogates(text)
