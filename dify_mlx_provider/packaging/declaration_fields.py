"""Checks what declarations share: texts in several languages, credential forms, parameter rules.

As in declaration.py: one line per fault, by the strictest of Dify's readers.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

LANGUAGES = ("en_US", "zh_Hans", "ja_JP", "pt_BR")
REQUIRED_LANGUAGES = ("en_US", "ja_JP", "zh_Hans")

# The daemon knows `switch` too; Dify's page does not draw it.
FIELD_TYPES = ("text-input", "secret-input", "select", "radio")
FIELD_KEYS = {
    *("variable", "label", "type", "required", "default", "options", "placeholder", "max_length", "show_on"),
    *("help", "url"),
}
VARIABLE = re.compile(r"[A-Za-z_]\w{0,255}", re.ASCII)
MODEL_TYPE = "__model_type"  # a show_on of this name means the type of the model that is being added
MAX_FIELDS = 32
MAX_OPTIONS = 128

PARAMETER_TYPES = ("float", "int", "string", "boolean", "text")
PARAMETER_KEYS = {
    *("name", "use_template", "label", "type", "help", "required", "default", "min", "max", "precision"),
    "options",
}
NUMBERS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float)}
# What a template fills in where a rule says nothing: type, min and max.
TEMPLATES: dict[str, tuple[str, float | None, float | None]] = {
    "temperature": ("float", 0.0, 1.0),
    "top_p": ("float", 0.0, 1.0),
    "top_k": ("int", 1, 100),
    "presence_penalty": ("float", 0.0, 1.0),
    "frequency_penalty": ("float", 0.0, 1.0),
    "max_tokens": ("int", 1, 2048),
    "response_format": ("string", None, None),
    "json_schema": ("text", None, None),
}


def unknown_keys(where: str, mapping: Mapping[str, Any], known: set[str]) -> Iterator[str]:
    """Yield keys that no reader of Dify's knows."""
    for key in sorted(str(key) for key in mapping if key not in known):
        yield f"{where}{key} is an unknown key"


def i18n_faults(where: str, text: Any) -> Iterator[str]:
    """Yield the faults of a text in several languages: ours must be there, and no name misspelt."""
    if not isinstance(text, dict):
        yield f"{where} is {text!r}; Dify wants one text per language (en_US, …)"
        return
    for language in sorted(set(text) - set(LANGUAGES)):
        yield f"{where}: {language} is not a language of Dify's ({', '.join(LANGUAGES)})"
    for language in REQUIRED_LANGUAGES:
        if not isinstance(text.get(language), str) or not text[language].strip():
            yield f"{where}: {language} is missing"


def form_faults(where: str, fields: Sequence[Mapping[str, Any]], model_types: Sequence[str]) -> Iterator[str]:
    """Yield the faults of a credential form."""
    if len(fields) > MAX_FIELDS:
        yield f"{where}{len(fields)} fields; Dify takes {MAX_FIELDS}"
    values: dict[str, list[str]] = {MODEL_TYPE: list(model_types)}
    for field in fields:
        variable = str(field.get("variable"))
        if variable in values:
            yield f"{where}{variable} appears twice"
        values[variable] = [str(option.get("value")) for option in field.get("options") or []]
    for field in fields:
        here = f"{where}{field.get('variable')}: "
        yield from _field_faults(here, field)
        for conditional in (field, *(field.get("options") or [])):
            for condition in conditional.get("show_on") or []:
                variable, value = condition.get("variable"), condition.get("value")
                if variable not in values or value not in values[variable]:
                    yield f"{here}show_on {variable} = {value!r} can never be true"


