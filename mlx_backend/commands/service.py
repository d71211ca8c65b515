"""`mlx-backend service`: has the system start the server at login, and again when it ends.

    service install [option of serve …]     a launchd agent on a Mac, a systemd user unit on Linux; again after a change
    service uninstall | status | logs

Both run `serve` with the options that `install` was given, in the folder where it was. No key is written into their
files, which are for their owner alone all the same: the address of a mirror, in HF_ENDPOINT, may have a password.
Knows the files and the commands of the two systems; what the server does is its own.
"""

from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_backend.commands.errors import CommandError, argument
from mlx_backend.commands.files import write_file
from mlx_backend.commands.terminal import add_json_option, print_fields, print_json
from mlx_backend.declaration import whole
from mlx_backend.device.machine import this_machine

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

LABEL = "local.mlx-backend"
UNIT = "mlx-backend.service"
CARRIED_VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT")
"""Variables that say where models are: the service gets them as they are when it is installed."""
STOP_MARGIN = 10
"""Seconds for stopping beyond those for running replies."""
RESTART_SECONDS = 30
LOG_LINES = 100
RUNNING = ("active", "running")
"""What systemd, or launchd, says of a job that runs."""
_KEY_ADVICE = "put it into a file of keys and name that with --api-key-file (docs/shared-server.md)"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Have the system start the server at login, and again when it ends: by launchd or systemd."
    )
    actions = parser.add_subparsers(dest="action", metavar="install|uninstall|status|logs", required=True)
    # No word begins with its prefix: what `serve` would take is taken as it is, and looked at by a parser of serve's.
    install = actions.add_parser(
        "install",
        prefix_chars="\0",
        add_help=False,
        usage="mlx-backend service install [--dry-run] [option of serve …]",
        help="write its file and start it; again after a change of options",
        description="Takes the options of `serve`; with --dry-run it prints the file and changes nothing.",
    )
    install.add_argument("options", nargs="*", help="options of `serve`")
    install.set_defaults(do=_install, new_parser=type(parser))

    def add_action(
        name: str, do: Callable[[argparse.Namespace], int], summary: str
    ) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=summary, description=f"{summary.capitalize()}.")
        action.set_defaults(do=do)
        return action

    add_action("uninstall", _uninstall, "stop it and remove its file")
    add_json_option(add_action("status", _status, "say whether it is installed and runs"))
    logs = add_action("logs", _logs, "show the end of its log")
    logs.add_argument("-f", "--follow", action="store_true", help="go on showing what is written")
    logs.add_argument(
        "-n",
        "--lines",
        type=argument(whole(0)),
        default=LOG_LINES,
        help=f"lines to show (default: {LOG_LINES})",
    )


def run(arguments: argparse.Namespace) -> int:
    """Do one of the four; return the exit status."""
    status: int = arguments.do(arguments)
    return status


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceJob:
    """What the system is to run: words of a command, the folder it runs in, and variables."""

    command: Sequence[str]
    folder: Path
    variables: Mapping[str, str]
    stop_seconds: int


