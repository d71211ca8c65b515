"""How a command fails: in a sentence for people, which may say what was meant, and with an exit status for scripts."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from typing import TYPE_CHECKING, Any, Final

from mlx_backend.commands.terminal import printable
from mlx_backend.declaration import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mlx_backend.declaration import Kind

FAILED: Final = 1
WRONG_USAGE: Final = 2
NO_SERVER: Final = 3
INTERRUPTED: Final = 130

_MIN_LIKENESS: Final = 0.75
"""Of difflib: what is less alike than --prot and --port is another word."""

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


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question that names what resembles a misspelt name; empty if nothing does."""
    meant = resembling(name, known)
    return f"; did you mean {meant}?" if meant else ""


def resembling(name: str, known: Iterable[str]) -> str:
    """Return which name a misspelt one resembles; empty if it resembles none.

    The only name that ends with it comes first: --effort is --reasoning-effort rather than --list-efforts.
    """
    written = name.lstrip("-")  # dashes would make any two options alike
    names = {each.lstrip("-"): each for each in sorted(known)}
    longer = [each for each in names if each.endswith(f"-{written}")]
    close = (
        longer if len(longer) == 1 else difflib.get_close_matches(written, names, n=1, cutoff=_MIN_LIKENESS)
    )
    return names[close[0]] if close else ""


def argument(kind: Kind) -> Callable[[str], Any]:
    """Return what reads an option of this kind for argparse, and refuses it in words."""

    def read(text: str) -> Any:
        try:
            return kind.from_text(text)
        except SettingError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def several(kind: Kind) -> Callable[[str], list[Any]]:
    """Return what reads an option that takes several, with commas between them."""
    read = argument(kind)
    return lambda text: [read(each) for each in map(str.strip, text.split(",")) if each] or [read("")]
