"""docs/settings.md: its reference is the one that the declarations make, and it is whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mlx_backend
from mlx_backend.commands.options import options_by_group
from mlx_backend.commands.reference import main, render, replace_reference
from mlx_backend.registry.file_keys import MODEL_KEYS

PAGE = Path(mlx_backend.__file__).parents[1] / "docs/settings.md"


def test_the_page_has_the_reference_of_the_declarations() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert replace_reference(page) == page, "run: make docs"


def test_the_reference_names_every_option_and_every_key_of_the_models_file() -> None:
    named = set(re.findall(r"`(--[a-z-]+)", render()))
    assert named >= {option for group in options_by_group().values() for _, _, option, _ in group}
    for key in MODEL_KEYS:
        assert f"| `{key}` |" in render()


def test_every_row_has_the_cells_of_its_head() -> None:
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
    with pytest.raises(ValueError, match="settings:begin"):
        replace_reference("a page without markers")
