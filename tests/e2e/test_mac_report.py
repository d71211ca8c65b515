"""`make mac-report`, run on the demonstration model."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_backend.demo import MODEL_PATH

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "e2e" / "mac_report.py"


def run(output: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        str(SCRIPT),
        "--rounds",
        "1",
        "--prompts",
        "64",
        "256",
        "--output",
        str(output),
    ]
    return subprocess.run([*command, *arguments], cwd=ROOT, check=False, capture_output=True, text=True)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("report") / "mac-report.md"
    done = run(file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(file) in done.stdout
    return file.read_text(encoding="utf-8")


def figure(report: str, name: str) -> str:
    found = re.search(rf"^\| {re.escape(name)} \| (.*) \|$", report, re.MULTILINE)
    assert found is not None, name
    return found[1]


def test_every_part_has_its_figures(report: str) -> None:
    assert "| failed |" not in report
    assert figure(report, "model") == "mlx-demo"
    for name in ("mlx", "mlx-lm", "memory", "loaded in", "active memory at 100%", "prefill of 256 tokens"):
        assert re.search(r"\d", figure(report, name)), name
    both = re.findall(r"^\| (decode alone|8 replies at once) \| [\d.]+ tokens/s", report, re.MULTILINE)
    assert both == ["decode alone", "8 replies at once"] * 2  # the engine, and mlx-lm's batch generator


def test_two_requests_at_once_are_compared_with_each_alone(report: str) -> None:
    assert figure(report, "What is the capital of France?").startswith(("equal, ", "differ from"))
    assert figure(report, "Count to 15.").startswith(("equal, ", "differ from"))


def test_the_server_is_started_asked_and_stopped(report: str) -> None:
    assert figure(report, "answer") == "The capital of France is Paris."
    assert figure(report, "a second server on the port is refused") == "yes"
    assert figure(report, "stopped in").endswith("status 0")


def test_nothing_in_it_names_the_machine_or_a_folder(report: str) -> None:
    assert socket.gethostname() not in report or len(socket.gethostname()) < 4
    assert str(ROOT) not in report
    assert str(MODEL_PATH) not in report
    assert not re.search(r"(?<![\w.])(?:/[\w.-]+){2,}", report.replace("http://host.docker.internal", ""))


def test_a_part_that_fails_is_in_the_report_without_paths(tmp_path: Path) -> None:
    done = run(tmp_path / "report.md", "--model", str(tmp_path / "nowhere"))
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert done.returncode == 1
    assert "Failed, with the reason in the report: Loading, Over HTTP." in done.stdout
    assert "There is no folder" in text
    assert str(tmp_path) not in text
    assert "## Versions and machine" in text
