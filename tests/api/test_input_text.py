"""The text of a custom tool's call, out of the JSON that the model writes: as it grows, however it is cut."""

from __future__ import annotations

import json
from itertools import combinations

import pytest

from mlx_backend.api.tools import InputText

TEXTS = [
    "",
    "plain",
    'a "quoted" \\ back\nline\ttab',
    "😀é\u2028",
    '{"input": "x"}',
    "\\u0041",
    "\ud83d alone",
]


def folded(pieces: list[str]) -> tuple[str, str]:
    text = InputText()
    shown = "".join(text.feed(piece) for piece in pieces)
    more, whole = text.close()
    return shown + more, whole


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("is_ascii", [True, False])
def test_every_split_gives_the_same_text(text: str, is_ascii: bool) -> None:
    written = json.dumps({"input": text}, ensure_ascii=is_ascii)
    assert folded(list(written)) == (text, text)
    for first, second in combinations(range(len(written) + 1), 2):
        assert folded([written[:first], written[first:second], written[second:]]) == (text, text)


@pytest.mark.parametrize(
    "written", ["{}", '{"other": 1}', '{"input": 7}', "no json", '{"a": 1, "input": "x"}']
)
def test_other_arguments_are_given_as_they_are(written: str) -> None:
    value = json.loads(written) if written != "no json" else {}
    expected = value.get("input") if isinstance(value.get("input"), str) else written
    assert folded(list(written)) == (expected, expected)


def test_the_text_is_shown_as_it_grows() -> None:
    text = InputText()
    assert [text.feed(piece) for piece in ('{"inp', 'ut": "ab', "c\\", 'n"', "}")] == [
        "",
        "ab",
        "c",
        "\n",
        "",
    ]
