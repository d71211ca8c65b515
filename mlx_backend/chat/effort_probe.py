"""Finds a model's own effort scale by rendering its chat template with every word and switch it may know.

One short chat is rendered for each candidate value of each argument whose name speaks of effort or thinking; equal
prompts are one level, and a value that raises is none. So nothing is assumed of a family: a template that ignores the
words, raises on some, or takes every other word for its highest is recognised as such, and is never sent a word it
refuses. Argument names come from the template itself; the tables below say what words mean and how they are ordered.

    words     reasoning_effort, thinking_effort …    each distinct prompt is a level
    switches  enable_thinking, thinking, …_mode      reasoning is on or off
    flags     low_effort, medium_effort              one level more, below the model's own
    budget    thinking_budget                        tokens: the levels are budgets, and the template is told
    nothing   or only a switch                       the same budgets, and the server alone holds the model to them

Where a template cannot switch reasoning off, the server closes the block at once: every model that reasons has `none`.
Knows no tokens, no weights and no requests.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from mlx_backend.conversation.effort import Effort
from mlx_backend.conversation.effort_scale import DIAL, EffortScale, Level
from mlx_backend.models.template_sandbox import MAX_PROBE_CHARACTERS, ChatTemplate, TemplateFault

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROBE_SECONDS: Final = 2.0
"""For all renderings of one template together; those of published templates take 5 to 50 ms."""
type Budgets = tuple[tuple[Effort, int], ...]

DEFAULT_BUDGETS: Final[Budgets] = ((Effort.LOW, 1024), (Effort.MEDIUM, 4096))
"""Tokens of reasoning, for models whose template has no scale. The level above them has no budget."""

_WORDS: Final[Mapping[Effort, tuple[str, ...]]] = {
    Effort.NONE: ("none", "no_think", "off", "disabled", "chat"),
    Effort.MINIMAL: ("minimal",),
    Effort.LOW: ("low",),
    Effort.MEDIUM: ("medium",),
    Effort.HIGH: ("high",),
    Effort.XHIGH: ("xhigh",),
    Effort.MAX: ("max", "maximum"),
}
"""The words that templates use for each place on the dial."""
_ON_WORDS: Final = ("enabled", "on", "thinking", "think")
_OTHER: Final = "qzx"  # no template knows this word: it shows what any other word comes to
_USUAL: Final = (
    Effort.LOW,
    Effort.MEDIUM,
    Effort.HIGH,
)  # of a template that prints whatever word it is given

_IS_ABOUT_EFFORT: Final = re.compile(r"effort|think|reason")
_IS_ABOUT_HISTORY: Final = re.compile(r"preserve|clear|truncate|keep|drop|history|content|text")
_FLAG: Final = re.compile(r"\A(minimal|low|medium|high)_effort\Z")
_SWITCHES_OFF: Final = re.compile(r"skip|disable|\Ano_|without")
_USER: Final = {"role": "user", "content": "Hi"}
_SYSTEM: Final = {"role": "system", "content": "Answer."}

type _Arguments = Mapping[str, Any]


class _Probe:
    """Renders one template with one set of arguments after another. Raises TemplateFault once its time is up."""

    def __init__(self, template: ChatTemplate, deadline: float) -> None:
        self._template = template
        self._deadline = deadline
        self._messages: Sequence[Mapping[str, str]] = [_USER]
        self.base = self.render({})
        """The prompt of a request that states no effort; None if the template cannot do without."""
        if self.base is None:  # some insist on a system message
            self._messages = [_SYSTEM, _USER]
            self.base = self.render({})

    def render(self, *arguments: _Arguments) -> str | None:
        """Return the prompt, None where the template refuses."""
        joined = {name: value for given in arguments for name, value in given.items()}
        try:
            return self._template.render(self._messages, joined, deadline=self._deadline)
        except TemplateFault:
            if time.monotonic() > self._deadline:
                raise
            return None

    def words(self, name: str, *fixed: _Arguments) -> _Words:
        """Render with every word for an argument."""
        prompts = {word: self.render(*fixed, {name: word}) for words in _WORDS.values() for word in words}
        return _Words(prompts, self.render(*fixed, {name: _OTHER}))


@dataclass(frozen=True, slots=True)
class _Words:
    """The prompts of one argument's words, and that of a word nobody knows. None: refused."""

    prompts: Mapping[str, str | None]
    other: str | None

    def recognised(self, named: frozenset[str]) -> dict[Effort, tuple[str, str]]:
        """Return the words that mean something to the template, with their prompts, by their place on the dial.

        A word that gives the same prompt as any other does means something only if the template names it.
        """
        found: dict[Effort, tuple[str, str]] = {}
        for effort, words in _WORDS.items():
            for word in words:
                prompt = self.prompts[word]
                if prompt is not None and (prompt != self.other or word in named):
                    found.setdefault(effort, (word, prompt))
        return found


