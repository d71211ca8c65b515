"""The parts that declarations share: texts in several languages, credential forms, parameter rules.

As declaration.py: one line per fault, the strictest of Dify's readers decides.
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
MODEL_TYPE = "__model_type"  # a show_on of this name asks for the kind of model that is being added
MAX_FIELDS = 32
MAX_OPTIONS = 128

PARAMETER_TYPES = ("float", "int", "string", "boolean", "text")
PARAMETER_KEYS = {
    *("name", "use_template", "label", "type", "help", "required", "default", "min", "max", "precision"),
    "options",
}
NUMBERS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float)}
# What a template fills in where a rule says nothing: type, least and most.
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


def unknown_keys(at: str, mapping: Mapping[str, Any], known: set[str]) -> Iterator[str]:
    """Yield keys that nobody reads."""
    for key in sorted(str(key) for key in mapping if key not in known):
        yield f"{at}{key} is a key that nobody reads"


def i18n_faults(at: str, text: Any) -> Iterator[str]:
    """Yield what is wrong with a text in several languages: ours are all there, and no other is misspelt."""
    if not isinstance(text, dict):
        yield f"{at} is {text!r}; Dify wants one text a language (en_US, …)"
        return
    for language in sorted(set(text) - set(LANGUAGES)):
        yield f"{at}: {language} is no language of Dify's ({', '.join(LANGUAGES)})"
    for language in REQUIRED_LANGUAGES:
        if not isinstance(text.get(language), str) or not text[language].strip():
            yield f"{at}: {language} is missing"


def form_faults(at: str, fields: Sequence[Mapping[str, Any]], model_types: Sequence[str]) -> Iterator[str]:
    """Yield the faults of a credential form."""
    if len(fields) > MAX_FIELDS:
        yield f"{at}{len(fields)} fields; Dify takes {MAX_FIELDS}"
    values: dict[str, list[str]] = {MODEL_TYPE: list(model_types)}
    for field in fields:
        variable = str(field.get("variable"))
        if variable in values:
            yield f"{at}{variable} stands twice"
        values[variable] = [str(option.get("value")) for option in field.get("options") or []]
    for field in fields:
        here = f"{at}{field.get('variable')}: "
        yield from _field_faults(here, field)
        for shown in (field, *(field.get("options") or [])):
            for condition in shown.get("show_on") or []:
                variable, value = condition.get("variable"), condition.get("value")
                if variable not in values or value not in values[variable]:
                    yield f"{here}show_on {variable} = {value!r} can never be so"


def _field_faults(at: str, field: Mapping[str, Any]) -> Iterator[str]:
    yield from unknown_keys(at, field, FIELD_KEYS)
    if not isinstance(field.get("variable"), str) or not VARIABLE.fullmatch(field["variable"]):
        yield f"{at}variable is no name"
    yield from i18n_faults(f"{at}label", field.get("label"))
    for key in ("placeholder", "help"):
        if key in field:
            yield from i18n_faults(f"{at}{key}", field[key])
    if field.get("type") not in FIELD_TYPES:
        yield f"{at}type is {field.get('type')!r}; Dify's page draws {', '.join(FIELD_TYPES)}"
    if type(field.get("required")) is not bool:
        yield f"{at}required is {field.get('required')!r}, and has to be true or false"
    if "default" in field and not isinstance(field["default"], str):
        yield f"{at}default is {field['default']!r}; Dify reads text: put it in quotes"
    if field.get("type") not in ("select", "radio"):
        return
    options = field.get("options") or []
    if not 0 < len(options) <= MAX_OPTIONS:
        yield f"{at}{len(options)} options; Dify takes 1 to {MAX_OPTIONS}"
    values = [option.get("value") for option in options]
    for option in options:
        if not isinstance(option.get("value"), str):
            yield f"{at}option {option.get('value')!r} is not text: put it in quotes"
        yield from i18n_faults(f"{at}option {option.get('value')}", option.get("label"))
    if len(set(map(str, values))) < len(values):
        yield f"{at}an option stands twice"
    if "default" in field and field["default"] not in values:
        yield f"{at}default {field['default']!r} is not among the options"


def parameter_faults(at: str, rule: Mapping[str, Any]) -> Iterator[str]:
    """Yield the faults of a model's parameter: one line of the settings panel."""
    yield from unknown_keys(at, rule, PARAMETER_KEYS)
    if not isinstance(rule.get("name"), str) or not VARIABLE.fullmatch(rule["name"]):
        yield f"{at}name is no name"
    template = rule.get("use_template")
    if template is not None and template not in TEMPLATES:
        yield f"{at}use_template is {template!r}; Dify knows {', '.join(TEMPLATES)}"
        return
    filled = TEMPLATES[template] if template else (None, None, None)
    kind = rule.get("type", filled[0])
    if kind not in PARAMETER_TYPES:
        yield f"{at}type is {kind!r}; Dify knows {', '.join(PARAMETER_TYPES)}"
        return
    if template is None or "label" in rule:
        yield from i18n_faults(f"{at}label", rule.get("label"))
    if "help" in rule:
        yield from i18n_faults(f"{at}help", rule["help"])
    if template == "max_tokens" and "max" not in rule:
        yield f"{at}the template's max is {TEMPLATES['max_tokens'][2]} tokens; give one"
    if type(rule.get("required", False)) is not bool:
        yield f"{at}required is {rule['required']!r}, and has to be true or false"
    yield from _number_faults(at, kind, rule, filled)
    yield from _option_faults(at, kind, rule)


def _number_faults(
    at: str, kind: str, rule: Mapping[str, Any], filled: tuple[str | None, float | None, float | None]
) -> Iterator[str]:
    bounds = {key: rule[key] for key in ("min", "max", "precision") if rule.get(key) is not None}
    if kind not in NUMBERS:
        for key in bounds:
            yield f"{at}{key} means nothing for a {kind}"
        return
    numbers = bounds | ({"default": rule["default"]} if rule.get("default") is not None else {})
    for key, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, NUMBERS[kind]):
            yield f"{at}{key} is {number!r}, which is no {kind}"
            return
    least, most = bounds.get("min", filled[1]), bounds.get("max", filled[2])
    default = rule.get("default")
    if least is not None and most is not None and least > most:
        yield f"{at}min {least} is above max {most}"
    elif default is not None and (
        (least is not None and default < least) or (most is not None and default > most)
    ):
        yield f"{at}default {default} is not between {least} and {most}"


def _option_faults(at: str, kind: str, rule: Mapping[str, Any]) -> Iterator[str]:
    options = rule.get("options") or []
    default = rule.get("default")
    if options and kind != "string":
        yield f"{at}options are for a string, not for a {kind}"
    if len(options) > MAX_OPTIONS:
        yield f"{at}{len(options)} options; Dify takes {MAX_OPTIONS}"
    if not all(isinstance(option, str) for option in options) or len(set(map(str, options))) < len(options):
        yield f"{at}options are {options!r}; Dify wants texts, each once"
    if options and default is not None and default not in options:
        yield f"{at}default {default!r} is not among the options"
    if rule.get("required") and default is None:
        yield f"{at}required without a default: Dify's side calls send no value, and would all fail"
    if kind in ("string", "text") and default is not None and not isinstance(default, str):
        yield f"{at}default is {default!r}, which is no text"
    if kind == "boolean" and default is not None and not isinstance(default, bool):
        yield f"{at}default is {default!r}, and has to be true or false"
