"""What was perhaps meant by a name that there is not."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question that names what resembles a misspelt name; empty if nothing does.

    The only name that ends with it comes first: --effort is --reasoning-effort rather than --list-efforts.
    """
    names = sorted(known)
    longer = [each for each in names if each.endswith(f"-{name.lstrip('-')}")]
    close = longer if len(longer) == 1 else difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]}?" if close else ""