@dataclass(frozen=True, slots=True)
class _Switch:
    """What switches reasoning on and off, and the prompts it gives."""

    on: _Arguments
    off: _Arguments
    on_prompt: str | None
    off_prompt: str

    def is_off_in(self, prompt: str | None) -> bool:
        return prompt == self.off_prompt


@lru_cache(maxsize=64)
def probe_effort(
    source: str | None,
    *,
    reasons: bool,
    budgets: Budgets = DEFAULT_BUDGETS,
    seconds: float = PROBE_SECONDS,
) -> EffortScale:
    """Return the scale of the model with this chat template. Never raises.

    `reasons` says whether the model reasons, as far as its dialect and the template's text tell: it decides where no
    argument changes the prompt, or the template cannot be probed. `budgets` are for models without a scale.
    """
    try:
        found = (
            _scale(
                ChatTemplate(source, max_characters=MAX_PROBE_CHARACTERS),
                time.monotonic() + seconds,
                dict(budgets),
            )
            if source
            else None
        )
    except TemplateFault:
        found = None
    if found is None and reasons:
        found = _budget_scale(dict(budgets))
    return found or EffortScale()


def _scale(template: ChatTemplate, deadline: float, budgets: Mapping[Effort, int]) -> EffortScale | None:
    names = sorted(
        (
            name
            for name in template.variables
            if _IS_ABOUT_EFFORT.search(name) and not _IS_ABOUT_HISTORY.search(name)
        ),
        key=lambda name: (name != "enable_thinking", name != "thinking", name),
    )
    if not names:
        return None
    probe = _Probe(template, deadline)
    flags = [name for name in names if _FLAG.match(name)]
    word_names = [name for name in names if "effort" in name and name not in flags]
    budget_names = [name for name in names if "budget" in name]
    others = [name for name in names if name not in (*flags, *word_names, *budget_names)]
    switch = next(filter(None, (_find_switch(probe, name, template.words) for name in others)), None)
    for name in word_names:
        if scale := _word_scale(probe, name, template.words, switch):
            return scale
        switch = switch or _find_off_word(probe, name, template.words)
    if flags and (scale := _flag_scale(probe, flags, switch)):
        return scale
    for name in budget_names:
        if len({probe.render({name: tokens}) for tokens in (0, 1024, -1)}) > 1:
            return _budget_scale(budgets, told_as=name)
    return _budget_scale(budgets, switch, probe.base) if switch else None


def _find_switch(probe: _Probe, name: str, named: frozenset[str]) -> _Switch | None:
    """Try an argument as a boolean, or as a mode that has words for on and off among those the template names."""
    pairs: list[tuple[Any, Any]] = [(False, True) if _SWITCHES_OFF.search(name) else (True, False)]
    if "mode" in name:
        pairs = [(on, off) for on in _ON_WORDS for off in _WORDS[Effort.NONE] if {on, off} <= named]
    for on, off in pairs:
        on_prompt, off_prompt = probe.render({name: on}), probe.render({name: off})
        if on_prompt is not None and off_prompt is not None and on_prompt != off_prompt:
            return _Switch({name: on}, {name: off}, on_prompt, off_prompt)
    return None


