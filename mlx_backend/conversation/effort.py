"""Reasoning effort: every spelling to one of six levels, every source to one answer.

Pure functions: effort belongs to one request, and nothing of it is kept. Where an effort may come from is decided
here and nowhere else; what a model's template is told is `template_kwargs`.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.json_values import excerpt

if TYPE_CHECKING:
    from mlx_backend.conversation.background_requests import BackgroundPrompt
    from mlx_backend.conversation.template import TemplateTraits


class Effort(StrEnum):
    """How much a model should reason before it answers."""

    NONE = "none"
    MINIMAL = "minimal"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"
    XHIGH = "xhigh"


WORDS: Mapping[Effort, tuple[str, ...]] = {
    Effort.NONE: ("none", "off", "no", "false", "disabled", "disable", "無", "无", "なし", "オフ"),
    Effort.MINIMAL: ("minimal", "minimum", "min", "最小"),
    Effort.LOW: ("low", "light", "低", "低い"),
    Effort.MEDIUM: (
        *("medium", "middle", "mid", "moderate", "normal", "default", "auto"),
        *("on", "true", "yes", "enabled", "enable", "中", "中程度", "標準"),
    ),
    Effort.HIGH: ("high", "高", "高い"),
    Effort.XHIGH: (
        "xhigh",
        "x-high",
        "extra high",
        "very high",
        "max",
        "maximum",
        "maximal",
        "ultra",
        "最大",
    ),
}
"""The words people and clients send; compared without regard to case, `_` and `-` count as blanks."""

_EFFORT_OF = {word.replace("-", " "): effort for effort, words in WORDS.items() for word in words}
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
            effort = _EFFORT_OF.get(_fold(value))
            if effort is None and re.fullmatch(r"\d{1,9}(?:\.\d{1,9})?", value.strip()):
                effort = _from_number(float(value))
        case _:
            effort = None
    if effort is None:
        raise EffortError(value, param)
    return effort


def _fold(word: str) -> str:
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
    return _from_budget(number) if number >= 16 else None


def _from_budget(tokens: float) -> Effort:
    if tokens == 0:
        return Effort.NONE
    return next((effort for bound, effort in _BUDGETS if tokens <= bound), Effort.XHIGH)


_LINE = re.compile(
    r"^[ \t]*(?:reasoning|reasoning[ _]effort)[ \t]*[:：][ \t]*(\S[^\n]*?)[ \t]*$", re.I | re.M
)


def take_lines(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Effort]]:
    """Take lines `Reasoning: X` out of system and developer messages; return the messages and their efforts.

    A line whose word is not an effort is ordinary text and stays. The messages given are not changed.
    """
    efforts: list[Effort] = []

    def take(text: str) -> str:
        taken: list[tuple[int, int]] = []
        for match in _LINE.finditer(text):
            effort = _EFFORT_OF.get(_fold(match[1].rstrip(".")))
            if effort is not None:
                efforts.append(effort)
                taken.append(match.span())
        if not taken:
            return text
        for start, end in reversed(taken):
            text = text[:start].rstrip(" \t") + "\0" + text[end:]
        # The line goes with its line break; paragraphs keep one empty line between them.
        text = re.sub(r"\n*\0\n*", _line_gap, text)
        return text.strip("\r\n")

    rewritten: list[dict[str, Any]] = []
    for message in messages:
        copy = dict(message)
        if message.get("role") in ("system", "developer"):
            match message.get("content"):
                case str() as text:
                    copy["content"] = take(text)
                case list() as parts:
                    copy["content"] = [
                        {**part, "text": take(part["text"])}
                        if isinstance(part, Mapping) and isinstance(part.get("text"), str)
                        else part
                        for part in parts
                    ]
        rewritten.append(copy)
    return rewritten, efforts


def _line_gap(match: re.Match[str]) -> str:
    """Return what replaces a line that was taken: as many line breaks as the wider side had, at most two."""
    before, _, after = match.group().partition("\0")
    return "\n" * min(2, max(before.count("\n"), after.count("\n")))


type Stated = tuple[str, Effort]
"""A source, in words, and the effort that it states."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """The effort of one request, where it came from, and every source that stated one (strongest first)."""

    effort: Effort
    source: str
    sources: tuple[Stated, ...]
    messages: list[dict[str, Any]]


def resolve(
    request: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    *,
    background: Stated | None = None,
    model_default: Effort | None = None,
    server_default: Effort | None = None,
) -> Resolution:
    """Decide one request's effort. Null and empty fields are absent; a bad field raises EffortError.

    `background` is `background_effort`'s: it holds where the request states nothing.
    """
    rewritten, lines = take_lines(messages)
    sources: list[Stated] = [("system prompt", effort) for effort in reversed(lines)]
    stated, switched_on = _fields(request)
    defaults = [
        (name, effort)
        for name, effort in (("model default", model_default), ("server default", server_default))
        if effort is not None
    ]
    sources += stated
    if background is not None and not switched_on:
        sources.append(background)
    if defaults and defaults[0][1] is not Effort.NONE:
        sources += defaults + switched_on  # "on" does not say how much; the defaults do
    else:
        sources += switched_on + defaults
    sources.append(("default", Effort.MEDIUM))
    source, effort = sources[0]
    return Resolution(effort, source, tuple(sources), _without_emptied(rewritten))


def _without_emptied(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out system messages that held nothing but such a line, unless nothing else is left to render."""
    kept = [m for m in messages if m.get("content") != "" or m.get("role") not in ("system", "developer")]
    return kept or messages


