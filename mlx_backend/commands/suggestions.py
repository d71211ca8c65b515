"""What was perhaps meant by a name that there is not."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question that names what resembles a misspelt name; empty if nothing does."""
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
