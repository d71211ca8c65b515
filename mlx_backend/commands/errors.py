"""How a command fails: in a sentence for people, and with an exit status for scripts."""

from __future__ import annotations

import json
import sys
from typing import Final

from mlx_backend.commands.terminal import printable

FAILED: Final = 1
WRONG_USAGE: Final = 2
NO_SERVER: Final = 3
INTERRUPTED: Final = 130

EXIT_CODES: Final = {
    0: "done",
    FAILED: "it failed, and said why",
    WRONG_USAGE: "the command line is wrong",
    NO_SERVER: "no server answers",
    INTERRUPTED: "Ctrl-C",
}


def exit_codes() -> str:
    """Return the exit codes in a line."""
    return ", ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items())


class CommandError(Exception):
    """What a command was asked to do cannot be done; the text is for people, and says what to do.

    `param` is the field of a request that a server blames.
    """

    def __init__(self, message: str, *, status: int = FAILED, param: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.param = param

    def show(self, *, as_json: bool = False) -> None:
        """Print it: to standard error, or as an object where JSON is expected."""
        if as_json:
            print(printable(json.dumps({"error": {"message": str(self)}}, ensure_ascii=False)))
        else:
            print(printable(f"mlx-backend: {self}"), file=sys.stderr)
