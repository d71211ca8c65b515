"""Reading is linear in what the model wrote, whatever that is and however it was cut.

Counted and not timed: the characters that are handed to whatever looks through text (the scanner, the pattern of a
beginning, and each syntax). Four times the text may cost four times as many.
"""

from __future__ import annotations

import json
import random
import re
from itertools import permutations
from typing import TYPE_CHECKING, Any

import pytest

from mlx_backend.conversation.dialects import DIALECTS, open_call
from mlx_backend.conversation.dialects.block_reader import BlockReader
from mlx_backend.conversation.dialects.calls.base import CallSyntax, JsonSpan, PythonSpan, first_wrong
from mlx_backend.conversation.dialects.calls.gemma import GemmaCalls, _GemmaStream
from mlx_backend.conversation.dialects.calls.stream import CallStream
from mlx_backend.conversation.dialects.calls.xml import XmlCalls
from mlx_backend.conversation.events import Channel
from mlx_backend.conversation.parser import ChannelParser, fold, parse_text
from mlx_backend.conversation.scanner import MarkerSet
from mlx_backend.conversation.tools import ToolSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mlx_backend.conversation.dialects import Dialect
    from mlx_backend.conversation.dialects.base import CallCodec
    from mlx_backend.conversation.dialects.calls.base import DecodedCall

WEATHER = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
REPEATS = 66  # more than the markers of one call that may be part of a value
TAG = re.compile(r"<[^<>\n]{1,60}>|\[[A-Z_]+\]|```\w*|[\w.:]*get_weather[\w:]*[({]?|\"\w+\":|[{}\[\]()]")
COMMON = ("get_weather", '"', "\\", "\n", '{"name": "get_weather", "arguments": {', "<function=get_weather>")


class Work:
    """Counts the characters that are looked through."""

    def __init__(self) -> None:
        self.characters = 0

    def counting(self, original: Callable[..., Any], *, argument: int = 1) -> Callable[..., Any]:
        """Return the function, made to count the length of one of its arguments."""

        def counted(*arguments: Any, **named: Any) -> Any:
            self.characters += len(arguments[argument])
            return original(*arguments, **named)

        return counted

    def counting_feed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `CallStream.feed`, made to count what it has not used yet, too."""

        def counted(stream: CallStream, text: str) -> Any:
            self.characters += len(stream.text) + len(text)
            return original(stream, text)

        return counted

    def counting_cut(
        self, original: Callable[..., tuple[str, str, str]]
    ) -> Callable[..., tuple[str, str, str]]:
        """Return `MarkerSet.cut`, made to count as far as it looks: what is after a marker is looked at next."""

        def counted(markers: MarkerSet, text: str, **named: bool) -> tuple[str, str, str]:
            before, marker, after = original(markers, text, **named)
            self.characters += len(before) + (len(marker) or len(after))
            return before, marker, after

        return counted


def _subclasses(cls: type) -> Iterator[type]:
    found: list[type] = cls.__subclasses__()
    for subclass in found:
        yield subclass
        yield from _subclasses(subclass)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    """Count in everything that looks through text."""
    counter = Work()
    classes: list[tuple[type, tuple[str, ...]]] = [
        (each, ("decode", "begin", "is_open", "is_whole")) for each in _subclasses(CallSyntax)
    ]
    classes += [(JsonSpan, ("end",)), (PythonSpan, ("end",)), (BlockReader, ("text",))]
    for cls, names in classes:
        for name in names:
            if name in vars(cls):
                monkeypatch.setattr(cls, name, counter.counting(vars(cls)[name]))
    monkeypatch.setattr(CallStream, "feed", counter.counting_feed(CallStream.feed))
    monkeypatch.setattr(MarkerSet, "cut", counter.counting_cut(MarkerSet.cut))
    monkeypatch.setattr(open_call, "first_wrong", counter.counting(first_wrong))
    return counter


def _units(dialect: Dialect) -> list[str]:
    """Return the family's markers and what else its turns are made of, and some pairs of these."""
    form = getattr(dialect.reader, "keywords", {}).get("form")
    parts = sorted({*(form.markers if form else ()), *TAG.findall(dialect.example), *COMMON})
    pairs = [first + second for first, second in permutations(parts, 2)]
    calls = [] if dialect.calls is None else [_written(dialect.calls, {"city": "Paris", "days": 3})]
    return [*calls, *parts, *random.Random(dialect.name).sample(pairs, 3)]


