"""Text is cut at markers, and only its end is held that may still become one."""

import pytest

from mlx_backend.conversation.scanner import NO_MARKERS, MarkerSet

MARKERS = MarkerSet(["<|end|>", "<|call|>", "</think>", "[END]"])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("plain", ("plain", "", "")),
        ("", ("", "", "")),
        ("a<|end|>b<|call|>", ("a", "<|end|>", "b<|call|>")),
        ("a<|en", ("a", "", "<|en")),
        ("a<", ("a", "", "<")),
        ("a<b", ("a<b", "", "")),
        ("<|<|en", ("<|", "", "<|en")),
        ("<<<", ("<<", "", "<")),
        ("x</think", ("x", "", "</think")),
        ("x [EN", ("x ", "", "[EN")),
        ("<|end|", ("", "", "<|end|")),
        ("<|ende|>", ("<|ende|>", "", "")),
    ],
)
def test_text_is_cut(text: str, parts: tuple[str, str, str]) -> None:
    assert MARKERS.cut(text) == parts


def test_the_longest_of_several_markers_is_found() -> None:
    assert MarkerSet(["<a", "<ab>"]).cut("x<ab>y") == ("x", "<ab>", "y")


def test_touching_is_asked_cheaply() -> None:
    assert not MARKERS.touches("plain text > | ]")
    assert MARKERS.touches("a<b")
    assert MarkerSet(["</think>"], watched="\n").touches("a\n")
    assert not NO_MARKERS.touches("<|end|>")
    assert not NO_MARKERS.touches("")


def test_a_set_can_be_reduced() -> None:
    assert MARKERS.without(["<|end|>"]).cut("a<|end|>[END]") == ("a<|end|>", "[END]", "")
    assert NO_MARKERS.cut("a<|end|>") == ("a<|end|>", "", "")
