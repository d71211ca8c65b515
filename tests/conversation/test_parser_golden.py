"""Every golden transcript gives its message, however it is cut. EVERY_SPLIT=1 tries all two-cut splits (minutes)."""

from __future__ import annotations

import os
from itertools import combinations
from typing import TYPE_CHECKING

import pytest
from conversation_cases import cut, load

if TYPE_CHECKING:
    from conversation_cases import Case

HARMONY = load("valid.toml", "harmony") + load("malformed.toml", "harmony")
CASES = HARMONY + load("think.toml", "think")
MAX_PAIRS = 10**9 if os.environ.get("EVERY_SPLIT") else 400

by_text = pytest.mark.parametrize(
    "case", [c for c in CASES if not c.quotes_markers], ids=lambda case: case.name
)
by_tokens = pytest.mark.parametrize("case", HARMONY, ids=lambda case: case.name)


@by_text
def test_a_transcript_means_its_message(case: Case) -> None:
    assert case.read(case.text) == case.message


@by_text
def test_it_means_the_same_character_by_character_and_at_every_cut(case: Case) -> None:
    assert case.read(*case.text) == case.message
    for place in range(len(case.text) + 1):
        assert case.read(*cut(case.text, place)) == case.message, cut(case.text, place)


@by_text
def test_it_means_the_same_at_every_two_cuts(case: Case) -> None:
    """All pairs of a short text; of a long one pairs that are spread evenly, with every place among them."""
    pairs = list(combinations(range(len(case.text) + 1), 2))
    for places in pairs[:: len(pairs) // MAX_PAIRS + 1]:
        assert case.read(*cut(case.text, *places)) == case.message, cut(case.text, *places)


@by_tokens
def test_it_means_the_same_by_tokens(case: Case) -> None:
    for size in (3, 1, 7, 1000):
        assert case.read_tokens(size) == case.message, size


def test_every_malformed_shape_has_its_cases() -> None:
    rows = {int(case.name.partition(":")[0]) for case in load("malformed.toml", "harmony")}
    tested_below = {37}  # characters split over tokens: test_parser_streaming
    assert rows | tested_below >= set(range(1, 38))