def _find_off_word(probe: _Probe, name: str, named: frozenset[str]) -> _Switch | None:
    """Try an argument of which only the word for off means something."""
    words = probe.words(name)
    word, prompt = words.recognised(named).get(Effort.NONE, ("", None))
    if prompt is None or prompt == words.other or _prints(words.other):
        return None
    return _Switch({}, {name: word}, probe.base, prompt)


def _word_scale(
    probe: _Probe, name: str, named: frozenset[str], switch: _Switch | None
) -> EffortScale | None:
    """Make the levels of an argument that takes words; None if fewer than two kinds of prompt come of them."""
    # Reasoning that is off by default has to be switched on beside the word, if the word does not do that.
    fixed: _Arguments = {}
    words = probe.words(name)
    is_ignored = len({*words.prompts.values(), words.other} - {None}) < 2
    if switch is not None and (is_ignored or switch.is_off_in(probe.base)):
        fixed = switch.on
        words = probe.words(name, fixed)
    by_prompt: dict[str, list[Effort]] = {}
    if _prints(words.other):
        found = {effort: (effort.value, words.prompts[effort.value] or "") for effort in _USUAL}
    else:
        found = words.recognised(named)
    for effort, (_, prompt) in found.items():
        by_prompt.setdefault(prompt, []).append(effort)
    levels: dict[Effort, Level] = {}
    prompts: dict[Effort, str] = {}
    for prompt, efforts in by_prompt.items():
        reasoning = [effort for effort in efforts if effort is not Effort.NONE]
        if not reasoning:
            continue
        effort = _most_fitting(prompt, reasoning)
        levels[effort] = Level(
            effort=effort,
            template_kwargs={**fixed, name: found[effort][0]},
            accepts=frozenset(reasoning),
        )
        prompts[effort] = prompt
    if not levels:
        return None
    if words.other is not None and not _prints(words.other) and words.other not in by_prompt:
        # What every other word comes to is a level of its own, which the template does not name.
        effort = _place_of_other(words.other, prompts)
        levels[effort] = Level(effort=effort, template_kwargs={**fixed, name: effort.value})
        prompts[effort] = words.other
    off_word, off_prompt = found.get(Effort.NONE, ("", None))
    off = {name: off_word} if off_prompt is not None and by_prompt[off_prompt] == [Effort.NONE] else None
    if switch is not None:
        off, off_prompt = dict(switch.off), switch.off_prompt
    if len(levels) < 2 and off is None:
        return None
    return _finished(probe, levels, prompts, off, off_prompt if off else None, switch)


def _prints(prompt: str | None) -> bool:
    """Whether a template printed the word that nobody knows."""
    return prompt is not None and _OTHER in prompt.lower()


def _most_fitting(prompt: str, efforts: Sequence[Effort]) -> Effort:
    """Return which of several words for one level is the level's name: one that the prompt says, or the highest."""
    said = [effort for effort in efforts if re.search(rf"\b{effort.value}\b", prompt, re.IGNORECASE)]
    return (said or efforts)[-1]


def _place_of_other(prompt: str, known: Mapping[Effort, str]) -> Effort:
    """Return the place of a level that has no word: by what only its prompt says, or where there is room."""
    seen = {word for other in known.values() for word in re.findall(r"[a-z]+", other.lower())}
    said = [word for word in re.findall(r"[a-z]+", prompt.lower()) if word not in seen]
    for effort in reversed(DIAL[1:]):
        if effort not in known and any(word in said for word in _WORDS[effort]):
            return effort
    room = (Effort.HIGH, Effort.MEDIUM, Effort.MAX, Effort.XHIGH, Effort.LOW, Effort.MINIMAL)
    return next(effort for effort in room if effort not in known)


