"""The plot in the README is drawn from the tables, and from nothing else."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from benchmarks.peers import plot

TABLES = """
### Some table, n = 2

2026-11-21, 2 x86_64 cores, Linux, 20 arrivals each.

| | mlx-backend | mlx_lm.server | mlx-vlm | Rapid-MLX |
|--|--|--|--|--|
| a ratio (ms) | **21 ms (16-34)** | 42 ms (20-40) · 2.00× | failed: 500 | |
| times of the bare loop | 1.36× (+0.38) | **1.02× (+0.77)** | 2.72× (+0.9) | 1.36× (+0.66) |

### Another table
"""


def test_the_committed_plot_is_what_the_committed_tables_give() -> None:
    drawn = plot.draw(plot.rows(plot.TABLES.read_text(encoding="utf-8")))
    assert drawn == plot.PLOT.read_text(encoding="utf-8"), "run tests/benchmarks/bench_peers.py --plot"


def test_every_table_that_compares_servers_has_the_plot_that_it_gives_and_shows_it() -> None:
    text = plot.TABLES.read_text(encoding="utf-8")
    plots = plot.table_plots(text)
    assert len(plots) > 5
    for path, drawn in plots.items():
        assert drawn == path.read_text(encoding="utf-8"), "run tests/benchmarks/bench_peers.py --plot"
        assert f"](pictures/{path.name})" in text
    assert {path for path in plot.TABLE_PLOTS.iterdir() if path.suffix == ".svg"} == set(plots)


def test_a_tables_plot_has_its_rows_where_less_is_better_and_a_table_without_us_has_none() -> None:
    found = plot.table_rows(TABLES, "Some table, n = 2")
    assert [row.label for row in found] == ["a ratio (ms)", "times of the bare loop"]
    more = TABLES.replace("(ms) |", "(more is better) |")
    assert [row.label for row in plot.table_rows(more, "Some table, n = 2")] == ["times of the bare loop"]
    assert plot.table_rows(TABLES.replace("mlx-backend", "another"), "Some table, n = 2") == []


def test_a_figure_beyond_the_axis_is_drawn_at_its_end_and_labelled() -> None:
    drawn = plot.draw(
        [plot.Row("a", "2026-11-21", "2 cores, Linux", "one run", {"mlx-vlm": 313.0})], "Some table"
    )
    assert "Some table, as multiples" in drawn
    assert "313.00×" in drawn
    assert 'cx="776.0"' in drawn


def test_the_plot_is_svg_and_names_every_server_and_where_it_was_measured() -> None:
    svg = ElementTree.fromstring(plot.PLOT.read_text(encoding="utf-8"))
    text = "\n".join(element.text or "" for element in svg.iter("{http://www.w3.org/2000/svg}text"))
    assert all(name in text for name in (*plot.COLOURS, plot.OURS))
    assert "cores, Linux" in text
    assert "not measured on a Mac" in text


def test_a_row_has_the_ratios_that_its_cells_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        plot, "ROWS", (("Some", "a ratio", "first", "slow"), ("Some", "times of the bare loop", "second", ""))
    )
    first, second = plot.rows(TABLES)
    assert first == plot.Row(
        "first", "2026-11-21", "2 x86_64 cores, Linux", "slow, 20 arrivals each", {"mlx_lm.server": 2.0}
    )
    assert second.ratios == {"mlx_lm.server": 0.75, "mlx-vlm": 2.0, "Rapid-MLX": 1.0}


def test_a_row_that_is_not_in_the_tables_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "ROWS", (("Some", "no such row", "label", ""),))
    with pytest.raises(LookupError, match="no such row"):
        plot.rows(TABLES)
