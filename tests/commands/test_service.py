"""`mlx-backend service`: the files for launchd and systemd, and what the systems are told to do with them.

launchd is not here: its file is read by plistlib, and a program in its place records how it is called. systemd's own
analyser reads the unit.
"""

from __future__ import annotations

import json
import plistlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mlx_backend.cli import main
from mlx_backend.commands import service
from mlx_backend.commands.errors import CommandError
from mlx_backend.commands.service import LABEL, UNIT, Launchd, ServiceJob, Systemd
from mlx_backend.device.machine import Machine
from mlx_backend.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

AWKWARD = """./a b's "c" $HOME %h \\ 模"""
OPTIONS = ["--model", AWKWARD, "--port", "8091"]

# Keeps a line for each call, and answers what asks for a state: as launchctl and systemctl do of a job that runs.
FAKE = """#!/bin/sh
echo "$(basename "$0") $*" >> {log}
case "$*" in
  *bootout*|*disable*) rm -f {log}.running ;;
  *bootstrap*|*restart*) touch {log}.running ;;
  *print*) test -f {log}.running || exit 113; printf 'gui = {{\\n\\tstate = running\\n\\tpid = 7\\n}}\\n' ;;
  *show-user*) echo Linger=yes ;;
  *show*) test -f {log}.running && echo ActiveState=active || echo ActiveState=inactive
          echo UnitFileState=enabled; echo MainPID=7; echo NRestarts=0 ;;
esac
"""


