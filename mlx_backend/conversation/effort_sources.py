"""Where a request's effort comes from: every source that may state one, strongest first, and the one that wins.

    a line `Reasoning: X` in the system or developer message   the last one; it is then taken out of the text
    reasoning_effort · reasoning.effort · output_config.effort · chat_template_kwargs · think, enable_thinking, thinking
    a background request                                       a page's request for a title, say: the lowest level
    the model's name · its default · the server's default      `NAME:high`; as an operator set them
    the template's own default                                 the model is told nothing

Switching reasoning on says nothing of how much: such a field gives way to an operator's default, and without one it is
the level that the template itself takes for "on". Pure functions: an effort belongs to one request, and nothing of it
is kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.effort import (
    EFFORT_OF,
    NO_SCALE,
    Effort,
    EffortScale,
    Level,
    fold,
    from_budget,
    parse_effort,
)

if TYPE_CHECKING:
    from mlx_backend.conversation.background_requests import BackgroundPrompt

# A word of at most 40 characters: what is longer is no effort, and must not be searched again and again.
_LINE = re.compile(
    r"^[ \t]*(?:reasoning|reasoning[ _]effort)[ \t]*[:：][ \t]*(\S[^\n]{0,39}?)[ \t]*$", re.I | re.M
)
_WORD = re.compile(r"[^\W\d_]+")

DEFAULT = "default"
"""The source of an effort that was not stated."""


@dataclass(frozen=True, slots=True)
class Lines:
    """The messages without their lines `Reasoning: X`, the efforts these stated, and the words that are none."""

    messages: list[dict[str, Any]]
    efforts: list[Effort]
    unknown: list[str]


def take_lines(messages: Sequence[Mapping[str, Any]]) -> Lines:
    """Take lines `Reasoning: X` out of system and developer messages.

    A line whose word is not an effort is ordinary text and stays. The messages given are not changed.
    """
    efforts: list[Effort] = []
    unknown: list[str] = []
    effort_of = cache(lambda word: EFFORT_OF.get(fold(word.rstrip("."))))

    def take(text: str) -> str:
        left: list[str] = []
        end = 0
        for match in _LINE.finditer(text):
            effort = effort_of(match[1])
            if effort is not None:
                efforts.append(effort)
                left.append(text[end : match.start()].rstrip(" \t"))
                end = match.end()
            elif _WORD.fullmatch(match[1]):
                unknown.append(match[1])
        if not left:
            return text
        return _joined([*left, text[end:]]).strip("\r\n")

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
    return Lines(rewritten, efforts, unknown)


def _joined(parts: Sequence[str]) -> str:
    """Join what stood around lines that were taken: a line goes with its line break.

    Between two parts there are as many line breaks as the wider side had, at most two: paragraphs keep an empty line.
    """
    joined: list[str] = []
    rest = parts[0]
    for part in parts[1:]:
        before, after = rest.rstrip("\n"), part.lstrip("\n")
        breaks = max(len(rest) - len(before), len(part) - len(after))
        joined += [before, "\n" * min(2, breaks)]
        rest = after
    return "".join([*joined, rest])


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """The effort of one request, what it comes to on the model's own scale, and where it came from.

    `sources` are all that stated one, strongest first. `level` is None for a model that does not reason.
    `unknown_words` stood in lines `Reasoning: X` and are no efforts: they stay text.
    """

    effort: Effort
    level: Level | None
    source: str
    sources: tuple[tuple[str, Effort], ...]
    messages: list[dict[str, Any]]
    unknown_words: tuple[str, ...] = ()
    is_told: bool = True
    """Whether the template is told the level."""

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """What the template is told."""
        return dict(self.level.template_kwargs) if self.level is not None and self.is_told else {}

    @property
    def overruled_arguments(self) -> frozenset[str]:
        """The template's arguments with which the request stated an effort."""
        prefix = "chat_template_kwargs."
        return frozenset(name.removeprefix(prefix) for name, _ in self.sources if name.startswith(prefix))

    @property
    def budget(self) -> int | None:
        """How many tokens of reasoning the level allows; None for as many as the model likes."""
        return self.level.budget if self.level is not None else None


