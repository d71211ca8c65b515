"""What `make` sets up: which Python it takes, and an environment that finds the clone wherever the clone lies."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import mlx_backend

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("python3.12", "python3.13", "python3.14", "python3")
# A Python that says it is of another version, for `python -c`.
PRETENDER = """#!/bin/sh
exec "{python}" -c 'import sys; sys.version_info = ({version}); exec(sys.argv[2])' "$@"
"""


class Machine:
    """A PATH whose Pythons are of these versions; those that are not named cannot be run."""

    def __init__(self, folder: Path, **versions: str) -> None:
        self.folder = folder
        for name in NAMES:
            version = versions.get(name.replace(".", "_"))
            text = (
                PRETENDER.format(python=sys.executable, version=version)
                if version
                else "#!/bin/sh\nexit 127\n"
            )
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)

    def make(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run make in the clone, with environments that are not there yet."""
        places = {"VENV": "venv", "VENV_DIFY": "venv-dify", "VENV_PLUGIN": "venv-plugin"}
        command = ["make", *(f"{name}={self.folder}/{place}" for name, place in places.items()), *arguments]
        environment = {"PATH": f"{self.folder}:{os.environ['PATH']}", "LC_ALL": "C.UTF-8"}
        return subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("versions", "taken"),
    [
        ({"python3_12": "3, 12", "python3_13": "3, 13", "python3": "3, 14"}, "python3.12"),
        ({"python3_13": "3, 13", "python3": "3, 11"}, "python3.13"),
        ({"python3_14": "3, 14", "python3": "3, 15"}, "python3.14"),
        ({"python3": "3, 14"}, "python3"),
    ],
)
def test_the_first_python_that_fits_is_taken(tmp_path: Path, versions: dict[str, str], taken: str) -> None:
    done = Machine(tmp_path, **versions).make("--dry-run", "setup")
    assert f"\n{taken} -m venv" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("version", ["3, 11", "3, 15"])
def test_a_python_that_is_too_old_or_too_new_is_refused_before_anything_is_made(
    tmp_path: Path, version: str
) -> None:
    done = Machine(tmp_path, python3=version).make("setup")
    assert done.returncode != 0
    assert "Python 3.12, 3.13 or 3.14 is needed, and none of them was found." in done.stdout
    assert "make setup PYTHON=" in done.stdout
    assert not (tmp_path / "venv").exists()


def test_a_python_that_was_named_is_not_replaced_by_another(tmp_path: Path) -> None:
    machine = Machine(tmp_path, python3_12="3, 12", python3="3, 15")
    done = machine.make("setup", "PYTHON=python3")
    assert done.returncode != 0
    assert "and python3 is none of them." in done.stdout


def test_difys_engine_gets_a_python_that_it_takes_or_says_which(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / ".ready").touch()
    newest = Machine(tmp_path, python3_14="3, 14").make("test-dify")
    assert newest.returncode != 0
    assert "Dify's workflow engine needs Python 3.12 or 3.13, and neither was found." in newest.stdout
    both = Machine(tmp_path, python3_13="3, 13", python3_14="3, 14").make("--dry-run", "test-dify")
    assert f"python3.13 -m venv {tmp_path}/venv-dify" in both.stdout


def test_setup_that_was_done_says_what_to_run_next(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / ".ready").touch()
    done = Machine(tmp_path, python3_12="3, 12").make("setup")
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first == f"{tmp_path}/venv is ready. Next:"
    assert rest[0].split()[0] == f"{tmp_path}/venv/bin/mlx-backend"
    assert "make demo" in rest[2]


def test_tools_for_developers_come_with_the_commands_that_need_them(tmp_path: Path) -> None:
    machine = Machine(tmp_path, python3_12="3, 12")
    for command, has_tools in (
        ("setup", False),
        ("demo", False),
        ("test", True),
        ("check", True),
    ):
        printed = machine.make("--dry-run", command).stdout
        assert "install.py plugin running" in printed, command
        assert ("install.py developing" in printed) is has_tools, command


def test_the_plugin_is_packed_with_what_it_needs_alone_or_by_the_environment_that_is_there(
    tmp_path: Path,
) -> None:
    machine = Machine(tmp_path, python3_12="3, 12")
    alone = machine.make("--dry-run", "plugin").stdout
    assert "install.py plugin ||" in alone
    assert f"{tmp_path}/venv-plugin/bin/python -m dify_mlx_provider.packaging.package" in alone
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / ".ready").touch()
    there = machine.make("--dry-run", "plugin").stdout
    assert "install.py" not in there
    assert f"{tmp_path}/venv/bin/python -m dify_mlx_provider.packaging.package" in there