@dataclass(frozen=True, slots=True)
class Launchd:
    """An agent of the user's, on a Mac. Not tried on one: `tests/e2e/MAC.md` asks for that."""

    home: Path

    @property
    def file(self) -> Path:
        """Where the job's file belongs."""
        return self.home / "Library/LaunchAgents" / f"{LABEL}.plist"

    @property
    def _log(self) -> Path:
        return self.home / "Library/Logs/mlx-backend.log"

    @property
    def _domain(self) -> str:
        return f"gui/{os.getuid()}"

    def text(self, job: ServiceJob) -> str:
        """Return what the file says. Raises CommandError for what it cannot say."""
        agent = {
            "Label": LABEL,
            "ProgramArguments": list(job.command),
            "WorkingDirectory": str(job.folder),
            "EnvironmentVariables": dict(job.variables),
            "RunAtLoad": True,
            "KeepAlive": True,
            "ThrottleInterval": RESTART_SECONDS,
            "ExitTimeOut": job.stop_seconds,
            "ProcessType": "Interactive",  # or macOS slows it down as work in the background
            "StandardOutPath": str(self._log),
            "StandardErrorPath": str(self._log),
        }
        return plistlib.dumps(agent, sort_keys=False).decode()

    def start(self) -> None:
        """Have the system read the file and run the job anew, now and at every login."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self.stop()
        _done("launchctl", "bootstrap", self._domain, str(self.file))

    def stop(self) -> None:
        """Have the system stop the job and forget it. Nothing happens if it does not know it."""
        if self.state()["state"] != "stopped":
            _done("launchctl", "bootout", f"{self._domain}/{LABEL}")

    def state(self) -> dict[str, str]:
        """Return what the system says of the job; `state` is one word of its own."""
        printed = _ran("launchctl", "print", f"{self._domain}/{LABEL}")
        if printed.returncode != 0:
            return {"state": "stopped"}
        said = (line.strip().partition(" = ") for line in printed.stdout.splitlines())
        named = {name: value for name, equals, value in said if equals}
        return {"state": named.get("state", "running")} | ({"pid": named["pid"]} if "pid" in named else {})

    def log_command(self, lines: int, *, follow: bool) -> list[str]:
        """Return the command that shows the log."""
        return ["tail", "-n", str(lines), *(["-F"] if follow else []), str(self._log)]


@dataclass(frozen=True, slots=True)
class Systemd:
    """A unit of the user's own systemd, on Linux."""

    home: Path

    @property
    def file(self) -> Path:
        """Where the job's file belongs."""
        configuration = os.environ.get("XDG_CONFIG_HOME") or self.home / ".config"
        return Path(configuration) / "systemd/user" / UNIT

    def text(self, job: ServiceJob) -> str:
        """Return what the file says. Raises CommandError for what it cannot say."""
        words = " ".join(_unit_word(word) for word in job.command)
        variables = [
            f"Environment={_unit_word(f'{name}={value}', '%')}" for name, value in job.variables.items()
        ]
        return "\n".join(
            [
                "[Unit]",
                "Description=mlx-backend, a server for reasoning models",
                "",
                "[Service]",
                f"ExecStart={words}",
                "ExecReload=/bin/kill -HUP $MAINPID",
                f"WorkingDirectory={_unit_path(job.folder)}",
                *variables,
                "Restart=always",
                f"RestartSec={RESTART_SECONDS}",
                f"TimeoutStopSec={job.stop_seconds}",
                "",
                "[Install]",
                "WantedBy=default.target",
                "",
            ]
        )

    def start(self) -> None:
        """Have the system read the file and run the job anew, now and at every login."""
        _done("systemctl", "--user", "daemon-reload")
        _done("systemctl", "--user", "enable", UNIT)
        _done("systemctl", "--user", "restart", UNIT)

    def stop(self) -> None:
        """Have the system stop the job and forget it. Nothing happens if it does not know it."""
        if self.file.exists():
            _done("systemctl", "--user", "disable", "--now", UNIT)

    def state(self) -> dict[str, str]:
        """Return what the system says of the job; `state` is one word of its own."""
        shown = _done(
            "systemctl", "--user", "show", UNIT, "--property=ActiveState,UnitFileState,MainPID,NRestarts"
        )
        said = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
        state = {"state": said.get("ActiveState", "unknown"), "at login": said.get("UnitFileState", "")}
        names = {"pid": said.get("MainPID", "0"), "restarts": said.get("NRestarts", "0")}
        return state | {name: value for name, value in names.items() if value != "0"}

    def log_command(self, lines: int, *, follow: bool) -> list[str]:
        """Return the command that shows the log."""
        follows = ["--follow"] if follow else ["--no-pager"]
        return ["journalctl", "--user-unit", UNIT, "--lines", str(lines), *follows]


type ServiceManager = Launchd | Systemd


def _unit_word(word: str, doubled: str = "%$") -> str:
    """Write a word for a unit: in quotes, with what systemd would replace in it doubled."""
    escaped = _in_one_line(word).replace("\\", "\\\\").replace('"', '\\"')
    for character in doubled:
        escaped = escaped.replace(character, character * 2)
    return f'"{escaped}"'


def _unit_path(path: Path) -> str:
    """Write a folder for a unit: without quotes, as the rest of the line is the path."""
    word = _in_one_line(str(path))
    if word != word.strip() or word.endswith("\\"):
        raise CommandError(f"A unit of systemd cannot name the folder {word!r}, for how its name ends.")
    return word.replace("%", "%%")


def _in_one_line(word: str) -> str:
    if any(character in word for character in "\n\r\0"):
        raise CommandError(f"A unit of systemd cannot hold a line break, which is in {word!r}.")
    return word


def this_manager(home: Path | None = None) -> ServiceManager:
    """Return that of this system. Raises CommandError where there is none."""
    home = home or Path.home()
    is_mac = this_machine().is_mac
    if shutil.which("launchctl" if is_mac else "systemctl") is None:
        raise CommandError(
            "There is no launchctl here, which every Mac has."
            if is_mac
            else "There is no systemd here, whose units this writes. Start `mlx-backend serve` by what starts programs "
            "on this machine; in a container that is its command."
        )
    return Launchd(home) if is_mac else Systemd(home)