def resolve(
    request: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    *,
    scale: EffortScale = NO_SCALE,
    background: BackgroundPrompt | None = None,
    name_effort: Effort | None = None,
    model_default: Effort | None = None,
    server_default: Effort | None = None,
) -> Resolution:
    """Decide one request's effort. Null and empty fields are absent; a bad field raises EffortError.

    A background request gets the model's lowest effort, unless it states one itself.
    """
    lines = take_lines(messages)
    sources: _Sources = [("system prompt", effort) for effort in dict.fromkeys(reversed(lines.efforts))]
    stated, switched_on = _fields(request, scale)
    switched_on = [(name, scale.on or effort) for name, effort in switched_on]
    defaults = [
        (name, effort)
        for name, effort in (
            ("model name", name_effort),
            ("model default", model_default),
            ("server default", server_default),
        )
        if effort is not None
    ]
    sources += stated
    if background is not None and not switched_on:
        sources.append((f"background request: {background}", scale.lowest))
    if defaults and defaults[0][1] is not Effort.NONE:
        sources += defaults + switched_on  # "on" does not say how much; the defaults do
    else:
        sources += switched_on + defaults
    sources.append((DEFAULT, scale.default or Effort.MEDIUM))
    source, effort = sources[0]
    return Resolution(
        effort=effort,
        level=scale.level_of(effort),
        source=source,
        sources=tuple(sources),
        messages=_without_emptied(lines.messages),
        unknown_words=tuple(dict.fromkeys(lines.unknown)),
        is_told=source != DEFAULT or scale.tells_default,
    )


def _without_emptied(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out system messages that held nothing but such a line, unless nothing else is left to render."""
    kept = [m for m in messages if m.get("content") != "" or m.get("role") not in ("system", "developer")]
    return kept or messages


type _Sources = list[tuple[str, Effort]]


def _fields(request: Mapping[str, Any], scale: EffortScale) -> tuple[_Sources, _Sources]:
    """Return the fields that state an effort, and those that only switch reasoning on; strongest first."""
    stated: _Sources = []
    switched_on: _Sources = []

    def add(name: str, value: object) -> None:
        if value is None or (isinstance(value, str) and not value.strip()):
            return
        effort = parse_effort(value, name, scale.efforts)
        is_on = value is True or (isinstance(value, str) and fold(value) in _ON)
        (switched_on if is_on else stated).append((name, effort))

    def add_budget(name: str, value: object) -> None:
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value.strip()):
            value = int(value)
        if type(value) is int and value >= 0:
            stated.append((name, from_budget(value)))
        else:
            add(name, value)

    add("reasoning_effort", request.get("reasoning_effort"))
    reasoning = request.get("reasoning")
    if isinstance(reasoning, Mapping):
        add("reasoning.effort", reasoning.get("effort"))
        if "effort" not in reasoning or reasoning["effort"] in (None, ""):
            add_budget("reasoning.max_tokens", reasoning.get("max_tokens"))
            add("reasoning.enabled", reasoning.get("enabled"))
    else:
        add("reasoning", reasoning)
    output_config = request.get("output_config")
    if isinstance(output_config, Mapping):
        add("output_config.effort", output_config.get("effort"))
    kwargs = request.get("chat_template_kwargs")
    if isinstance(kwargs, Mapping):
        for name in ("reasoning_effort", "thinking_effort"):
            add(f"chat_template_kwargs.{name}", kwargs.get(name))
        for name in ("enable_thinking", "thinking"):
            add(f"chat_template_kwargs.{name}", kwargs.get(name))
        mode = kwargs.get("thinking_mode")
        if isinstance(mode, str) and fold(mode) in EFFORT_OF:  # others ("adaptive") are the template's own
            add("chat_template_kwargs.thinking_mode", mode)
        for name in sorted(scale.arguments & kwargs.keys() - set(USUAL_ARGUMENTS)):
            if level := scale.level_told_by(name, kwargs[name]):
                stated.append((f"chat_template_kwargs.{name}", level.effort))
    add("think", request.get("think"))
    add("enable_thinking", request.get("enable_thinking"))
    thinking = request.get("thinking")
    if isinstance(thinking, Mapping):
        if thinking.get("type") == "disabled":
            stated.append(("thinking.type", Effort.NONE))
        else:
            add_budget("thinking.budget_tokens", thinking.get("budget_tokens"))
            if thinking.get("type") in ("enabled", "adaptive"):
                switched_on.append(("thinking.type", Effort.MEDIUM))
    else:
        add("thinking", thinking)
    return stated, switched_on


USUAL_ARGUMENTS = ("reasoning_effort", "thinking_effort", "enable_thinking", "thinking", "thinking_mode")
"""Variables of templates that state an effort, whether or not a model's own template has them."""
_ON = frozenset({"on", "true", "yes", "enabled", "enable"})