def _written(codec: CallCodec, arguments: dict[str, Any]) -> str:
    return "".join(piece.text for piece in codec.encode("get_weather", arguments))


def _cost(work: Work, dialect: Dialect, text: str, size: int, opens_in: Channel | None) -> int:
    work.characters = 0
    parser = ChannelParser(dialect, tools=[WEATHER], opens_in=opens_in)
    for at in range(0, len(text), size):
        parser.feed(text[at : at + size])
    parser.close()
    return work.characters


@pytest.mark.parametrize("name", DIALECTS)
def test_four_times_the_text_costs_four_times_the_work(name: str, work: Work) -> None:
    dialect = DIALECTS[name]
    for at, unit in enumerate(_units(dialect)):
        short, long = unit * REPEATS, unit * (REPEATS * 4)
        size = (len(long), 1, 4)[at % 3]
        opens_in = Channel.ANALYSIS if dialect.blocks and at % 2 else None
        once = _cost(work, dialect, short, size, opens_in)
        more = _cost(work, dialect, long, size, opens_in)
        assert more <= 5 * once + 10_000, (unit, opens_in, size, once, more)


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("hermes-json", "<tool_call>\n<function=f{}>"),
        ("qwen-xml", "<function=f{}><parameter=a></function>"),
    ],
)
def test_a_call_that_ends_with_the_next_ones_opener_is_decoded_once(
    name: str, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[str] = []
    original = XmlCalls.decode

    def decode(syntax: XmlCalls, body: str, tools: ToolSet) -> Sequence[DecodedCall]:
        decoded.append(body)
        return original(syntax, body, tools)

    monkeypatch.setattr(XmlCalls, "decode", decode)
    message = parse_text("".join(unit.format(at) for at in range(REPEATS)), name)
    assert len(message.tool_calls) >= REPEATS - 1  # the last one may be cut
    assert len(decoded) <= REPEATS + 1


@pytest.mark.parametrize("name", [name for name, each in DIALECTS.items() if each.calls is not None])
def test_an_argument_of_a_megabyte_is_read_whole(name: str, work: Work) -> None:
    dialect = DIALECTS[name]
    assert dialect.calls is not None
    value = "a line of text, and 'quotes' too\n" * 31_000
    text = _written(dialect.calls, {"city": value})
    work.characters = 0
    parser = ChannelParser(dialect, tools=[WEATHER])
    events = [event for at in range(0, len(text), 999) for event in parser.feed(text[at : at + 999])]
    message = fold([*events, *parser.close()])
    assert [call.name for call in message.tool_calls] == ["get_weather"]
    assert len(message.tool_calls[0].arguments) > len(value)
    assert work.characters < 12 * len(text)


def test_quotation_marks_that_nothing_closes_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0
    original = _GemmaStream._ends_here

    def counted(stream: _GemmaStream, place: Any, *, is_quoted: bool) -> bool | None:
        nonlocal looked
        looked += 1
        return original(stream, place, is_quoted=is_quoted)

    monkeypatch.setattr(_GemmaStream, "_ends_here", counted)
    gemma = GemmaCalls('<|"|>')
    counts = []
    for repeats in (50, 200):
        looked = 0
        [call] = gemma.decode("call:note{lines:[" + "'tis late, " * repeats + "]}", ToolSet(None))
        assert json.loads(call.arguments) == {"lines": ["'tis late"] * repeats}
        counts.append(looked)

    assert counts[1] < 5 * counts[0]


def test_a_whole_call_is_read_in_pieces_that_do_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read copies what follows it, so that must not be all of a long call."""
    longest = 0
    original = CallStream.skip

    def watched(stream: CallStream, blanks: re.Pattern[str]) -> Any:
        nonlocal longest
        longest = max(longest, len(stream.text))
        return original(stream, blanks)

    monkeypatch.setattr(CallStream, "skip", watched)
    [call] = GemmaCalls('<|"|>').decode("call:sum{numbers:[" + "12," * 20_000 + "7]}", ToolSet(None))
    assert json.loads(call.arguments) == {"numbers": [12] * 20_000 + [7]}
    assert longest < 10_000
