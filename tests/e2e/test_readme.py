"""Every command the README prints is run here, in the order of the page.

What differs from a reader's machine: ports are free ones, and there is no network, so a command that names a model to
download must end with the sentence the server has for that.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from readme_blocks import Command, commands
from tour import server

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
COMMANDS = commands(README)
# `make demo` is test_demo.py's, `make test` is what is running.
MAKE = [command.line for command in COMMANDS if command.line.startswith("make ")]


PAGES = [
    README,
    *sorted((ROOT / "readme").glob("*.md")),
    ROOT / "tests/e2e/README.md",
    ROOT / "CONTRIBUTING.md",
]


def run(line: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "KEY": "secret"}
    return subprocess.run(
        line, shell=True, cwd=ROOT, env=environment, check=False, capture_output=True, text=True
    )


def printed(start: str) -> Command:
    (command,) = [command for command in COMMANDS if command.line.startswith(start)]
    return command


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with server() as (_, address):
        yield address


def test_every_command_is_known_to_these_tests() -> None:
    known = ("make ", ".venv/bin/mlx-backend", "curl ", "printf ", "echo ")
    assert [command.line for command in COMMANDS if not command.line.startswith(known)] == []


@pytest.mark.parametrize("line", MAKE)
def test_each_make_command_is_there(line: str) -> None:
    assert run(line.replace("make ", "make --dry-run ", 1)).returncode == 0


def test_the_server_starts_and_says_what_the_page_says() -> None:
    expected = next(c.output for c in COMMANDS if c.line == ".venv/bin/mlx-backend").splitlines()
    command = [str(ROOT / ".venv/bin/mlx-backend"), "--port", "0"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        said = [process.stdout.readline().rstrip("\n") for _ in expected]
    finally:
        process.terminate()
        process.communicate()
    port = re.search(r"Listening on http://127\.0\.0\.1:(\d+)", "\n".join(said))
    assert port is not None
    assert [line.replace(port[1], "8080") for line in said] == expected


def test_naming_a_model_that_cannot_be_downloaded_ends_in_a_sentence() -> None:
    done = run(printed(".venv/bin/mlx-backend --model").line.replace("0.0.0.0", "127.0.0.1"))
    assert done.returncode == 1
    assert "mlx-community/gpt-oss-20b-MXFP4-Q8" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_curl_is_answered_as_printed(address: str) -> None:
    done = run(printed("curl ").line.replace("http://127.0.0.1:8080", address))
    answer = json.loads(done.stdout)
    (shown,) = re.findall(r"^```json\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)
    assert answer["choices"] == json.loads(shown)["choices"]


def test_the_openai_client_is_answered(address: str) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)
    done = subprocess.run(
        [ROOT / ".venv/bin/python", "-c", code.replace("http://127.0.0.1:8080", address)],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "The capital of France is Paris."


@pytest.mark.parametrize("start", ["printf ", "echo "])
def test_the_debugging_commands_print_what_the_page_says(start: str) -> None:
    command = printed(start)
    done = run(command.line)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(command.output)


@pytest.fixture(scope="module")
def options() -> set[str]:
    """Every option of `mlx-backend serve`."""
    return set(re.findall(r"--[a-z][a-z-]+", run(".venv/bin/mlx-backend serve --help").stdout))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_names_only_options_and_make_commands_that_there_are(page: Path, options: set[str]) -> None:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"^[$ ]*(?:\.venv/bin/)?mlx-backend (.*)", text, re.M)
    named = {option for command in commands for option in re.findall(r"(?<!\S)--[a-z][a-z-]+", command)}
    named |= set(re.findall(r"`(--[a-z][a-z-]+)(?: [A-Z]+| [\d.]+)?`", text))
    assert named - options == set()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert set(re.findall(r"(?:^\$ |`|^)make ([a-z-]+)", text, re.M)) - targets == set()


def test_the_steps_for_a_real_dify_play_every_flow_there_is() -> None:
    page = (ROOT / "tests/e2e/README.md").read_text(encoding="utf-8")
    flows = {path.name for path in (ROOT / "tests/graphon/flows").glob("*.yaml")}
    assert set(re.findall(r"`(\w+\.yaml)`", page)) == flows
