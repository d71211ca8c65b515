"""The command line: finds the command and runs it. What a command does is in `commands/`, one module each.

Importing this loads nothing heavy, and neither does importing a command: MLX comes with the first model.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING

from mlx_backend import __version__
from mlx_backend.commands.stop_signals import ended_by_interrupts

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = ("serve", "parse", "sanitise", "render")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Without a command it is `serve`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--version"]:
        print(f"mlx-backend {__version__}")
        return 0
    with ended_by_interrupts():
        arguments = _parse(words)
    status: int = arguments.run(arguments)
    return status


def _parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mlx-backend")
    if words and words[0] not in COMMANDS and not words[0].startswith("-"):
        known = ", ".join(COMMANDS)
        parser.error(f"unknown command {words[0]!r} (choose from {known}; without a command it is serve)")
    if not words or words[0] not in COMMANDS:
        words.insert(0, "serve")
    commands = parser.add_subparsers()
    importlib.import_module(f"mlx_backend.commands.{words[0]}").add_parser(commands)
    return parser.parse_args(words)
