"""Where an answer ends at a stop word, however the server cut its text."""

from __future__ import annotations

from itertools import combinations

import pytest

from dify_mlx_provider.chat.stop_words import StopWords
from mlx_backend.conversation.events import ContentDelta, Event, ReasoningDelta


def read(events: list[Event], *words: str) -> tuple[str, bool]:
    """The text before the first word, and whether it came."""
    stop = StopWords(words)
    kept = [each for event in events for each in stop.cut([event])] + stop.cut([], is_end=True)
    return "".join(each.text for each in kept if isinstance(each, ContentDelta)), stop.reached


@pytest.mark.parametrize(
    ("text", "words", "shown", "reached"),
    [
        ("Thought: a\nObservation: b", ("Observation",), "Thought: a\n", True),
        ("Observe", ("Observation",), "Observe", False),
        ("aab", ("ab", "aa"), "", True),
        ("ObObservation", ("Observation",), "Ob", True),
        ("one STOP", ("STOP", "STOPPED"), "one ", True),
        ("text", (), "text", False),
    ],
)
def test_an_answer_ends_before_the_first_word_however_it_is_cut(
    text: str, words: tuple[str, ...], shown: str, reached: bool
) -> None:
    for first, second in combinations(range(len(text) + 1), 2):
        pieces: list[Event] = [ContentDelta(text[:first]), ContentDelta(text[first:second])]
        assert read([*pieces, ContentDelta(text[second:])], *words) == (shown, reached)


def test_a_word_in_the_reasoning_ends_nothing() -> None:
    stop = StopWords(["end"])
    events: list[Event] = [ReasoningDelta("the end"), ContentDelta("Hi")]
    assert [*stop.cut(events), *stop.cut([], is_end=True)] == events
    assert not stop.reached