def _flag_scale(probe: _Probe, flags: Sequence[str], switch: _Switch | None) -> EffortScale | None:
    """Make the levels of flags such as low_effort: each is a level below the one without any."""
    fixed: _Arguments = switch.on if switch and switch.is_off_in(probe.base) else {}
    unflagged = probe.render(fixed)
    levels: dict[Effort, Level] = {}
    prompts: dict[Effort, str] = {}
    for name in flags:
        match = _FLAG.match(name)
        prompt = probe.render(fixed, {name: True})
        if match is not None and prompt is not None and prompt != unflagged:
            effort = Effort(match[1])
            levels[effort] = Level(effort=effort, template_kwargs={**fixed, name: True})
            prompts[effort] = prompt
    if not levels or unflagged is None:
        return None
    top = _above(levels)
    levels[top], prompts[top] = Level(effort=top, template_kwargs=fixed), unflagged
    off = dict(switch.off) if switch else None
    return _finished(probe, levels, prompts, off, switch.off_prompt if switch else None, switch)


def _finished(
    probe: _Probe,
    levels: Mapping[Effort, Level],
    prompts: Mapping[Effort, str],
    off: _Arguments | None,
    off_prompt: str | None,
    switch: _Switch | None,
) -> EffortScale:
    """Order the levels, add `none`, and find which of them the template gives by itself."""
    ordered = [levels[effort] for effort in DIAL if effort in levels]
    lowest = ordered[0]
    # Without a word for it, the lowest level is told and the server closes the reasoning.
    none = Level(effort=Effort.NONE, template_kwargs=lowest.template_kwargs if off is None else off, budget=0)

    def level_of(prompt: str | None) -> Effort | None:
        return next((effort for effort in DIAL if prompt is not None and prompts.get(effort) == prompt), None)

    named = level_of(probe.base)
    if named is None and probe.base is not None and probe.base == off_prompt:
        named = Effort.NONE
    default = named or _middle(ordered)
    on = level_of(switch.on_prompt) if switch else None
    if on is None:
        on = default if default is not Effort.NONE else ordered[-1].effort
    tells_default = named is not None or probe.base is None
    return EffortScale(levels=(none, *ordered), default=default, on=on, tells_default=tells_default)


def _middle(levels: Sequence[Level]) -> Effort:
    """Return the level in the middle: what a template that prints any word means by none."""
    return levels[len(levels) // 2].effort


def _above(levels: Mapping[Effort, Any]) -> Effort:
    """Return the place above some levels: high, if they leave it free."""
    highest = max(DIAL.index(effort) for effort in levels)
    return DIAL[min(max(highest + 1, DIAL.index(Effort.HIGH)), len(DIAL) - 1)]


def _budget_scale(
    budgets: Mapping[Effort, int],
    switch: _Switch | None = None,
    base: str | None = None,
    *,
    told_as: str | None = None,
) -> EffortScale:
    """Make the levels of a model without a scale: budgets of tokens, and the model's own way above them."""
    on: _Arguments = switch.on if switch and base != switch.on_prompt else {}
    off: _Arguments = switch.off if switch else {told_as: 0} if told_as else {}
    limited = [
        Level(
            effort=effort,
            template_kwargs={**on, told_as: budgets[effort]} if told_as else on,
            budget=budgets[effort],
        )
        for effort in DIAL[1:-1]
        if effort in budgets
    ]
    top = _above({level.effort: level for level in limited} or {Effort.NONE: None})
    levels = (
        Level(effort=Effort.NONE, template_kwargs=off, budget=0),
        *limited,
        Level(effort=top, template_kwargs=on),
    )
    is_off = switch is not None and switch.is_off_in(base)
    return EffortScale(levels=levels, default=Effort.NONE if is_off else top, on=top)
