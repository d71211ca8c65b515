"""The signs of a family in a chat template and among control tokens: `recognition` looks for them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

type Text = str | re.Pattern[str]
"""A text of a template, which is a whole control token; or a pattern that is searched for in either."""


class SignKind(Enum):
    """What a sign shows (`recognition` says which counts for more)."""

    OWN = auto()
    FORMAT = auto()
    LAYOUT = auto()
    COMMON = auto()


@dataclass(frozen=True, slots=True)
class Sign:
    """Texts that show a family where all of them are found; `in_template`: control tokens do not count."""

    kind: SignKind
    texts: tuple[Text, ...]
    in_template: bool = False


def own(*texts: Text, in_template: bool = False) -> Sign:
    """Return a sign that only this family has."""
    return Sign(SignKind.OWN, texts, in_template)


def call_format(*texts: Text, in_template: bool = False) -> Sign:
    """Return a sign of how calls are written."""
    return Sign(SignKind.FORMAT, texts, in_template)


def layout(*texts: Text) -> Sign:
    """Return a sign of how turns begin."""
    return Sign(SignKind.LAYOUT, texts)


def common(*texts: Text) -> Sign:
    """Return a sign that tells only where nothing else does."""
    return Sign(SignKind.COMMON, texts)
