"""Settings as they come from a workflow's file, brought to what a model's schema takes.

Dify's SDK refuses a call for a value that is not an option or a digit too many. But a workflow is written for one model
and run with another: `high` for a model that can only be switched on, more tokens than this one can write. What was
meant is clear, and so is done; what cannot be read is left for the SDK to refuse. Knows no SDK: rules are objects
with a name, options and limits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from dify_mlx_provider.upstream.effort_levels import in_order, nearest
from mlx_backend.conversation import effort as efforts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


# Dify's other providers offer `JSON` for what OpenAI calls json_object.
_WORDS = {"json": "json_object"}


class Rule(Protocol):
    """A setting's rule, as far as it is looked at here."""

    @property
    def name(self) -> str:
        """The setting's name."""

    @property
    def options(self) -> Sequence[str]:
        """What a select offers."""

    @property
    def max(self) -> float | None:
        """The largest value."""

    @property
    def precision(self) -> int | None:
        """Digits behind the point."""


def lenient(settings: Mapping[str, Any], rules: Iterable[Rule]) -> dict[str, Any]:
    """Return the settings with what is nearly right made right."""
    taken = dict(settings)
    for rule in rules:
        value = taken.get(rule.name)
        if value is None:
            continue
        if rule.options and isinstance(value, str) and not value.strip():
            del taken[rule.name]  # nothing was chosen
            continue
        if rule.name == "reasoning_effort":
            taken[rule.name] = _effort(value, rule.options)
        elif rule.options and isinstance(value, str):
            meant = _WORDS.get(value.strip().lower(), value.strip().lower())
            taken[rule.name] = next((option for option in rule.options if option.lower() == meant), value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            taken[rule.name] = _number(value, rule)
    return taken


def _effort(value: Any, options: Sequence[str]) -> Any:
    if value in options:
        return value
    try:
        effort = efforts.parse(value)
    except efforts.EffortError:
        return value
    return nearest(effort.value, options) if in_order(options) else effort.value


def _number(value: float, rule: Rule) -> float:
    if rule.precision is not None:
        value = round(value, rule.precision)
    # A model that is asked for more tokens than it can write writes as many as it can.
    if rule.name == "max_tokens" and rule.max is not None and value > rule.max:
        return int(rule.max)
    # A number that came through JSON as 20.0 is 20.
    return int(value) if rule.precision is None and value == int(value) else value
