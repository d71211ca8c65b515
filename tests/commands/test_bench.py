"""`mlx-backend bench`: what it sends, what it makes of the replies, and what it says of them."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from typing import TYPE_CHECKING, Any

import pytest

from mlx_backend.cli import main
from mlx_backend.commands.bench import Case, Figure, Row, TimedReply, drawn, remarks

if TYPE_CHECKING:
    from pathlib import Path

ABOUT: dict[str, Any] = {
    "model": "<m> & 'n'",
    "url": "http://127.0.0.1:1",
    "version": "1",
    "runs": 3,
    "processors": 4,
    "load_before": 0.1,
    "load_after": 0.2,
}
ALONE = Case(256, None, 1, "context")


def reply(sent: float, first: float, end: float, tokens: int, answer: float | None = None) -> TimedReply:
    return TimedReply(sent, first, answer, end, prompt_tokens=300, tokens=tokens, reasoning_tokens=0)


def test_rates_are_from_the_first_token_on_and_of_all_at_once_from_the_first_of_any() -> None:
    row = Row.of(Case(256, None, 2, "requests"), [[reply(0, 1, 3, 21), reply(0, 2, 5, 31)]])
    assert row.rate == Figure(10, 10, 10)
    assert row.total_rate == Figure((21 + 31 - 1) / 4, (21 + 31 - 1) / 4, (21 + 31 - 1) / 4)
    assert row.first == Figure(1.5, 1.25, 1.75)


def test_a_reply_of_one_token_has_no_rate_and_that_is_said() -> None:
    row = Row.of(ALONE, [[reply(0, 1, 1, 1)]])
    assert row.rate is None
    assert "a token or none" in remarks(ABOUT, [row])[-1]


def test_an_answer_that_was_not_reached_in_each_run_has_no_time() -> None:
    case = Case(256, "high", 1, "effort")
    assert Row.of(case, [[reply(0, 1, 3, 9, answer=2)], [reply(0, 1, 3, 9)]]).answer is None
    assert Row.of(case, [[reply(0, 1, 3, 9, answer=2)]]).answer == Figure(2, 2, 2)


@pytest.mark.parametrize(("load", "is_busy"), [(0.1, False), (3.0, True)])
def test_a_busy_machine_is_named(load: float, is_busy: bool) -> None:
    said = " ".join(remarks(ABOUT | {"load_before": load}, []))
    assert f"Load of this machine: {load} before" in said
    assert ("It was busy before" in said) == is_busy


def test_the_drawing_is_xml_whatever_the_model_is_called() -> None:
    rows = [
        Row.of(ALONE, [[reply(0, 1, 3, 21)]]),
        Row.of(Case(1, "none", 1, "effort"), [[reply(0, 1, 1, 1)]]),
    ]
    svg = drawn(ABOUT, rows)
    root = ElementTree.fromstring(svg)
    assert "<m> & 'n'" in "".join(root.itertext()).replace("\xa0", " ")
    assert "url(" not in svg.replace("url(#", ""), "nothing that a browser would fetch"


def test_the_demo_model_is_measured_by_a_server_of_its_own(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_BACKEND_PORT", "9")
    svg = tmp_path / "bench.svg"
    words = ["--context", "64,128", "--effort", "none,low", "--requests", "2", "--runs", "1", "--tokens", "8"]
    assert main(["bench", "mlx-demo", *words, "--svg", str(svg), "--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert said["model"] == "mlx-demo"
    assert [row["varies"] for row in said["rows"]] == ["context", "context", "effort", "effort", "requests"]
    short, long, none, low, _ = said["rows"]
    assert short["prompt_tokens"] < long["prompt_tokens"]
    assert none["reasoning_tokens"] == 0 < low["reasoning_tokens"]
    assert short["completion_tokens"] == 8
    assert all(row["first_token_seconds"]["median"] > 0 for row in said["rows"])
    ElementTree.parse(svg)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--context", "0"], "'0' is not a whole number from 1 to"),
        (["--runs", "x"], "'x' is not a whole number from 1 to"),
    ],
)
def test_a_wrong_number_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["bench", *words])
    assert exited.value.code == 2
    assert message in capsys.readouterr().err
