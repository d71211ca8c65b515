"""The references in docs/: they are those that the declarations make, and whole."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from docs_reference import families_reference, main, replace_reference, settings_reference

import mlx_backend
from mlx_backend.commands.options import options_by_group
from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.registry.config_file import MODEL_KEYS

if TYPE_CHECKING:
    from collections.abc import Callable

DOCS = Path(mlx_backend.__file__).parents[1] / "docs"


@pytest.mark.parametrize("name", ["settings.md", "families.md", "shared-server.md", "clients.md", "cli.md"])
def test_the_page_has_the_reference_of_the_declarations(name: str) -> None:
    page = (DOCS / name).read_text(encoding="utf-8")
    assert replace_reference(page) == page, "run: make docs"


def test_the_reference_names_every_option_and_every_key_of_the_models_file() -> None:
    named = set(re.findall(r"`(--[a-z-]+)", settings_reference()))
    assert named == {
        option
        for group in options_by_group().values()
        for _, setting, option, _ in group
        if not setting.hidden
    }
    for key in MODEL_KEYS:
        assert f"| `{key}` |" in settings_reference()


def test_the_families_are_those_that_parse_lists() -> None:
    # `parse --list` names DIALECTS (test_parse_dialects.py)
    assert re.findall(r"^\| `([^`]+)` \|", families_reference(), re.MULTILINE) == list(DIALECTS)


@pytest.mark.parametrize("render", [settings_reference, families_reference])
def test_every_row_has_the_cells_of_its_head(render: Callable[[], str]) -> None:
    for table in re.findall(r"(?:^\|.*\n)+", render(), re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_it_is_written_between_the_markers_and_nowhere_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- settings:begin -->\nstale text\n<!-- settings:end -->\nafter\n")
    assert main([str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- settings:begin -->\n\n### ")
    assert text.endswith("\n<!-- settings:end -->\nafter\n")
    assert "stale text" not in text
    with pytest.raises(ValueError, match="NAME:begin"):
        replace_reference("a page without markers")
