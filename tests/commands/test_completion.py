"""`mlx-backend completion`: what the shells make of it."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from mlx_backend.cli import COMMANDS, main
from mlx_backend.commands.completion import SHELLS

ROWS = [
    (["serv"], {"serve", "service"}),
    (["serve", "--drain"], {"--drain-seconds"}),
    (["service", "un"], {"uninstall"}),
    (["inspect", "ren"], {"render"}),
    (["completion", "z"], {"zsh"}),
    ([""], set(COMMANDS)),
]


@pytest.fixture(scope="module")
def bash_script() -> str:
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", printed.append)
        assert main(["completion", "bash"]) == 0
    return printed[0]


@pytest.mark.parametrize(("words", "offered"), ROWS)
def test_bash_offers_commands_and_options(bash_script: str, words: list[str], offered: set[str]) -> None:
    typed = ["mlx-backend", *words]
    complete = 'COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); _shtab_mlx_backend; printf "%s\\n" "${COMPREPLY[@]}"'
    program = f"{bash_script}\n{complete}"
    done = subprocess.run(["bash", "-c", program, "bash", *typed], capture_output=True, text=True, check=True)
    assert offered <= set(done.stdout.split())
    assert len(offered) > 3 or offered == set(done.stdout.split())


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_one_of_its_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "mlx-backend" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_the_shell_is_that_of_the_user(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHELL", "/bin/zsh")
    assert main(["completion"]) == 0
    assert capsys.readouterr().out.startswith("#compdef mlx-backend")
