"""Stop strings over every way of cutting the text."""

import itertools

import pytest

from mlx_backend.chat.stop_strings import StopStrings

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
def test_the_same_text_is_shown_however_it_is_cut(text: str, stops: list[str], shown: str) -> None:
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
