"""The command line: which command is meant. What a command does is in `commands/`, one module each.

Importing this loads nothing heavy, and neither does importing a command: MLX comes with the first model.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING

from mlx_backend import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

COMMANDS = ("serve", "parse", "sanitise")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] not in (*COMMANDS, "--version", "-h", "--help"):
        words.insert(0, "serve")
    # Only the help on everything needs every command's options.
    arguments = _parser(words[:1] if words[0] in COMMANDS else COMMANDS).parse_args(words)
    status: int = arguments.run(arguments)
    return status


def _parser(names: Iterable[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx-backend",
        description="Serve a reasoning model on MLX behind OpenAI's API.",
        epilog="Without a command the server is started, so `mlx-backend --port 9000` is "
        "`mlx-backend serve --port 9000`. `mlx-backend serve --help` lists its options.",
    )
    parser.add_argument("--version", action="version", version=f"mlx-backend {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in names:
        importlib.import_module(f"mlx_backend.commands.{name}").add_parser(commands)
    return parser
