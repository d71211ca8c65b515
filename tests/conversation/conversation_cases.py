"""The golden transcripts of `cases/`, and the ways to feed one to a parser."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.dialects.harmony import HARMONY_TOKENS
from mlx_backend.conversation.events import Channel, Message, ToolCall
from mlx_backend.conversation.parser import ChannelParser, fold

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mlx_backend.conversation.events import EndedBy, Event
    from mlx_backend.conversation.tools import ToolDefinition

OFFERED = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "limit": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "opts": {"type": "object"},
                    "score": {"type": ["number", "null"]},
                },
            },
        },
    },
]
"""The tools of a request, for the families whose values have no types of their own."""

FOLDER = Path(__file__).parent / "cases"
PLAIN_TOKEN = 1000  # any id that is no control token
_IDS = {text: token for token, text in HARMONY_TOKENS.items()}
_MARKER = re.compile("|".join(map(re.escape, _IDS)))


@dataclass(frozen=True)
class Case:
    """One transcript and its message. `written` still has its quoted markers with broken bars."""

    name: str
    dialect: str
    written: str
    tools: Sequence[ToolDefinition] | None
    opens_in: Channel | None
    ended_by: EndedBy
    message: Message

    @property
    def text(self) -> str:
        return _unquoted(self.written)

    @property
    def quotes_markers(self) -> bool:
        return self.text != self.written

    def tokens(self, size: int) -> Iterator[tuple[str, int]]:
        """Markers as control tokens, all other text in tokens of `size` characters."""
        spans = [(match.start(), match.end()) for match in _MARKER.finditer(self.written)]
        at = 0
        for start, end in [*spans, (len(self.written), len(self.written))]:
            plain = _unquoted(self.written[at:start])
            yield from ((piece, PLAIN_TOKEN) for piece in pieces(plain, size))
            if end > start:
                yield self.written[start:end], _IDS[self.written[start:end]]
            at = end

    def parser(self) -> ChannelParser:
        return ChannelParser(self.dialect, tools=self.tools, opens_in=self.opens_in)

    def events(self, fed: Iterable[tuple[str, int | None]]) -> list[Event]:
        parser = self.parser()
        return [
            *(event for text, token in fed for event in parser.feed(text, token)),
            *parser.close(self.ended_by),
        ]

    def read(self, *parts: str) -> Message:
        return fold(self.events((part, None) for part in parts))

    def read_tokens(self, size: int) -> Message:
        return fold(self.events(self.tokens(size)))


def pieces(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def cut(text: str, *places: int) -> list[str]:
    return [text[start:end] for start, end in pairwise([0, *places, len(text)])]


def load(name: str, dialect: str) -> list[Case]:
    return [_case(row, dialect) for row in _rows(name)]


def load_families() -> list[Case]:
    """The cases of every family; the tools of their requests are `OFFERED`."""
    cases = []
    for row in _rows("families.toml"):
        dialect = row.pop("dialect")
        cases.append(_case({"tools": OFFERED, **row}, dialect))
    return [replace(case, name=f"{case.dialect}: {case.name}") for case in cases]


def _rows(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = tomllib.loads((FOLDER / name).read_text(encoding="utf-8"))["case"]
    return rows


def _case(row: dict[str, Any], dialect: str) -> Case:
    number = f"{row.pop('row')}: " if "row" in row else ""
    calls = [(name, _unquoted(arguments)) for name, arguments in row.pop("calls", [])]
    finish = row.pop("finish", "stop")
    ids = row.pop("ids", [""] * len(calls))
    cut_call = len(calls) - 1 if finish != "tool_calls" and not row.pop("whole_calls", False) else len(calls)
    case = Case(
        name=number + row.pop("name"),
        dialect=dialect,
        written=row.pop("raw"),
        tools=row.pop("tools", None),
        opens_in=Channel(row.pop("opens_in")) if "opens_in" in row else None,
        ended_by=row.pop("ended_by", "stop"),
        message=Message(
            reasoning=_unquoted(row.pop("reasoning", "")),
            content=_unquoted(row.pop("content", "")),
            tool_calls=tuple(
                ToolCall(name, arguments, complete=at != cut_call, id=own_id)
                for at, ((name, arguments), own_id) in enumerate(zip(calls, ids, strict=True))
            ),
            finish=finish,
        ),
    )
    assert not row, f"unknown keys in {case.name!r}: {', '.join(row)}"
    return case


def _unquoted(text: str) -> str:
    return text.replace("¦", "|")