def _field_faults(where: str, field: Mapping[str, Any]) -> Iterator[str]:
    yield from unknown_keys(where, field, FIELD_KEYS)
    if not isinstance(field.get("variable"), str) or not VARIABLE.fullmatch(field["variable"]):
        yield f"{where}variable is not a valid name"
    yield from i18n_faults(f"{where}label", field.get("label"))
    for key in ("placeholder", "help"):
        if key in field:
            yield from i18n_faults(f"{where}{key}", field[key])
    if field.get("type") not in FIELD_TYPES:
        yield f"{where}type is {field.get('type')!r}; Dify's page draws {', '.join(FIELD_TYPES)}"
    if type(field.get("required")) is not bool:
        yield f"{where}required is {field.get('required')!r}, and must be true or false"
    if "default" in field and not isinstance(field["default"], str):
        yield f"{where}default is {field['default']!r}; Dify reads text: put it in quotes"
    if field.get("type") not in ("select", "radio"):
        return
    options = field.get("options") or []
    if not 0 < len(options) <= MAX_OPTIONS:
        yield f"{where}{len(options)} options; Dify takes 1 to {MAX_OPTIONS}"
    values = [option.get("value") for option in options]
    for option in options:
        if not isinstance(option.get("value"), str):
            yield f"{where}option {option.get('value')!r} is not text: put it in quotes"
        yield from i18n_faults(f"{where}option {option.get('value')}", option.get("label"))
    if len(set(map(str, values))) < len(values):
        yield f"{where}an option appears twice"
    if "default" in field and field["default"] not in values:
        yield f"{where}default {field['default']!r} is not among the options"


def parameter_faults(where: str, rule: Mapping[str, Any]) -> Iterator[str]:
    """Yield the faults of a model's parameter: one line of the settings panel."""
    yield from unknown_keys(where, rule, PARAMETER_KEYS)
    if not isinstance(rule.get("name"), str) or not VARIABLE.fullmatch(rule["name"]):
        yield f"{where}name is not a valid name"
    template = rule.get("use_template")
    if template is not None and template not in TEMPLATES:
        yield f"{where}use_template is {template!r}; Dify knows {', '.join(TEMPLATES)}"
        return
    filled = TEMPLATES[template] if template else (None, None, None)
    kind = rule.get("type", filled[0])
    if kind not in PARAMETER_TYPES:
        yield f"{where}type is {kind!r}; Dify knows {', '.join(PARAMETER_TYPES)}"
        return
    if template is None or "label" in rule:
        yield from i18n_faults(f"{where}label", rule.get("label"))
    if "help" in rule:
        yield from i18n_faults(f"{where}help", rule["help"])
    if template == "max_tokens" and "max" not in rule:
        yield f"{where}the template's max is {TEMPLATES['max_tokens'][2]} tokens; give one"
    if type(rule.get("required", False)) is not bool:
        yield f"{where}required is {rule['required']!r}, and must be true or false"
    yield from _number_faults(where, kind, rule, filled)
    yield from _option_faults(where, kind, rule)


def _number_faults(
    where: str, kind: str, rule: Mapping[str, Any], filled: tuple[str | None, float | None, float | None]
) -> Iterator[str]:
    bounds = {key: rule[key] for key in ("min", "max", "precision") if rule.get(key) is not None}
    if kind not in NUMBERS:
        for key in bounds:
            yield f"{where}{key} has no meaning for a {kind}"
        return
    numbers = bounds | ({"default": rule["default"]} if rule.get("default") is not None else {})
    for key, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, NUMBERS[kind]):
            yield f"{where}{key} is {number!r}, which is not a valid {kind}"
            return
    low, high = bounds.get("min", filled[1]), bounds.get("max", filled[2])
    default = rule.get("default")
    if low is not None and high is not None and low > high:
        yield f"{where}min {low} is above max {high}"
    elif default is not None and (
        (low is not None and default < low) or (high is not None and default > high)
    ):
        yield f"{where}default {default} is not between {low} and {high}"


def _option_faults(where: str, kind: str, rule: Mapping[str, Any]) -> Iterator[str]:
    options = rule.get("options") or []
    default = rule.get("default")
    if options and kind != "string":
        yield f"{where}options are for a string, not for a {kind}"
    if len(options) > MAX_OPTIONS:
        yield f"{where}{len(options)} options; Dify takes {MAX_OPTIONS}"
    if not all(isinstance(option, str) for option in options) or len(set(map(str, options))) < len(options):
        yield f"{where}options are {options!r}; Dify wants texts, each once"
    if options and default is not None and default not in options:
        yield f"{where}default {default!r} is not among the options"
    if rule.get("required") and default is None:
        yield f"{where}required without a default: Dify's own background requests send no value, and would fail"
    if kind in ("string", "text") and default is not None and not isinstance(default, str):
        yield f"{where}default is {default!r}, which is not text"
    if kind == "boolean" and default is not None and not isinstance(default, bool):
        yield f"{where}default is {default!r}, and must be true or false"
