"""The command line: finds the command and runs it. What a command does is in `commands/`, one module each.

A command's module has `configure(parser)`, which adds its options, and `run(arguments)`, which returns its exit status
or raises `CommandError`. Importing this loads nothing heavy, and neither does importing a command: MLX comes with the
first model, and what draws on a terminal with the first thing that is drawn.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from mlx_backend import version_and_commit
from mlx_backend.commands.errors import (
    FAILED,
    INTERRUPTED,
    WRONG_USAGE,
    CommandError,
    did_you_mean,
    exit_codes,
)
from mlx_backend.commands.stop_signals import ended_by_interrupts
from mlx_backend.commands.terminal import discard_output
from mlx_backend.models.engine_options import REMOVED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROGRAM = "mlx-backend"


class Command(NamedTuple):
    """One command: what it does in a line, under which heading it is listed, and what else it is called."""

    help: str
    group: str
    aliases: tuple[str, ...] = ()


_SERVE, _MODELS, _SERVER, _CHECK = "Use a model", "Models on this machine", "A running server", "Look closer"

_VIEWS = ("parse", "render", "sanitise")
"""What `inspect` shows; each is understood without it."""

COMMANDS: Mapping[str, Command] = {
    "chat": Command("talk with a model here, or ask it one thing (-p)", _SERVE, ("run",)),
    "serve": Command("serve a model with an OpenAI-compatible API (without a command, too)", _SERVE),
    "recommend": Command("say which models suit this machine's memory", _MODELS),
    "pull": Command("download a model, or go on where a download stopped", _MODELS),
    "list": Command("list the models on this machine, and what each can do", _MODELS, ("ls",)),
    "show": Command("say all that is known of a model, with the memory it takes", _MODELS),
    "rm": Command("delete a model from this machine", _MODELS),
    "ps": Command("list the models in memory, and what they do", _SERVER),
    "load": Command("load a model, and wait for it", _SERVER),
    "stop": Command("unload a model, once it is not in use", _SERVER),
    "connect": Command("print or write what a client needs to use the server", _SERVER),
    "service": Command("have the system start the server at login", _SERVER),
    "doctor": Command("look whether this machine can serve, and what to do where it cannot", _CHECK),
    "bench": Command("measure how fast a model answers here", _CHECK),
    "inspect": Command("show what is made of a raw output, a request or a history", _CHECK),
    "completion": Command("print what a shell needs to complete commands", _CHECK),
}
"""Every command, in the order in which they are listed; the module of one has its name, under commands/."""

EXAMPLES: Mapping[str, str] = {
    "chat": "talk with a model here, or with the small one that is included",
    "recommend": "see what suits this machine",
    "chat gpt-oss:20b --effort high": "talk with a model, which is downloaded first",
    "serve gpt-oss:20b": "serve it, with a page for browsers",
}

_NAMES = {name: command for command, (_, _, aliases) in COMMANDS.items() for name in (command, *aliases)} | {
    "help": "help",
    "version": "version",
    **dict.fromkeys(_VIEWS, "inspect"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Without a command it is `serve`."""
    if argv is None:
        _open_closed_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = None
    try:
        match words:
            case ["--version" | "-V" | "version"]:
                print(f"{PROGRAM} {version_and_commit()}")
                status = 0
            case ["help" | "--help" | "-h"] | ["help", "help" | "version", *_]:
                print(overview())
                status = 0
            case _:
                if words[:1] == ["help"]:
                    words = [words[1], "--help"]
                with ended_by_interrupts():
                    arguments = _parse(words)
                status = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except CommandError as error:
        error.show(as_json=getattr(arguments, "json", False))
        return error.status
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # else what reads the output has gone
            where = f"{error.filename}: " if error.filename else "The output cannot be written: "
            print(f"{PROGRAM}: {where}{error.strerror or error}", file=sys.stderr)
        discard_output()
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _open_closed_streams() -> None:
    """Read nothing from, and write into nothing, what was closed before the process began."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 (as long as the process lives)


def _parse(words: list[str]) -> argparse.Namespace:
    if words and not words[0].startswith("-"):
        if words[0] in _VIEWS:
            words = ["inspect", *words]
        name, *rest = words
        if name not in _NAMES:
            raise CommandError(_unknown_command(name), status=WRONG_USAGE)
        if _NAMES[name] not in COMMANDS:
            raise CommandError(f"nothing comes after `{PROGRAM} {name}`", status=WRONG_USAGE)
    else:
        name, rest = "serve", words
    return command_parser(_NAMES[name]).parse_args(rest)


def command_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of one command's options."""
    parser = CommandParser(prog=f"{PROGRAM} {name}", description=f"{COMMANDS[name].help.capitalize()}.")
    _configure(parser, name)
    return parser


def every_command() -> argparse.ArgumentParser:
    """Return one parser of all commands, for what has to know them all."""
    parser = CommandParser(prog=PROGRAM)
    commands = parser.add_subparsers()
    for name, command in COMMANDS.items():
        _configure(commands.add_parser(name, help=command.help), name)
    return parser


def _configure(parser: argparse.ArgumentParser, name: str) -> None:
    module = importlib.import_module(f"mlx_backend.commands.{name}")
    parser.set_defaults(run=module.run, refuse=parser.error)
    module.configure(parser)


def overview() -> str:
    """Return what `mlx-backend help` shows."""
    lines = [f"usage: {PROGRAM} [command] [option …]"]
    for group in dict.fromkeys(command.group for command in COMMANDS.values()):
        lines += ["", f"{group}:"]
        for name, command in COMMANDS.items():
            if command.group == group:
                lines.append(f"  {', '.join((name, *command.aliases)):<12}{command.help}")
    return "\n".join(
        [
            *lines,
            "",
            "Begin with:",
            *(f"  {PROGRAM} {example:<32}{what}" for example, what in EXAMPLES.items()),
            "",
            f"`{PROGRAM} help COMMAND` shows a command's options, `{PROGRAM} --version` the version.",
            f"Exit codes: {exit_codes()}.",
        ]
    )


def _unknown_command(name: str) -> str:
    if "/" in name or ":" in name:
        return (
            f"unknown command {name!r}. A model comes after a command: `{PROGRAM} serve {name}`, for instance"
        )
    hint = did_you_mean(name, _NAMES) or f"; `{PROGRAM} help` lists them all"
    return f"unknown command {name!r}{hint}"


class CommandParser(argparse.ArgumentParser):
    """A parser that takes no abbreviations, and says of an option that there is not which one was perhaps meant."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", lambda prog: argparse.HelpFormatter(prog, max_help_position=34))
        super().__init__(**options, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as the base class does, and refuse what is left over by name. argparse calls it of a subcommand too."""
        parsed, rest = super().parse_known_args(args, namespace)
        if rest:
            word = rest[0].partition("=")[0]
            if not word.startswith("-"):
                self.error(f"there is nothing for {rest[0]!r} to be; the options are in --help")
            if removed := REMOVED.get(word.removeprefix("--").replace("-", "_")):
                self.error(f"{word} {removed}")
            known = set(re.findall(r"(?<!\S)--?[a-z][a-z-]*", self.format_help()))
            self.error(f"unknown option {word}{did_you_mean(word, known)}")
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the command line, and end with its exit status."""
        self.exit(WRONG_USAGE, f"{self.prog}: {message}\n")