type _Sources = list[Stated]


def _fields(request: Mapping[str, Any]) -> tuple[_Sources, _Sources]:
    """Return the fields that state an effort, and those that only switch reasoning on; strongest first."""
    stated: _Sources = []
    switched_on: _Sources = []

    def add(name: str, value: object, *, is_switch: bool = False) -> None:
        if value is None or (isinstance(value, str) and not value.strip()):
            return
        effort = parse_effort(value, name)
        (switched_on if is_switch and value is True else stated).append((name, effort))

    def add_budget(name: str, value: object) -> None:
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value.strip()):
            value = int(value)
        if type(value) is int and value >= 0:
            stated.append((name, _from_budget(value)))
        else:
            add(name, value)

    add("reasoning_effort", request.get("reasoning_effort"))
    reasoning = request.get("reasoning")
    if isinstance(reasoning, Mapping):
        add("reasoning.effort", reasoning.get("effort"))
        if "effort" not in reasoning or reasoning["effort"] in (None, ""):
            add_budget("reasoning.max_tokens", reasoning.get("max_tokens"))
            add("reasoning.enabled", reasoning.get("enabled"), is_switch=True)
    else:
        add("reasoning", reasoning, is_switch=True)
    kwargs = request.get("chat_template_kwargs")
    if isinstance(kwargs, Mapping):
        add("chat_template_kwargs.reasoning_effort", kwargs.get("reasoning_effort"))
        for switch in ("enable_thinking", "thinking"):
            add(f"chat_template_kwargs.{switch}", kwargs.get(switch), is_switch=True)
    add("think", request.get("think"), is_switch=True)
    add("enable_thinking", request.get("enable_thinking"), is_switch=True)
    thinking = request.get("thinking")
    if isinstance(thinking, Mapping):
        if thinking.get("type") == "disabled":
            stated.append(("thinking.type", Effort.NONE))
        else:
            add_budget("thinking.budget_tokens", thinking.get("budget_tokens"))
    else:
        add("thinking", thinking, is_switch=True)
    return stated, switched_on


_TEMPLATE_WORDS = {
    Effort.NONE: Effort.LOW,  # the lowest word gpt-oss knows; the server then closes its reasoning at once
    Effort.MINIMAL: Effort.LOW,
    Effort.LOW: Effort.LOW,
    Effort.MEDIUM: Effort.MEDIUM,
    Effort.HIGH: Effort.HIGH,
    Effort.XHIGH: Effort.HIGH,
}


def template_kwargs(effort: Effort, traits: TemplateTraits) -> dict[str, Any]:
    """Return the arguments for the model's chat template: a word, a switch, both, or nothing."""
    enabled = effort is not Effort.NONE
    match traits.effort:
        case None:
            return {}
        case "reasoning_effort":
            kwargs: dict[str, Any] = {"reasoning_effort": _TEMPLATE_WORDS[effort].value}
            return kwargs | ({traits.switch: enabled} if traits.switch else {})
        case switch_alone:
            return {switch_alone: enabled}


def available_efforts(traits: TemplateTraits) -> tuple[Effort, ...]:
    """List the efforts that make a difference to a model; none for one that does not reason.

    low, medium, high     its template takes a word (gpt-oss); with none before them if it takes a switch too
    none, medium          its template takes a switch (Qwen3): it reasons or it does not
    medium                it always reasons, and its template takes nothing (DeepSeek-R1)
    """
    match traits.effort:
        case "reasoning_effort":
            words = (Effort.LOW, Effort.MEDIUM, Effort.HIGH)
            return (Effort.NONE, *words) if traits.switch else words
        case None:
            return (Effort.MEDIUM,) if traits.is_reasoning_model else ()
        case _:
            return (Effort.NONE, Effort.MEDIUM)


def background_effort(prompt: BackgroundPrompt | None, traits: TemplateTraits) -> Stated | None:
    """Return the source and the effort of a background request: the least that the model has.

    For a model without efforts it is low, which makes no difference to it.
    """
    if prompt is None:
        return None
    return f"background request: {prompt}", next(iter(available_efforts(traits)), Effort.LOW)


def nearest(effort: Effort, traits: TemplateTraits) -> Effort | None:
    """Return the available effort that an effort comes to; None if the model has none."""
    available = available_efforts(traits)
    if effort in available:
        return effort
    word = _TEMPLATE_WORDS[effort]
    return word if word in available else next(iter(available[-1:]), None)
