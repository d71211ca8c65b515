"""Reasoning effort: every spelling that people and clients send, to one of seven, and what it comes to for a model.

People have one dial, `Effort`; every family has levels of its own: gpt-oss low, medium, high; Qwen3.8 low, medium,
xhigh; GLM-5.3 low, high, max; others only on and off (`EffortScale`). The rule:

1. `none` is the level `none`, and only `none` is: a request for any other effort never switches reasoning off.
2. An effort that the model has, or that its template takes for a level, is that level.
3. Any other is the level nearest to it on the dial; of two that are equally near, the lower one.
4. A request that states no effort gets the template's own default, without a budget.

Pure data and arithmetic: `effort_sources` says where in a request an effort may stand, and chat/effort_probe.py finds a
model's scale.
"""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.json_values import excerpt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


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
        *("none", "off", "no", "false", "disabled", "disable", "no think"),
        *("無", "无", "なし", "オフ"),
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

# Upper bounds of the ratios at which gateways cut a token budget: minimal .1, low .2, medium .5, high .8, xhigh .95.
_RATIOS = ((0.15, Effort.MINIMAL), (0.35, Effort.LOW), (0.65, Effort.MEDIUM), (0.875, Effort.HIGH))
# Tokens; the budgets clients use for low, medium and high are about 1k, 8k and 16k or more.
_BUDGETS = ((512, Effort.MINIMAL), (2_048, Effort.LOW), (8_192, Effort.MEDIUM), (32_768, Effort.HIGH))


class EffortError(ValueError):
    """A field holds something that is not an effort. `param` names the field."""

    def __init__(self, value: object, param: str = "reasoning_effort", levels: Sequence[Effort] = ()) -> None:
        """`levels` are those to use instead: a model's own; empty: all there are."""
        self.param = param
        listed = ", ".join(effort.value for effort in levels or Effort)
        super().__init__(f"{param}: {excerpt(value, 60)} is not a reasoning effort; use one of {listed}")


def parse_effort(value: object, param: str = "reasoning_effort", levels: Sequence[Effort] = ()) -> Effort:
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
        raise EffortError(value, param, levels)
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


DIAL: tuple[Effort, ...] = tuple(Effort)
"""Every effort, lowest first."""

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of a model's scale, by its place on the dial.

    `template_kwargs` is what the template is told. `budget` is how many tokens of reasoning the server allows: None for
    as many as the model likes, 0 for none.
    """

    effort: Effort
    template_kwargs: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    budget: int | None = None
    accepts: frozenset[Effort] = frozenset()
    """Further efforts that the template itself takes for this level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EffortScale:
    """The levels of one model, lowest first; none for a model that does not reason.

    `default` is the level that its template gives by itself, `on` the one that it gives when reasoning is only switched
    on. Both are None where there are no levels.
    """

    levels: tuple[Level, ...] = ()
    default: Effort | None = None
    on: Effort | None = None
    tells_default: bool = True
    """Whether the default may be told as any other level: not if none of them gives the template's own prompt."""
    budget_argument: str | None = None
    """The template's argument for a budget of reasoning tokens, if it has one: `thinking_budget`."""

    @property
    def efforts(self) -> tuple[Effort, ...]:
        """The levels by their names."""
        return tuple(level.effort for level in self.levels)

    @property
    def budgets(self) -> Mapping[Effort, int]:
        """Tokens of reasoning, for the levels that have a budget; not `none`."""
        return {level.effort: level.budget for level in self.levels if level.budget}

    @property
    def arguments(self) -> frozenset[str]:
        """The template's arguments that tell a level or a budget."""
        names = {name for level in self.levels for name in level.template_kwargs}
        return frozenset(
            names | ({self.budget_argument.partition(".")[0]} if self.budget_argument else set())
        )

    def level_told_by(self, name: str, value: object) -> Level | None:
        """Return the level that an argument of the template stands for, with a value of the template's own."""
        missing = object()
        told = [level for level in self.levels if level.template_kwargs.get(name, missing) == value]
        # Where a template cannot be told none, that level says what the one above it does.
        return next((level for level in told if level.effort is not Effort.NONE), told[0] if told else None)

    @property
    def lowest(self) -> Effort:
        """The lowest effort that the template can be told; low for a model that does not reason.

        Where it has no words for none, `none` is told as the level above it, and only the server makes the difference:
        then that level is the lowest.
        """
        if not self.levels:
            return Effort.LOW
        lowest, *above = self.levels
        is_told = not above or above[0].template_kwargs != lowest.template_kwargs
        return lowest.effort if is_told else above[0].effort

    def level_of(self, effort: Effort) -> Level | None:
        """Return the level that an effort comes to; None if the model does not reason."""
        if effort is Effort.NONE:
            return next((level for level in self.levels if level.effort is Effort.NONE), None)
        reasoning = [level for level in self.levels if level.effort is not Effort.NONE]
        if exact := next((level for level in reasoning if effort in (level.effort, *level.accepts)), None):
            return exact
        wanted = DIAL.index(effort)
        return min(
            reasoning,
            key=lambda level: (abs(DIAL.index(level.effort) - wanted), DIAL.index(level.effort)),
            default=None,
        )


NO_SCALE = EffortScale()
"""That of a model which does not reason, or is not known."""

GPT_OSS_SCALE = EffortScale(
    levels=(
        # It has no word for none: it is told the lowest, and the server closes its reasoning at once.
        Level(effort=Effort.NONE, template_kwargs={"reasoning_effort": "low"}, budget=0),
        *(
            Level(effort=effort, template_kwargs={"reasoning_effort": effort.value})
            for effort in (Effort.LOW, Effort.MEDIUM, Effort.HIGH)
        ),
    ),
    default=Effort.MEDIUM,
    on=Effort.MEDIUM,
)
"""That of gpt-oss, for tools that have no template at hand."""
