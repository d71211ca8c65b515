"""Settings that nearly fit a model's rules are made to fit.

Dify's SDK refuses a call for a value that is not an option, or for a digit too many. But a workflow is written for one
model and run with another: `high` for a model that can only be switched on, more tokens than this one can write. Where
the meaning is clear, the value is replaced; anything else is left for the SDK to refuse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dify_mlx_provider.servers.efforts import in_order, nearest
from mlx_backend.conversation.effort import EffortError, parse_effort

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dify_plugin.entities.model import ParameterRule

# Dify's other providers offer `JSON` for what OpenAI calls json_object.
_OPTION_ALIASES = {"json": "json_object"}


def coerce(settings: Mapping[str, Any], rules: Iterable[ParameterRule]) -> dict[str, Any]:
    """Return the settings with values that nearly fit made to fit."""
    coerced = dict(settings)
    for rule in rules:
        value = coerced.get(rule.name)
        if value is None:
            continue
        if rule.options and isinstance(value, str) and not value.strip():
            del coerced[rule.name]  # nothing was chosen
        elif rule.name == "reasoning_effort":
            coerced[rule.name] = _coerce_effort(value, rule.options)
        elif rule.options and isinstance(value, str):
            word = _OPTION_ALIASES.get(value.strip().lower(), value.strip().lower())
            coerced[rule.name] = next((option for option in rule.options if option.lower() == word), value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            coerced[rule.name] = _coerce_number(value, rule)
    return coerced


def _coerce_effort(value: Any, options: Sequence[str]) -> Any:
    if value in options:
        return value
    try:
        effort = parse_effort(value)
    except EffortError:
        return value
    return nearest(effort.value, options) if in_order(options) else effort.value


def _coerce_number(value: float, rule: ParameterRule) -> float:
    if rule.precision is not None:
        value = round(value, rule.precision)
    # A limit above what the model can write is no limit.
    if rule.name in ("max_tokens", "thinking_budget") and rule.max is not None and value > rule.max:
        return int(rule.max)
    # A number that came through JSON as 20.0 is 20.
    return int(value) if rule.precision is None and value == int(value) else value
