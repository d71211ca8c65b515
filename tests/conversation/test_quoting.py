"""Markup that is talked about is told from markup that is used, in a whole text and in a stream."""

import pytest

from mlx_backend.conversation.quoting import (
    PrecedingText,
    code_spans,
    hide_quotations,
    is_mentioned,
    is_quoted,
    is_within,
    reveal,
)

MARKER = "<|end|>"


@pytest.mark.parametrize(
    ("before", "in_code", "quoted", "mid_sentence"),
    [
        ("", False, False, False),
        ("It ends.\n", False, False, False),
        ("It ends. ", False, False, False),
        ("The marker ", False, False, True),
        ("印は\u3000", False, False, True),
        ('The marker "', False, True, False),
        ("The marker 「", False, True, False),
        ("The marker `", True, True, False),
        ("```\ncode ", True, False, True),
        ("```\ncode\n```\n", False, False, False),
        ("~~~\n", True, False, False),
    ],
)
def test_what_stands_before_markup_is_known_however_it_was_cut(
    before: str, in_code: bool, quoted: bool, mid_sentence: bool
) -> None:
    for at in range(len(before) + 1):
        stream = PrecedingText()
        stream.add(before[:at])
        for preceding in (stream.followed_by(before[at:]),):
            assert preceding.is_in_code is in_code, before[:at]
            assert preceding.opens_quotation is quoted
            assert preceding.is_mid_sentence is mid_sentence


@pytest.mark.parametrize("text", ["a `<|end|>` b", "```\n<|end|>\n```", "~~~\nnever closed <|end|>"])
def test_markup_in_code_is_within_a_code_span(text: str) -> None:
    assert is_within(code_spans(text), text.index(MARKER))


def test_quoted_and_mentioned_markup() -> None:
    assert is_quoted(f'"{MARKER}', 1)
    assert not is_quoted(MARKER, 0)
    text = f"Write {MARKER} there"
    start = text.index(MARKER)
    assert is_mentioned(text, start, start + len(MARKER))
    assert not is_mentioned(f"Done. {MARKER}", 6, 6 + len(MARKER))


def test_hidden_quotations_come_back() -> None:
    text = 'Say "<think>" or `<|end|>`, then <think>.'
    hidden = hide_quotations(text)
    assert hidden.count("<think>") == 1
    assert MARKER not in hidden
    assert reveal(hidden) == text