def _install(arguments: argparse.Namespace) -> int:
    manager = this_manager()
    parser = arguments.new_parser(prog="mlx-backend service install")
    job, is_dry_run = _job(parser, arguments.options)
    text = manager.text(job)
    if is_dry_run:
        print(f"# {manager.file}\n{text}", end="")
        return 0
    before = manager.file.read_text(encoding="utf-8") if manager.file.exists() else None
    write_file(manager.file, text, is_secret=True)
    if before == text and manager.state()["state"] in RUNNING:
        print(f"The service is installed already, and runs: {manager.file}")
        return 0
    try:
        manager.start()
    except CommandError as error:
        raise CommandError(f"{manager.file} is written, but the service was not started. {error}") from None
    done = "has changed" if before not in (None, text) else "is installed"
    print(f"The service {done} and was started: {manager.file}")
    print("`mlx-backend service logs -f` shows what it does, `mlx-backend service uninstall` removes it.")
    for variable in _unseen_variables():
        print(f"It does not see ${variable}, which is set here: give the option instead.", file=sys.stderr)
    if isinstance(manager, Systemd) and not _stays_without_login():
        print(
            "It runs while you are logged in. To have it run always: loginctl enable-linger", file=sys.stderr
        )
    return 0


def _job(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[ServiceJob, bool]:
    """Check options as `serve` would, and return the job that has them."""
    from mlx_backend.commands import serve
    from mlx_backend.commands.options import ChosenOptions
    from mlx_backend.registry.errors import ConfigurationError
    from mlx_backend.server.api_keys import check_exposure

    serve.configure(parser)
    parser.usage = "mlx-backend service install [--dry-run] [option of serve …]"
    parser.add_argument("--dry-run", action="store_true", help="print the file, and change nothing")
    options = parser.parse_args(words)
    if hasattr(options, "api_key"):
        parser.error(
            f"--api-key would be shown to everyone who lists the processes of this machine: {_KEY_ADVICE}"
        )
    try:
        settings = ChosenOptions.of(options).settings
        if settings.api_key:  # of a variable, which the service does not see
            from dataclasses import replace

            settings = replace(settings, api_key=None)
        check_exposure(settings)
    except ConfigurationError as error:
        parser.error(str(error))
    job = ServiceJob(
        command=[
            *(sys.executable, "-P", "-m", "mlx_backend", "serve"),
            *(word for word in words if word != "--dry-run"),
        ],
        folder=Path.cwd(),
        variables={name: os.environ[name] for name in CARRIED_VARIABLES if os.environ.get(name)},
        stop_seconds=int(settings.drain_seconds) + STOP_MARGIN,
    )
    return job, options.dry_run


def _unseen_variables() -> list[str]:
    from mlx_backend.commands.options import variables

    return sorted(variables().intersection(os.environ))


def _stays_without_login() -> bool:
    shown = _ran("loginctl", "show-user", str(os.getuid()), "--property=Linger")
    return shown.returncode != 0 or shown.stdout.strip() == "Linger=yes"


def _uninstall(_arguments: argparse.Namespace) -> int:
    manager = this_manager()
    if not manager.file.exists():
        print(f"It is not installed: there is no {manager.file}.")
        return 0
    manager.stop()
    manager.file.unlink(missing_ok=True)
    print(f"The service was stopped, and {manager.file} removed. Models and logs stay.")
    return 0


def _status(arguments: argparse.Namespace) -> int:
    manager = this_manager()
    is_installed = manager.file.exists()
    status: dict[str, Any] = {"installed": is_installed, "file": str(manager.file)}
    if is_installed:
        status |= manager.state()
    if arguments.json:
        print_json(status)
    elif is_installed:
        print_fields((name, str(value)) for name, value in status.items() if name != "installed" and value)
    else:
        print("It is not installed. `mlx-backend service install [option of serve …]` does that.")
    return 0 if status.get("state") in RUNNING else 1


def _logs(arguments: argparse.Namespace) -> int:
    manager = this_manager()
    if not manager.file.exists():
        raise CommandError(f"It is not installed: there is no {manager.file}.")
    command = manager.log_command(arguments.lines, follow=arguments.follow)
    try:
        return subprocess.run(command, check=False).returncode
    except FileNotFoundError:
        raise CommandError(f"There is no {command[0]} here, which shows the log.") from None


def _ran(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, "", f"there is no {command[0]}")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", "it did not answer within a minute")


def _done(*command: str) -> str:
    finished = _ran(*command)
    if finished.returncode != 0:
        said = (finished.stderr or finished.stdout).strip().splitlines() or [
            f"exit status {finished.returncode}"
        ]
        hint = ""
        if "bus" in said[-1]:
            hint = " Your session has no systemd of its own: log in as this user, not by su or sudo."
        raise CommandError(f"`{' '.join(command)}` failed: {said[-1]}{hint}")
    return finished.stdout
