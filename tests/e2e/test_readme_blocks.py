"""What counts as "printed the same": shortened JSON and gaps do, another value does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from readme_blocks import blocks, commands, differences

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("printed", "actual"),
    [
        ('{"a": 1}', '{"a": 1, "b": 2}'),
        ('{"id": "chatcmpl-…"}', '{"id": "chatcmpl-7f"}'),
        ('{"list": ["…"]}', '{"list": [1, 2]}'),
        ("effort: high\nignored: …", "HTTP/1.1 200 OK\r\nignored: user\r\neffort: high\r\n"),
    ],
)
def test_output_may_be_shortened(printed: str, actual: str) -> None:
    assert differences(printed, actual) == []


@pytest.mark.parametrize(
    ("printed", "actual"),
    [
        ('{"a": 1}', '{"a": 2}'),
        ('{"a": 1}', "{}"),
        ('{"a": {"b": "x"}}', '{"a": {"b": "y"}}'),
        ('{"list": ["…"]}', '{"list": []}'),
        ('{"list": [1]}', '{"list": [1, 2]}'),
        ("effort: high", "effort: higher"),
    ],
)
def test_output_that_differs_is_named(printed: str, actual: str) -> None:
    assert len(differences(printed, actual)) == 1


def test_blocks_are_found_in_lists_and_commands_over_several_lines(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("1. do\n\n   ```console\n   $ one \\\n     two\n   out\n   $ three '\n   x'\n   ```\n")
    assert [(command.line, command.output) for command in commands(page)] == [
        ("one \\\n  two", "out"),
        ("three '\nx'", ""),
    ]
    assert blocks(page, "json") == []
