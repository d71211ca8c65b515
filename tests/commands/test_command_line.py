"""The frame that all commands share: which there are, what is misspelt, help, and exit codes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_backend import __version__
from mlx_backend.cli import COMMANDS, command_parser, main
from mlx_backend.commands.errors import EXIT_CODES


@pytest.mark.parametrize("words", [["help"], ["--help"], ["-h"], ["help", "help"], ["help", "version"]])
def test_help_lists_every_command_and_the_exit_codes(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    page = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name}" in page
        assert command.help in page
    for code, meaning in EXIT_CODES.items():
        assert f"{code} {meaning}" in page


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_module_a_description_and_help(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert importlib.util.find_spec(f"mlx_backend.commands.{name}") is not None
    assert command_parser(name).description
    with pytest.raises(SystemExit) as exited:
        main(["help", name])
    assert exited.value.code == 0
    assert "usage: mlx-backend" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--version"], ["-V"], ["version"]])
def test_the_version_is_said_in_three_ways(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert capsys.readouterr().out.startswith(f"mlx-backend {__version__}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["banana"], "unknown command 'banana'; `mlx-backend help` lists them all"),
        (["pars"], "unknown command 'pars'; did you mean parse?"),
        (["help", "pars"], "did you mean parse?"),
        (["version", "--json"], "nothing comes after `mlx-backend version`"),
        (["owner/model"], "`mlx-backend serve owner/model`"),
        (["--prot", "0"], "unknown option --prot; did you mean --port?"),
        (["serve", "--prot=0"], "unknown option --prot; did you mean --port?"),
        (["serve", "--max-tok", "7"], "unknown option --max-tok; did you mean --max-tokens?"),
        (["serve", "--effort", "low"], "unknown option --effort; did you mean --reasoning-effort?"),
        (["serve", "--tls-cert", "x"], "unknown option --tls-cert\n"),
        (["--max-kv-size", "4096"], "--max-kv-size was removed: --context-length limits what"),
        (["inspect"], "required: parse|render|sanitise"),
        (["parse", "--dialekt", "x"], "unknown option --dialekt; did you mean --dialect?"),
    ],
)
def test_what_is_misspelt_is_refused_with_what_was_perhaps_meant(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(words)
    except SystemExit as exited:
        status = int(exited.code or 0)
    assert status == 2
    assert message in capsys.readouterr().err


COMMAND = f"'{sys.executable}' -P -m mlx_backend"


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        ("help | head -n 1 > /dev/null; exit ${PIPESTATUS[0]}", {0, 1}, ""),
        ("help >&-", {0}, ""),
        ("list --json >&-", {0}, ""),
        ("show mlx-demo <&- >&- 2>&-", {0}, ""),
        ("help > /dev/full", {1}, "mlx-backend: The output cannot be written: No space left on device"),
        ("list > /dev/full", {1}, "mlx-backend: The output cannot be written: No space left on device"),
        (
            "parse --list > /dev/full",
            {1},
            "mlx-backend: The output cannot be written: No space left on device",
        ),
    ],
)
def test_an_output_that_takes_nothing_is_no_traceback(line: str, status: set[int], said: str) -> None:
    if "/dev/full" in line and not Path("/dev/full").exists():
        pytest.skip("this system has no device that is always full")
    done = subprocess.run(["bash", "-c", f"{COMMAND} {line}"], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode in status
    assert done.stderr.strip() == said
