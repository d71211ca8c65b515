"""`make demo`, run to its end."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from readme_blocks import blocks, differences
from tour import ABOUT_A_PICTURE, PASSAGES, SEARCHES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def printed() -> str:
    """What a person sees."""
    done = subprocess.run(
        ["make", "demo", "ARGS=--once"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_thinking_grows_visibly_with_the_effort_and_the_answer_stays(printed: str) -> None:
    tokens = [
        int(count)
        for count in re.findall(r"^(?:low|medium|high): (\d+) tokens of thinking", printed, re.MULTILINE)
    ]
    low, medium, high = tokens[:3]
    assert low * 2 < medium
    assert medium * 1.5 < high
    assert printed.count("The capital of France is Paris.") == 3


def test_the_second_turn_and_the_tool_call_are_shown(printed: str) -> None:
    assert "The capital of Italy is Rome." in printed
    called, _, answered = printed.partition("calls current_time({})")
    assert answered, called
    result = re.search(r"the tool answers (.+)", answered)
    assert result is not None
    assert answered.count(result[1]) == 2


def test_a_picture_is_answered_and_asked_about_again(printed: str) -> None:
    first, second = (printed.index(f"● {question}") for question in ABOUT_A_PICTURE)
    assert printed[first:second].splitlines()[2].strip() == "A red circle and a blue square."
    assert printed[second:].splitlines()[2].strip() == "A blue square."


def test_a_knowledge_base_is_searched_in_three_languages(printed: str) -> None:
    about_passwords, about_vacation, about_the_printer = SEARCHES
    vacation, printer, passwords = PASSAGES
    for question, found in (
        (about_passwords, passwords),
        (about_vacation, vacation),
        (about_the_printer, printer),
    ):
        assert f"  {question}\n    {found}\n" in printed


def test_nothing_of_the_models_own_markers_is_shown(printed: str) -> None:
    assert "<|" not in printed
    assert "<think>" not in printed  # after a tool's result the block begins after a blank line
    assert "Traceback" not in printed


def test_the_page_for_dify_prints_what_is_printed(printed: str) -> None:
    (shown,) = [block for block in blocks(ROOT / "docs/dify.md", "text") if block.startswith("●")]
    assert differences(shown.strip(), printed) == []