class System:
    """A home, and what was asked of the programs that manage services."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.log = home / "calls.txt"

    def calls(self) -> list[str]:
        """Return the calls since the last time, without those that ask for a state."""
        text = self.log.read_text() if self.log.exists() else ""
        self.log.unlink(missing_ok=True)
        return [line for line in text.splitlines() if " print " not in line and "show" not in line]


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Machine], System]:
    """`system(machine)` is a system of that kind."""

    def make(machine: Machine) -> System:
        programs = tmp_path / "bin"
        programs.mkdir()
        for name in ("launchctl", "systemctl", "loginctl"):
            program = programs / name
            program.write_text(FAKE.format(log=shlex.quote(str(tmp_path / "calls.txt"))))
            program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
        monkeypatch.setattr(service, "this_machine", lambda: machine)
        folder = tmp_path / "a folder"
        folder.mkdir()
        monkeypatch.chdir(folder)
        return System(tmp_path)

    return make


MAC, LINUX = Machine(system="Darwin", processor="arm64", macos=15), Machine()
DOMAIN = "gui/"


def unit_words(text: str) -> list[str]:
    """The words of ExecStart as systemd reads them."""
    [line] = [line for line in text.splitlines() if line.startswith("ExecStart=")]
    return [
        word.replace("%%", "%").replace("$$", "$") for word in shlex.split(line.removeprefix("ExecStart="))
    ]


def test_systemd_is_told_the_words_folder_and_variables_as_they_are(
    system: Callable[[Machine], System], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = system(LINUX)
    monkeypatch.setenv("HF_HOME", "/my models/100%")
    assert main(["service", "install", *OPTIONS]) == 0
    text = (made.home / ".config/systemd/user" / UNIT).read_text()
    assert unit_words(text)[-5:] == ["serve", *OPTIONS]
    assert f"\nWorkingDirectory={made.home}/a folder\n" in text
    assert '\nEnvironment="HF_HOME=/my models/100%%"\n' in text
    verbs = ["daemon-reload", f"enable {UNIT}", f"restart {UNIT}"]
    assert made.calls() == [f"systemctl --user {verb}" for verb in verbs]
    assert "is installed and was started" in capsys.readouterr().out


@pytest.mark.parametrize("machine", [MAC, LINUX], ids=["launchd", "systemd"])
def test_what_the_address_of_a_mirror_holds_is_for_its_owner_alone(
    machine: Machine, system: Callable[[Machine], System], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = system(machine)
    monkeypatch.setenv("HF_ENDPOINT", "https://bob:secret@mirror.example")
    file = service.this_manager(made.home).file
    file.parent.mkdir(parents=True)
    file.touch(0o644)  # of a version before
    assert main(["service", "install"]) == 0
    assert "https://bob:secret@mirror.example" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600


def test_launchd_is_told_the_words_folder_and_variables_as_they_are(
    system: Callable[[Machine], System], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = system(MAC)
    monkeypatch.setenv("HF_HOME", "/my models/100%")
    assert main(["service", "install", *OPTIONS, "--drain-seconds", "50"]) == 0
    file = made.home / f"Library/LaunchAgents/{LABEL}.plist"
    agent = plistlib.loads(file.read_bytes())
    assert agent["ProgramArguments"][:2] == [sys.executable, "-P"]
    assert agent["ProgramArguments"][-7:] == ["serve", *OPTIONS, "--drain-seconds", "50"]
    assert agent["WorkingDirectory"] == f"{made.home}/a folder"
    assert agent["EnvironmentVariables"] == {"HF_HOME": "/my models/100%"}
    assert agent["ExitTimeOut"] > 50
    assert Path(agent["StandardErrorPath"]).parent.is_dir()
    [bootstrap] = made.calls()
    assert bootstrap.startswith(f"launchctl bootstrap {DOMAIN}")
    assert bootstrap.endswith(f"/{LABEL}.plist")


@pytest.mark.parametrize("machine", [MAC, LINUX], ids=["launchd", "systemd"])
def test_installing_twice_changes_nothing_and_other_options_start_it_anew(
    machine: Machine, system: Callable[[Machine], System], capsys: pytest.CaptureFixture[str]
) -> None:
    made = system(machine)
    assert main(["service", "install"]) == 0
    made.calls()
    assert main(["service", "install"]) == 0
    assert made.calls() == []
    assert "installed already, and runs" in capsys.readouterr().out
    assert main(["service", "install", "--port", "8091"]) == 0
    assert made.calls() != []
    assert "has changed and was started" in capsys.readouterr().out


@pytest.mark.parametrize("machine", [MAC, LINUX], ids=["launchd", "systemd"])
def test_what_is_installed_can_be_asked_for_and_removed(
    machine: Machine, system: Callable[[Machine], System], capsys: pytest.CaptureFixture[str]
) -> None:
    made = system(machine)
    assert main(["service", "status"]) == 1
    assert main(["service", "uninstall"]) == 0
    assert made.calls() == []
    main(["service", "install"])
    capsys.readouterr()
    assert main(["service", "status", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["installed"]
    assert status["pid"] == "7"
    made.calls()
    assert main(["service", "uninstall"]) == 0
    assert [call.split()[1 + (machine is LINUX)] for call in made.calls()] == [
        "disable" if machine is LINUX else "bootout"
    ]
    assert not Path(status["file"]).exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prot", "1"], "unknown option --prot; did you mean --port?"),
        (["--port", "many"], "--port"),
        (["--api-key", "secret"], "--api-key-file"),
        (["--host", "0.0.0.0"], "set a key"),
    ],
)
def test_options_are_looked_at_before_anything_is_written(
    options: list[str],
    message: str,
    system: Callable[[Machine], System],
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = system(LINUX)
    with pytest.raises(SystemExit) as exited:
        main(["service", "install", *options])
    assert exited.value.code == 2
    assert message in capsys.readouterr().err
    assert not (made.home / ".config").exists()
    assert made.calls() == []


def test_variables_that_the_service_does_not_see_are_named(
    system: Callable[[Machine], System], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = system(LINUX)
    monkeypatch.setenv("MLX_BACKEND_PORT", "8091")
    monkeypatch.setenv("MLX_BACKEND_API_KEY", "secret")
    assert main(["service", "install"]) == 0
    said = capsys.readouterr().err
    assert "$MLX_BACKEND_PORT" in said
    assert "$MLX_BACKEND_API_KEY" in said
    assert "secret" not in said + (made.home / ".config/systemd/user" / UNIT).read_text()


def test_a_dry_run_prints_the_file_and_writes_none(
    system: Callable[[Machine], System], capsys: pytest.CaptureFixture[str]
) -> None:
    made = system(LINUX)
    assert main(["service", "install", "--dry-run", *OPTIONS]) == 0
    assert "--dry-run" not in unit_words(capsys.readouterr().out)
    assert made.calls() == []
    assert not (made.home / ".config").exists()


def test_a_system_that_refuses_is_quoted_and_the_file_stays(
    system: Callable[[Machine], System], capsys: pytest.CaptureFixture[str]
) -> None:
    made = system(LINUX)
    (made.home / "bin/systemctl").write_text(
        "#!/bin/sh\necho 'Failed to connect to bus: No medium found' >&2; exit 1\n"
    )
    assert main(["service", "install"]) == 1
    said = capsys.readouterr().err
    assert "is written, but the service was not started" in said
    assert "No medium found Your session has no systemd" in said.replace("\n", " ")


def test_where_there_is_no_systemd_it_says_what_to_do_instead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["service", "status"]) == 1
    assert "in a container that is its command" in capsys.readouterr().err


def job(*words: str, folder: str = "/") -> ServiceJob:
    return ServiceJob(command=words, folder=Path(folder), variables={}, stop_seconds=40)


def test_a_line_break_in_an_option_is_refused_by_systemd_alone() -> None:
    with pytest.raises(CommandError, match="line break"):
        Systemd(Path("/")).text(job("a", "b\nUser=root"))
    text = Launchd(Path("/")).text(job("a", "b\nc"))
    assert plistlib.loads(text.encode())["ProgramArguments"] == ["a", "b\nc"]


@pytest.mark.parametrize("folder", ["/models\nExecStartPre=/bin/false", "/models\\", "/models "])
def test_a_folder_that_would_be_read_as_another_is_refused_by_systemd(folder: str) -> None:
    with pytest.raises(CommandError, match="A unit of systemd cannot"):
        Systemd(Path("/")).text(job(folder=folder))


def test_systemds_analyser_finds_nothing_wrong(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    folder = tmp_path / "a folder 100%"
    folder.mkdir()
    unit = tmp_path / UNIT
    # The tests' own Python may lie in a folder with any name.
    unit.write_text(Systemd(tmp_path).text(job(sys.executable, *OPTIONS, folder=str(folder))))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(unit)],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_time_to_stop_is_longer_than_that_of_running_replies(
    system: Callable[[Machine], System], capsys: pytest.CaptureFixture[str]
) -> None:
    system(LINUX)
    assert main(["service", "install", "--dry-run"]) == 0
    [line] = [each for each in capsys.readouterr().out.splitlines() if each.startswith("TimeoutStopSec=")]
    assert int(line.partition("=")[2]) > Settings().drain_seconds
