"""Reasoning effort: every spelling that people and clients send, to one of seven steps.

effort_sources.py says where in a request an effort may stand; effort_scale.py says what it means to a model.
"""

from __future__ import annotations

import math
import re
import unicodedata
from enum import StrEnum
from typing import TYPE_CHECKING

from mlx_backend.conversation.json_values import excerpt

if TYPE_CHECKING:
    from collections.abc import Mapping


class Effort(StrEnum):
    """How much a model should reason before it answers."""

    NONE = "none"
    MINIMAL = "minimal"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"
    XHIGH = "xhigh"
    MAX = "max"


WORDS: Mapping[Effort, tuple[str, ...]] = {
    Effort.NONE: (
        "none",
        "off",
        "no",
        "false",
        "disabled",
        "disable",
        "no think",
        "無",
        "无",
        "なし",
        "オフ",
    ),
    Effort.MINIMAL: ("minimal", "minimum", "min", "最小"),
    Effort.LOW: ("low", "light", "低", "低い"),
    Effort.MEDIUM: (
        *("medium", "middle", "mid", "moderate", "normal", "default", "auto"),
        *("on", "true", "yes", "enabled", "enable", "中", "中程度", "標準"),
    ),
    Effort.HIGH: ("high", "高", "高い"),
    Effort.XHIGH: ("xhigh", "x-high", "extra high", "very high"),
    Effort.MAX: ("max", "maximum", "maximal", "ultra", "最大"),
}
"""The words people and clients send; compared without regard to case, `_` and `-` count as blanks."""

EFFORT_OF = {word.replace("-", " "): effort for effort, words in WORDS.items() for word in words}
_ACCEPTED = ", ".join(effort.value for effort in Effort)

# Upper bounds of the ratios at which gateways cut a token budget: minimal .1, low .2, medium .5, high .8, xhigh .95.
_RATIOS = ((0.15, Effort.MINIMAL), (0.35, Effort.LOW), (0.65, Effort.MEDIUM), (0.875, Effort.HIGH))
# Tokens; the budgets clients use for low, medium and high are about 1k, 8k and 16k or more.
_BUDGETS = ((512, Effort.MINIMAL), (2_048, Effort.LOW), (8_192, Effort.MEDIUM), (32_768, Effort.HIGH))


class EffortError(ValueError):
    """A field holds something that is not an effort. `param` names the field."""

    def __init__(self, value: object, param: str = "reasoning_effort") -> None:
        self.param = param
        super().__init__(f"{param}: {excerpt(value, 60)} is not a reasoning effort; use one of {_ACCEPTED}")


def parse_effort(value: object, param: str = "reasoning_effort") -> Effort:
    """Parse a word in any case, a boolean or a number; raise EffortError for anything else.

    Numbers: 0 is none; 1, 2, 3 are low, medium, high; a fraction is a share of the largest budget; 16 and more are a
    budget of reasoning tokens.
    """
    match value:
        case Effort():
            return value
        case bool():
            return Effort.MEDIUM if value else Effort.NONE
        case int() | float():
            effort = _from_number(value)
        case str():
            effort = EFFORT_OF.get(fold(value))
            if effort is None and re.fullmatch(r"\d{1,9}(?:\.\d{1,9})?", value.strip()):
                effort = _from_number(float(value))
        case _:
            effort = None
    if effort is None:
        raise EffortError(value, param)
    return effort


def fold(word: str) -> str:
    """Remove what makes no difference: case, full-width letters, and how words are joined (blanks, `_`, `-`)."""
    folded = unicodedata.normalize("NFKC", word).casefold()
    return " ".join(folded.replace("_", " ").replace("-", " ").split())


def _from_number(number: float) -> Effort | None:
    if not 0 <= number < math.inf:  # NaN fails this too
        return None
    if number in (0, 1, 2, 3):
        return (Effort.NONE, Effort.LOW, Effort.MEDIUM, Effort.HIGH)[int(number)]
    if 0 < number < 1:
        return next((effort for bound, effort in _RATIOS if number <= bound), Effort.XHIGH)
    return from_budget(number) if number >= 16 else None


def from_budget(tokens: float) -> Effort:
    """Return the effort that a budget of reasoning tokens stands for."""
    if tokens == 0:
        return Effort.NONE
    return next((effort for bound, effort in _BUDGETS if tokens <= bound), Effort.XHIGH)
