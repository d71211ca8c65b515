"""Turns the levels found in a chat template into an `EffortScale`: ordered, with `none`, a default, and budgets.

Pure functions: effort_probe.py renders, and effort_words.py says what words mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.effort import Effort
from mlx_backend.conversation.effort_scale import DIAL, EffortScale, Level

if TYPE_CHECKING:
    from collections.abc import Sequence

type Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Switch:
    """What switches reasoning on and off, and the prompts it gives."""

    on: Arguments
    off: Arguments
    on_prompt: str | None
    off_prompt: str

    def is_off_in(self, prompt: str | None) -> bool:
        """Whether a prompt is the one of reasoning switched off."""
        return prompt == self.off_prompt


def ordered_scale(
    base: str | None,
    levels: Mapping[Effort, Level],
    prompts: Mapping[Effort, str],
    off: Arguments | None,
    off_prompt: str | None,
    switch: Switch | None,
) -> EffortScale:
    """Order the levels, add `none`, and find which of them the template gives by itself, in the prompt `base`."""
    ordered = [levels[effort] for effort in DIAL if effort in levels]
    lowest = ordered[0]
    # Without a word for it, the lowest level is told and the server closes the reasoning.
    none = Level(effort=Effort.NONE, template_kwargs=lowest.template_kwargs if off is None else off, budget=0)

    def level_of(prompt: str | None) -> Effort | None:
        return next((effort for effort in DIAL if prompt is not None and prompts.get(effort) == prompt), None)

    named = level_of(base)
    if named is None and base is not None and base == off_prompt:
        named = Effort.NONE
    default = named or _middle(ordered)
    on = level_of(switch.on_prompt) if switch else None
    if on is None:
        on = default if default is not Effort.NONE else ordered[-1].effort
    tells_default = named is not None or base is None
    return EffortScale(levels=(none, *ordered), default=default, on=on, tells_default=tells_default)


def _middle(levels: Sequence[Level]) -> Effort:
    """Return the level in the middle: what a template that prints any word means by none."""
    return levels[len(levels) // 2].effort


def level_above(levels: Mapping[Effort, Any]) -> Effort:
    """Return the effort above some levels: high, if it is not among them."""
    highest = max(DIAL.index(effort) for effort in levels)
    return DIAL[min(max(highest + 1, DIAL.index(Effort.HIGH)), len(DIAL) - 1)]


def budget_scale(
    budgets: Mapping[Effort, int],
    switch: Switch | None = None,
    base: str | None = None,
    *,
    told_as: str | None = None,
    tells_none: bool = True,
    tells_any: bool = True,
) -> EffortScale:
    """Make the levels of a model without a scale: budgets of tokens, and the model's own way above them.

    `told_as` is the template's argument for a budget; `tells_none` says whether it takes 0, and `tells_any` whether it
    takes any other number.
    """
    on: Arguments = switch.on if switch and base != switch.on_prompt else {}
    off: Arguments = switch.off if switch else {told_as: 0} if told_as and tells_none else {}
    limited = [
        Level(
            effort=effort,
            template_kwargs={**on, told_as: budgets[effort]} if told_as else on,
            budget=budgets[effort],
        )
        for effort in DIAL[1:-1]
        if effort in budgets
    ]
    top = level_above({level.effort: level for level in limited} or {Effort.NONE: None})
    levels = (
        Level(effort=Effort.NONE, template_kwargs=off, budget=0),
        *limited,
        Level(effort=top, template_kwargs=on),
    )
    is_off = switch is not None and switch.is_off_in(base)
    return EffortScale(
        levels=levels,
        default=Effort.NONE if is_off else top,
        on=top,
        # A third way ("adaptive") is none of the levels: where nothing states an effort, nothing is told.
        tells_default=switch is None or is_off or base in (None, switch.on_prompt),
        budget_argument=told_as if tells_any else None,
    )


def nested(arguments: Arguments) -> dict[str, Any]:
    """Return arguments with `reasoning.effort` as the part of an object."""
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        owner, _, part = name.partition(".")
        if part:
            found[owner] = {**found.get(owner, {}), part: value}
        else:
            found[name] = value
    return found


def with_part(arguments: Arguments, name: str, value: Any) -> dict[str, Any]:
    """Return a template's arguments with another value for one, or for a part of one; None takes it away."""
    owner, _, part = name.partition(".")
    changed = dict(arguments)
    if part:
        holder = changed.get(owner)
        value = {**(holder if isinstance(holder, dict) else {}), part: value}
        value = {each: given for each, given in value.items() if given is not None} or None
    if value is None:
        changed.pop(owner, None)
    else:
        changed[owner] = value
    return changed
