"""Stop strings over every way of cutting the text."""

import itertools

import pytest

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
from mlx_backend.conversation.stop_strings import StopFilter

CASES = [
    ("one two three", ["two"], "one "),
    ("one two three", ["four"], "one two three"),
    ("one two three", [], "one two three"),
    ("aaab", ["aab"], "a"),
    ("aab", ["ab", "aa"], ""),
    ("abcabd", ["abd"], "abc"),
    ("ObObservation", ["Observation"], "Ob"),
    ("one STOP", ["STOP", "STOPPED"], "one "),
    ("abc", ["abc", "b"], ""),
    ("abd", ["abc", "b"], "a"),
    ("x STOP y END", ["END", "STOP"], "x "),
    ("<|", ["<|end|>"], "<|"),
    ("", ["a"], ""),
]


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, ContentDelta))


@pytest.mark.parametrize(("text", "stops", "shown"), CASES)
def test_the_same_text_is_shown_however_it_is_split(text: str, stops: list[str], shown: str) -> None:
    for cuts in itertools.combinations(range(len(text) + 1), 2):
        stop = StopFilter(stops)
        pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        assert text_of(stop.feed([*map(ContentDelta, pieces), StreamEnd("stop")])) == shown
        assert bool(stop.found) == (shown != text)


def test_only_what_may_still_become_a_stop_string_is_held_back() -> None:
    stop = StopFilter(["STOP"])
    assert text_of(stop.feed([ContentDelta("a ST")])) == "a "
    assert text_of(stop.feed([ContentDelta("ART")])) == "START"


def test_nothing_is_shown_after_a_stop_string() -> None:
    stop = StopFilter(["."])
    assert text_of(stop.feed([ContentDelta("a. b"), ContentDelta(" c."), StreamEnd("stop")])) == "a"


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


@pytest.mark.parametrize("others", [CALL, [ReasoningDelta("hm")]])
def test_what_was_held_back_is_shown_before_a_call_or_reasoning(others: list[Event]) -> None:
    shown = StopFilter(["\n\nHuman:"]).feed([ContentDelta("a\n\n"), *others, StreamEnd("stop")])
    assert shown == [ContentDelta("a"), ContentDelta("\n\n"), *others, StreamEnd("stop")]


def test_a_call_behind_a_stop_string_is_dropped_from_start_to_end() -> None:
    assert StopFilter(["."]).feed([ContentDelta("a."), *CALL, StreamEnd("stop")]) == [
        ContentDelta("a"),
        StreamEnd("stop"),
    ]


def test_the_end_of_a_call_that_was_cut_is_not_shown() -> None:
    cut: list[Event] = [*CALL[:2], ToolCallEnd(0, complete=False), StreamEnd("length")]
    assert StopFilter([]).feed(cut) == [*CALL[:2], StreamEnd("length")]
    assert StopFilter([]).feed(CALL) == CALL
