"""`make demo`, as the README prints it, run to its end."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def shown() -> str:
    """What a person sees."""
    done = subprocess.run(
        ["make", "demo", "ARGS=--once"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_thinking_grows_visibly_with_the_effort_and_the_answer_stays(shown: str) -> None:
    tokens = [
        int(count) for count in re.findall(r"^(?:low|medium|high): (\d+) tokens of thinking", shown, re.M)
    ]
    low, medium, high = tokens[:3]
    assert low * 2 < medium
    assert medium * 1.5 < high
    assert shown.count("The capital of France is Paris.") == 3


def test_the_second_turn_and_the_tool_call_are_shown(shown: str) -> None:
    assert "The capital of Italy is Rome." in shown
    called, _, answered = shown.partition("calls current_time({})")
    assert answered, called
    told = re.search(r"the tool answers (.+)", answered)
    assert told is not None
    assert answered.count(told[1]) == 2


def test_nothing_of_the_models_own_markers_is_shown(shown: str) -> None:
    assert "<|" not in shown
    assert "Traceback" not in shown
