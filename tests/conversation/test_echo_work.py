"""What a client echoes is taken apart as often as it may be wrapped, unless it is longer than any answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mlx_backend.conversation import echo
from mlx_backend.conversation.echo import parse_echo, parse_reasoning

if TYPE_CHECKING:
    from mlx_backend.conversation.dialects import Dialect
    from mlx_backend.conversation.echo import Echo
    from mlx_backend.conversation.tools import ToolSet


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that are looked through, one after the other."""
    lengths: list[int] = []
    parse_once = echo._parse_once

    def counted(text: str, tools: ToolSet | None, dialect: Dialect | None) -> list[Echo]:
        lengths.append(len(text))
        return parse_once(text, tools, dialect)

    monkeypatch.setattr(echo, "_parse_once", counted)
    return lengths


@pytest.mark.parametrize(("closers", "times"), [(10, 10), (300_000, 1)])
def test_a_text_of_megabytes_is_not_parsed_again_for_each_wrapping(
    closers: int, times: int, parsed: list[int]
) -> None:
    [segment] = parse_echo("a</think>" * closers + "b")
    assert len(parsed) == times
    assert segment.content.endswith("b")
    assert segment.reasoning.startswith("a")


def test_reasoning_of_megabytes_is_not_parsed_again_for_each_wrapping(parsed: list[int]) -> None:
    text = "<think>" * 20_000 + "a" * 2_500_000
    assert parse_reasoning(text)
    assert sum(parsed) < 4 * len(text)
