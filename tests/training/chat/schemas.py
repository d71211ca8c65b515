"""Objects as JSON and as JSON schemas, in the many ways that programs write them. Knows no prompt and no dialogue."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from training.chat.slots import Field
from training.chat.words import invent, sentence

UNKNOWN_TEXT: Final = "unknown"
_EMPTY: Final[dict[str, Any]] = {
    "string": UNKNOWN_TEXT,
    "integer": 0,
    "number": 0,
    "boolean": False,
    "array": [],
}
_GROUPS: Final = (
    "person",
    "user",
    "details",
    "data",
    "order",
    "info",
    "address",
    "contact",
    "trip",
    "customer",
    "event",
)


@dataclass(frozen=True)
class ObjectShape:
    """An object: its fields in order, those of them that stand in an object of their own, and what need not be there.

    The model writes every field all the same. If the text has no value for it: "unknown" for a string, null for
    another type where that is allowed, or else an empty value.
    """

    fields: tuple[Field, ...]
    group: str = ""
    grouped: int = 0  # how many of the last fields
    optional: frozenset[str] = frozenset()
    nullable: frozenset[str] = frozenset()

    def _items(self, fields: Sequence[Field]) -> dict[str, Any]:
        return {field.key: self._value(field) for field in fields}

    def _value(self, field: Field) -> Any:
        if field.value is not None:
            return field.value
        if field.key in self.nullable and field.type != "string":
            return None
        return list(value) if isinstance(value := _EMPTY[field.type], list) else value

    def split(self) -> tuple[tuple[Field, ...], tuple[Field, ...]]:
        """Return the fields of the object itself and those of its group."""
        at = len(self.fields) - self.grouped
        return self.fields[:at], self.fields[at:]

    def object(self) -> dict[str, Any]:
        """Return the object with its right values."""
        outer, inner = self.split()
        items = self._items(outer)
        return {**items, self.group: self._items(inner)} if self.grouped else items

    def text(self) -> str:
        """Return the object as the model writes it."""
        return json.dumps(self.object(), ensure_ascii=False)


def shape(rng: random.Random, fields: tuple[Field, ...]) -> ObjectShape:
    """Return an object of these fields; sometimes with a group, fields that may be left out, or null."""
    group, grouped = "", 0
    if len(fields) > 1 and rng.random() < 0.13:
        group = rng.choice(_GROUPS) if rng.random() < 0.7 else invent(rng)
        grouped = rng.randint(1, len(fields))
        if any(field.key == group for field in fields):
            grouped = 0
    optional: set[str] = set()
    nullable: set[str] = set()
    for field in fields:
        draw = rng.random()
        if draw < (0.5 if field.value is None else 0.1):
            optional.add(field.key)
        elif draw < (0.75 if field.value is None else 0.17) and field.type in ("string", "integer", "number"):
            nullable.add(field.key)
    return ObjectShape(fields, group if grouped else "", grouped, frozenset(optional), frozenset(nullable))


def schema(rng: random.Random, shape: ObjectShape) -> dict[str, Any]:
    """Return a JSON schema of an object, with its keywords in one of the usual orders."""
    style = rng.random()
    titled, described = style < 0.35, rng.random() < 0.65
    is_sorted = rng.random() < 0.25
    outer, inner = shape.split()
    definitions: dict[str, Any] = {}

    def ordered(items: dict[str, Any]) -> dict[str, Any]:
        if is_sorted:
            return dict(sorted(items.items()))
        if rng.random() < 0.35:
            names = list(items)
            rng.shuffle(names)
            return {name: items[name] for name in names}
        return items

    def property_of(field: Field) -> dict[str, Any]:
        items: dict[str, Any] = {}
        if titled:
            items["title"] = _title(field.key)
        if described and field.description:
            items["description"] = field.description
        if field.key in shape.nullable:
            if rng.random() < 0.5:
                items["anyOf"] = [{"type": field.type}, {"type": "null"}]
            else:
                items["type"] = [field.type, "null"]
            return ordered(items)
        if field.type == "enum":
            items["enum"] = list(field.choices)
            if rng.random() < 0.75:
                items["type"] = "string"
            return ordered(items)
        items["type"] = field.type
        if field.type == "array":
            items["items"] = {"type": "string"}
        elif rng.random() < 0.12:
            longest = rng.choice([limit for limit in (20, 50, 100, 500) if limit >= len(str(field.value))])
            limits = {"string": {"maxLength": longest}, "integer": {"minimum": 0}, "number": {"minimum": 0}}
            items.update(limits.get(field.type, {}))
        return ordered(items) if rng.random() < 0.7 else {**items, "type": items.pop("type")}

    def object_of(fields: Sequence[Field], extra: dict[str, Any], title: str) -> dict[str, Any]:
        properties = {field.key: property_of(field) for field in fields} | extra
        items: dict[str, Any] = {"type": "object", "properties": properties}
        required = [key for key in properties if key not in shape.optional]
        if required or rng.random() < 0.5:
            items["required"] = required
        if rng.random() < 0.6:
            items["additionalProperties"] = False
        if titled:
            items["title"] = title
        if rng.random() < 0.06:
            items["description"] = sentence(rng, 2, 8)
        return ordered(items)

    extra: dict[str, Any] = {}
    if shape.grouped:
        title = _title(shape.group).replace(" ", "")
        part = object_of(inner, {}, title)
        if rng.random() < 0.5:
            definitions[title] = part
            part = {"$ref": f"#/$defs/{title}"}
        extra[shape.group] = part
    whole = object_of(
        outer,
        extra,
        _title(rng.choice((*_GROUPS, invent(rng)))).replace(" ", "") + rng.choice(("", "Info", "Data")),
    )
    if definitions:
        return {"$defs": definitions, **whole} if rng.random() < 0.7 else {**whole, "$defs": definitions}
    if rng.random() < 0.06:
        return {"$schema": "http://json-schema.org/draft-07/schema#", **whole}
    return whole


def _title(key: str) -> str:
    return " ".join(word.capitalize() for word in key.split("_"))


def _told(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return json.dumps(value, ensure_ascii=False).strip('"')


def analyses(shape: ObjectShape) -> tuple[str, str, str]:
    """Return the analysis of a reply with an object."""
    outer, inner = shape.split()
    listed = _listed(outer)
    if shape.grouped:
        listed = ", ".join(filter(None, (listed, f'"{shape.group}" with {_listed(inner)}')))
    values = {**shape.object(), **(shape.object()[shape.group] if shape.grouped else {})}
    told = " ".join(f"{field.key} is {_told(values[field.key])}." for field in (*outer, *inner))
    low = f"Answer with JSON. The fields are {listed or 'none'}."
    high = f"Let me check each field before I write. {told} Then I write the object and nothing else."
    return low, "I take the values from the text and from what I know.", high


def _listed(fields: Sequence[Field]) -> str:
    # In quotes a word is the same tokens as in a schema.
    return ", ".join(f'"{field.key}"' for field in fields)


def tool_of(rng: random.Random, shape: ObjectShape, name: str, description: str) -> dict[str, Any]:
    """Return a tool whose parameters are the fields."""
    properties: dict[str, Any] = {}
    for field in shape.fields:
        items: dict[str, Any] = {"description": field.description or sentence(rng, 2, 6)}
        if field.type == "enum":
            items |= {"type": "string", "enum": list(field.choices)}
        else:
            items["type"] = field.type
            if field.type == "array":
                items["items"] = {"type": "string"}
        properties[field.key] = items
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    parameters["required"] = [field.key for field in shape.fields if field.key not in shape.optional]
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }
