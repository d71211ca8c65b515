"""Stop strings over every way of cutting the text."""

import itertools

import pytest

from mlx_backend.chat.reply import StopFilter, StopStrings
from mlx_backend.conversation.events import (
    Channel,
    ContentDelta,
    Event,
    ReasoningDelta,
    StreamEnd,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)

CASES = [
    ("one two three", ["two"], "one "),
    ("one two three", ["four"], "one two three"),
    ("one two three", [], "one two three"),
    ("aaab", ["aab"], "a"),
    ("abcabd", ["abd"], "abc"),
    ("x STOP y END", ["END", "STOP"], "x "),
    ("<|", ["<|end|>"], "<|"),
    ("", ["a"], ""),
]


@pytest.mark.parametrize(("text", "stops", "shown"), CASES)
def test_the_same_text_is_shown_however_it_is_split(text: str, stops: list[str], shown: str) -> None:
    for cuts in itertools.combinations(range(len(text) + 1), 2):
        machine = StopStrings(stops)
        pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        assert "".join(map(machine.feed, pieces)) + machine.close() == shown
        assert machine.stopped == (shown != text)


def test_only_what_may_still_become_a_stop_string_is_held_back() -> None:
    machine = StopStrings(["STOP"])
    assert machine.feed("a ST") == "a "
    assert machine.feed("ART") == "START"


def test_nothing_is_shown_after_a_stop_string() -> None:
    machine = StopStrings(["."])
    assert [machine.feed("a. b"), machine.feed(" c."), machine.close()] == ["a", "", ""]


CALL: list[Event] = [ToolCallStart(0, "f"), ToolCallDelta(0, "{}"), ToolCallEnd(0)]


def test_a_stop_string_applies_to_the_answer_and_not_to_reasoning_or_a_preamble() -> None:
    events: list[Event] = [
        ReasoningDelta("a. b"),
        ContentDelta("c. d", Channel.COMMENTARY),
        ContentDelta("e. f"),
        StreamEnd("stop"),
    ]
    shown = StopFilter(["."]).feed(events)
    assert shown == [*events[:2], ContentDelta("e"), events[-1]]


def test_what_was_held_back_is_shown_before_the_end() -> None:
    shown = StopFilter(["STOP"]).feed([ContentDelta("a ST"), StreamEnd("length")])
    assert shown == [ContentDelta("a "), ContentDelta("ST"), StreamEnd("length")]


def test_a_call_behind_a_stop_string_is_dropped_from_start_to_end() -> None:
    assert StopFilter(["."]).feed([ContentDelta("a."), *CALL, StreamEnd("stop")]) == [
        ContentDelta("a"),
        StreamEnd("stop"),
    ]


def test_the_end_of_a_call_that_was_cut_is_not_shown() -> None:
    cut: list[Event] = [*CALL[:2], ToolCallEnd(0, complete=False), StreamEnd("length")]
    assert StopFilter([]).feed(cut) == [*CALL[:2], StreamEnd("length")]
    assert StopFilter([]).feed(CALL) == CALL
