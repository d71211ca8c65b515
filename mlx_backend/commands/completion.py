"""`mlx-backend completion SHELL`: prints what the shell needs to complete commands and options. By shtab."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

SHELLS: Mapping[str, str] = {
    "bash": 'add this line to ~/.bashrc: eval "$(mlx-backend completion bash)"',
    "zsh": 'add this line to ~/.zshrc, after compinit: eval "$(mlx-backend completion zsh)"',
    "tcsh": "add this line to ~/.tcshrc: mlx-backend completion tcsh | source /dev/stdin",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = "Print what a shell needs to complete commands and options. "
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description += "For\n\n" + "\n".join(f"- {shell}: {how}" for shell, how in SHELLS.items())
    own = Path(os.environ.get("SHELL", "")).name
    parser.add_argument(
        "shell",
        nargs="?",
        choices=tuple(SHELLS),
        default=own if own in SHELLS else "bash",
        help="the shell (default: that of $SHELL)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print it."""
    import shtab

    from mlx_backend.cli import every_command

    print(shtab.complete(every_command(), arguments.shell))
    return 0