def test_the_parts_of_the_lock_are_what_running_needs_what_sees_and_the_rest(tmp_path: Path) -> None:
    install = runpy.run_path(str(ROOT / ".ci/install.py"))
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    names = {
        part: set(re.findall(r"^([a-z0-9-]+)==", install["part_of"](lock, part), re.M))
        for part in install["PARTS"]
    }
    assert {"dify-plugin", "requests", "pyyaml"} <= names["plugin"]
    assert {"mlx", "mlx-lm", "waitress"} <= names["running"]
    assert {"pytest", "ruff", "mypy", "openai"} <= names["developing"]
    assert names["vision"] == {"mlx-vlm", "pillow"}
    assert sorted(name for part in names.values() for name in part) == sorted(
        re.findall(r"^([a-z0-9-]+)==", lock, re.M)
    )


def test_while_packages_are_installed_it_says_which(capsys: pytest.CaptureFixture[str]) -> None:
    said = [
        "Collecting mlx==1 (from -r x)",
        "  Downloading mlx-1-py3-none-any.whl (10.5 MB)",
        "Installing collected",
    ]
    pip = [sys.executable, "-c", f"print(*{said!r}, sep=chr(10)); raise SystemExit(3)"]
    assert runpy.run_path(str(ROOT / ".ci/install.py"))["run"](pip, 7) == 3
    assert capsys.readouterr().out.splitlines() == [
        "  1 of 7: mlx",
        "  1 of 7: mlx (10.5 MB)",
        "  writing 7 packages",
    ]


def test_the_pythons_that_are_tried_are_those_that_the_project_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest, below = (int(minor) for minor in re.findall(r"3\.(\d+)", project["requires-python"]))
    named = {f"python3.{minor}" for minor in range(oldest, below)} | {"python3"}
    assert named == set(NAMES)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert " ".join(NAMES) in makefile
    assert set(re.findall(r"\$\(call python_below,(\d+)\)", makefile)) == {str(below), "14"}
    classified = {entry.rpartition(" ")[2] for entry in project["classifiers"] if " :: 3." in entry}
    assert classified == {f"3.{minor}" for minor in range(oldest, below)}


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A new environment in a folder whose name has a space, as iCloud's has, linked to a clone next to it."""
    clone = tmp_path / "Mobile Documents" / "clone"
    for folder in ("mlx_backend", "dify_mlx_provider"):
        shutil.copytree(ROOT / folder, clone / folder, ignore=shutil.ignore_patterns("model", "__pycache__"))
    (clone / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/link.py", clone / ".ci")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(clone / ".venv")], check=True)
    link(clone)
    return clone / ".venv"


def link(clone: Path) -> subprocess.CompletedProcess[str]:
    command = [str(clone / ".venv/bin/python"), str(clone / ".ci/link.py")]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def outside(folder: Path, *command: object) -> subprocess.CompletedProcess[str]:
    """Run a command in an unrelated folder, in which a file has the name of one of Python's own modules."""
    (folder / "argparse.py").write_text("raise SystemExit('the wrong module')")
    unset = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        list(map(str, command)), cwd=folder, env=unset, check=False, capture_output=True, text=True
    )


def test_the_clone_is_found_without_any_pth_file(environment: Path, tmp_path: Path) -> None:
    assert list(environment.rglob("*.pth")) == []
    for package in ("mlx_backend", "dify_mlx_provider"):
        code = f"import {package}; print({package}.__path__[0])"
        done = outside(tmp_path, environment / "bin/python", "-I", "-c", code)
        assert Path(done.stdout.strip()).resolve() == environment.parent / package, done.stderr


def test_the_command_runs_what_lies_in_the_clone_now(environment: Path, tmp_path: Path) -> None:
    command = environment / "bin/mlx-backend"
    assert outside(tmp_path, command, "--version").stdout.startswith("mlx-backend ")
    version = environment.parent / "mlx_backend/__init__.py"
    version.write_text(version.read_text().replace(f'"{mlx_backend.__version__}"', '"77.0"'))
    assert outside(tmp_path, command, "--version").stdout == "mlx-backend 77.0\n"


def test_linking_again_changes_nothing_and_an_installed_copy_is_reported(environment: Path) -> None:
    assert link(environment.parent).returncode == 0
    (installed,) = environment.glob("lib/*/site-packages/mlx_backend")
    installed.unlink()
    installed.mkdir()
    done = link(environment.parent)
    assert done.returncode != 0
    assert "is an installed copy" in done.stderr


def test_a_machine_that_mlx_does_not_run_on_is_told_so_before_anything_is_made(tmp_path: Path) -> None:
    machine = Machine(tmp_path, python3_12="3, 12")
    intel = 'import platform; platform.system = lambda: "Darwin"; platform.machine = lambda: "x86_64"; '
    intel += 'platform.mac_ver = lambda: ("15.3", (), ""); '
    script = (tmp_path / "python3.12").read_text(encoding="utf-8")
    (tmp_path / "python3.12").write_text(script.replace("exec(sys.argv[2])", intel + "exec(sys.argv[2])"))
    done = machine.make("setup")
    assert done.returncode != 0
    assert "this one has an Intel processor" in done.stderr
    assert not (tmp_path / "venv").exists()
