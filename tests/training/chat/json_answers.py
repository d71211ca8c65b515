"""Answers in JSON: by a schema in the prompt, by keys that are named, or in a shape that the model chooses.

A schema stands where Harmony puts it, under "# Response Formats" at the end of the instructions, or in anybody's words.
Knows nothing of Harmony's messages or tokens.
"""

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from training.chat.exchange import Dialogue, Exchange, Reply, is_on_side
from training.chat.facts import capital, colour, country, follow_up_of, no_total, opposite, sound, total
from training.chat.json_wordings import (
    BY_SCHEMA,
    COMMON,
    FENCED_TOO,
    FORMAT_NAMES,
    FREE,
    FREE_FENCED,
    FREE_SYSTEM,
    KEYED,
    SURE,
    TEXT_FORMS,
)
from training.chat.phrasing import preceded
from training.chat.records import Record, invented_key, plain_record, record
from training.chat.results import parameter_name
from training.chat.schemas import ObjectShape, analyses, schema, shape
from training.chat.skills import unknown_question
from training.chat.slots import Field
from training.chat.tools import known_tool, named_tool, toolbox
from training.chat.words import invent, sentence

_FACT_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "country": ("country", "country", "country_name", "nation", "state"),
    "capital": ("capital", "capital", "city", "capital_city", "answer", "result", "value"),
    "thing": ("thing", "object", "item", "subject"),
    "colour": ("colour", "color", "color", "answer", "result"),
    "animal": ("animal", "animal_name", "animal"),
    "sound": ("sound", "noise", "answer", "says"),
    "word": ("word", "input", "term"),
    "opposite": ("opposite", "antonym", "answer", "result"),
    "a": ("a", "first", "x", "first_number"),
    "b": ("b", "second", "y", "second_number"),
    "sum": ("sum", "result", "total", "answer", "value"),
    "name": ("name", "name", "user_name"),
    "city": ("city", "city", "home"),
    "text": ("text", "echo", "words"),
    "message": ("message", "text", "reply", "greeting"),
    "numbers": ("numbers", "list", "result"),
    "abilities": ("abilities", "answer"),
    "answer": ("answer", "text", "reply"),
    "error": ("answer", "capital", "color", "result", "sum", "text", "value", "sound"),
}
_FACT_TYPES: Final = {"a": "integer", "b": "integer", "sum": "integer", "numbers": "numbers"}


_FACT_SKILLS: Final = (
    (capital, 30),
    (country, 5),
    (colour, 13),
    (sound, 10),
    (opposite, 13),
    (total, 18),
    (no_total, 3),
)


def _fact(rng: random.Random, held: bool) -> Exchange:
    makers, weights = zip(*_FACT_SKILLS, strict=True)
    while True:
        exchange = (unknown_question if rng.random() < 0.12 else rng.choices(makers, weights)[0])(rng)
        if exchange.fields and is_on_side(exchange, held):
            return exchange


def _fact_fields(rng: random.Random, exchange: Exchange, held: bool) -> list[tuple[str, Field]]:
    """Return fields for the answer to a question, each with what it stands for: a field of the exchange, or the answer.

    They hold what the answer says, and perhaps what was asked, the answer as a sentence, and whether it is known.
    """
    *given, (name, value) = exchange.fields
    is_known = name != "error"
    fields = []
    for key, known in given:
        if rng.random() < 0.65:
            fields.append(
                (
                    key,
                    Field(rng.choice(_FACT_KEYS[key]), _FACT_TYPES.get(key, "string"), known, f"The {key}."),
                )
            )
    kind = _FACT_TYPES.get(name, "string")
    key = rng.choice(_FACT_KEYS[name])
    description = (
        rng.choice((f"The {name}.", f"The {name} alone.", "The answer.", f"The {name} of it", ""))
        if is_known
        else ""
    )
    if name in ("capital", "colour", "opposite", "sum", "sound") and rng.random() < 0.12:
        key, description = (
            invented_key(rng, held),
            rng.choice((f"The {name}.", f"The {name} of it", "The answer.")),
        )
    fields.append((name, Field(key, kind, value if is_known else None, description)))
    if is_known and rng.random() < 0.1 and value != exchange.reply.answer:
        sentence_key = rng.choice(("sentence", "explanation", "full_answer"))
        fields.append((_WHOLE, Field(sentence_key, "string", exchange.reply.answer, "A whole sentence.")))
    if rng.random() < 0.3:
        description = rng.choice(("Whether it is known.", "If the answer is certain", ""))
        fields.append((_KNOWN, Field(rng.choice(SURE), "boolean", is_known, description)))
    if rng.random() < 0.08:
        confidence = Field(
            "confidence",
            rng.choice(("number", "integer")),
            int(is_known),
            rng.choice(("How sure you are.", "")),
        )
        fields.append((_CONFIDENCE, confidence))
    unique = list({field.key: (meaning, field) for meaning, field in fields}.values())
    if rng.random() < 0.4:
        rng.shuffle(unique)
    return unique


def _next_fact(
    rng: random.Random, first: Exchange, fields: list[tuple[str, Field]], held: bool
) -> tuple[str, tuple[Field, ...]]:
    """Return another question of the same skill, and the same fields with its values."""
    follow_up = follow_up_of(first.skill)
    assert follow_up is not None
    while not is_on_side(exchange := follow_up(rng), held):
        pass
    values = {**dict(exchange.fields), _WHOLE: exchange.reply.answer, _KNOWN: True, _CONFIDENCE: 1}
    return exchange.message.strip(), tuple(replace(field, value=values[meaning]) for meaning, field in fields)


_KNOWN, _WHOLE, _CONFIDENCE = (
    "is known",
    "whole answer",
    "confidence",
)  # what a field may stand for, other than the fields of an exchange


def _task(rng: random.Random, held: bool) -> tuple[str, list[tuple[str, tuple[Field, ...]]]]:
    """Return what kind of task it is, and one or two turns: the user's text, and the fields to answer with."""
    if rng.random() < 0.3:
        exchange = _fact(rng, held)
        fields = _fact_fields(rng, exchange, held)
        if all(field.type != "numbers" for _, field in fields):
            turns = [(exchange.message.strip(), tuple(field for _, field in fields))]
            if follow_up_of(exchange.skill) and rng.random() < 0.2:
                turns.append(_next_fact(rng, exchange, fields, held))
            return "question", turns
    drawn: Record = record(rng, held)
    return "sentence" if drawn.is_plain else "text", [(drawn.text, drawn.fields)]


def _listed(rng: random.Random, keys: list[str]) -> str:
    quote = rng.choice(("", "", '"', "`", "'"))
    words = [f"{quote}{key}{quote}" for key in keys]
    if len(words) == 1 or rng.random() < 0.3:
        return ", ".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


_NUMBER: Final = re.compile(r"\d+(\.\d+)?")
_NOUNS: Final = {"string": "a string", "integer": "an integer", "number": "a number", "boolean": "a boolean",
    "array": "a list of strings",
                 "enum": "a string"}  # fmt: skip


def _example(rng: random.Random, fields: tuple[Field, ...]) -> str:
    """Return an object that shows the shape, with placeholders for the values."""
    holders: dict[str, Any] = {
        "string": rng.choice(("...", "string", "", "text")),
        "integer": 0,
        "number": 0,
        "boolean": True,
        "array": ["..."],
    }
    values: dict[str, Any] = {}
    for field in fields:
        values[field.key] = "|".join(field.choices) if field.type == "enum" else holders[field.type]
        if field.type == "string" and field.description and rng.random() < 0.3:
            values[field.key] = f"<{field.description}>"
    return json.dumps(values, indent=rng.choice((None, None, 2)))


def _reply(wanted: ObjectShape, fenced: bool) -> Reply:
    text = wanted.text()
    return Reply(analyses(wanted), f"```json\n{text}\n```" if fenced else text)


def _dumped(rng: random.Random, value: dict[str, Any]) -> str:
    draw = rng.random()
    if draw < 0.4:
        return json.dumps(value, ensure_ascii=False)
    if draw < 0.75:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return json.dumps(value, ensure_ascii=False, indent=rng.choice((2, 4)))


def response_format(name: str, schema: dict[str, Any]) -> str:
    """Return a response format as Harmony writes it at the end of the instructions."""
    return (
        f"# Response Formats\n\n## {name}\n\n{json.dumps(schema, ensure_ascii=False, separators=(',', ':'))}"
    )


def _base(rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.4:
        return ""
    if draw < 0.75:
        return rng.choice(COMMON)
    return " ".join(
        [
            *(rng.sample(COMMON, 1) if draw < 0.85 else ()),
            *(sentence(rng, 3, 12) for _ in range(rng.choice((1, 1, 2, 4)))),
        ]
    )


def _joined(first: str, second: str) -> str:
    return f"{first}\n\n{second}" if first else second


def _message(rng: random.Random, text: str) -> str:
    form = rng.choice(TEXT_FORMS)
    return preceded(rng, text, is_broken=False) if form == "{text}" else form.format(text=text)


def by_format(rng: random.Random, held: bool) -> Dialogue:
    """The schema as a response format, which a server also enforces."""
    kind, turns = _task(rng, held)
    wanted = shape(rng, turns[0][1])
    exchanges = [Exchange(f"json by format, {kind}", "", _message(rng, turns[0][0]), _reply(wanted, False))]
    for text, fields in turns[1:]:
        exchanges.append(
            Exchange("json by format, next turn", "", text, _reply(replace(wanted, fields=fields), False))
        )
    tools = toolbox(rng, held) if rng.random() < 0.08 else []
    return Dialogue("", "", tuple(exchanges), _joined(_base(rng), _format(rng, wanted)), tools)


def _format(rng: random.Random, wanted: ObjectShape) -> str:
    name = rng.choice(FORMAT_NAMES) if rng.random() < 0.6 else invent(rng, capital=rng.random() < 0.5)
    return response_format(name, schema(rng, wanted))


def after_tool(rng: random.Random, held: bool) -> Dialogue:
    """A response format and tools: the call is free, and the answer that tells its result is an object."""
    tools = toolbox(rng, held)
    while True:
        exchange = (known_tool if rng.random() < 0.5 else named_tool)(rng, tools)
        if not is_on_side(exchange, held):
            continue
        if (
            exchange.reply.call
            and len(exchange.result) < 90
            and exchange.result.isprintable()
            and '"' not in exchange.result
        ):
            break
        tools = toolbox(rng, held)
    key = rng.choice(("result", "answer", "time", "weather", "text", "value", "output", parameter_name(rng)))
    wanted = ObjectShape(
        (Field(key, "string", exchange.result, rng.choice(("The result.", "What the tool says.", ""))),)
    )
    drawn = replace(exchange, skill="json after a tool", split_key="", final_reply=_reply(wanted, False))
    return Dialogue("", "", (drawn,), _joined(_base(rng), _format(rng, wanted)), tools)


def by_schema(rng: random.Random, held: bool) -> Dialogue:
    """The schema in the system prompt or in the user's words."""
    kind, [(text, fields), *_] = _task(rng, held)
    wanted = shape(rng, fields)
    asked = rng.choice(BY_SCHEMA).format(schema=_dumped(rng, schema(rng, wanted)))
    return _asked(rng, f"json by schema, {kind}", text, asked, wanted)


def by_keys(rng: random.Random, held: bool) -> Dialogue:
    """Keys, with or without types, or an example of the shape."""
    form = rng.choice(KEYED)
    kind, [(text, fields), *_] = _task(rng, held)
    while "{typed}" not in form and not all(_is_clear(field, "{example}" in form) for field in fields):
        kind, [(text, fields), *_] = _task(rng, held)
    wanted = ObjectShape(fields)
    asked = form.format(
        keys=_listed(rng, [field.key for field in fields]),
        typed=", and ".join(f'"{field.key}", {_NOUNS[field.type]}' for field in fields),
        example=_example(rng, fields),
    )
    return _asked(rng, f"json by keys, {kind}", text, asked, wanted)


def _is_clear(field: Field, by_example: bool) -> bool:
    """Whether a field's type is clear without being named, or from a placeholder in an example.

    A placeholder such as "..." stands for anything, so a number as a string is never clear.
    """
    if field.type == "string" and _NUMBER.fullmatch(str(field.value)):
        return False
    if by_example:
        return True
    if field.value is None:
        return field.type == "string"
    if field.type == "boolean":
        return field.key.startswith("is_")
    if field.type == "array":
        return len(field.value) > 1
    return True


def _asked(rng: random.Random, skill: str, text: str, asked: str, wanted: ObjectShape) -> Dialogue:
    fenced = rng.random() < 0.15
    if fenced:
        asked = f"{asked} {rng.choice(FENCED_TOO)}"
    reply = _reply(wanted, fenced)
    if rng.random() < 0.5:
        return Dialogue(
            "", "", (Exchange(skill, "", _message(rng, text), reply),), _joined(_base(rng), asked)
        )
    separator = rng.choice((" ", "\n", "\n\n") if text[-1] in ".!?" else ("\n", "\n\n"))
    message = rng.choice(
        (f"{asked}{separator}{_message(rng, text)}", f"{_message(rng, text)}{separator}{asked}")
    )
    return Dialogue("", "", (Exchange(skill, "", message, reply),), _base(rng) if rng.random() < 0.5 else "")


def freely(rng: random.Random, held: bool) -> Dialogue:
    """JSON without a word about its shape: a small object with natural keys."""
    if rng.random() < 0.7:
        exchange = _fact(rng, held)
        text = exchange.message.strip()
        wanted = ObjectShape(
            tuple(Field(key, _FACT_TYPES.get(key, "string"), value) for key, value in exchange.fields)
        )
    else:
        drawn = plain_record(rng)
        text, wanted = drawn.text, ObjectShape(drawn.fields)
    draw = rng.random()
    if draw < 0.25:
        return Dialogue(
            "",
            "",
            (Exchange("json freely", "", text, _reply(wanted, False)),),
            _joined(_system(rng), rng.choice(FREE_SYSTEM)),
        )
    fenced = draw < 0.4
    message = rng.choice(FREE_FENCED if fenced else FREE).format(text=text)
    return Dialogue("", "", (Exchange("json freely", "", message, _reply(wanted, fenced)),), _system(rng))


def _system(rng: random.Random) -> str:
    return "" if rng.random() < 0.7 else _base(rng)


def forced(rng: random.Random, held: bool) -> Dialogue:
    """A plain question whose answer a grammar forces into an object, without a word about JSON in the prompt."""
    exchange = _fact(rng, held)
    fields = tuple(Field(key, _FACT_TYPES.get(key, "string"), value) for key, value in exchange.fields)
    reply = replace(exchange.reply, answer=ObjectShape(fields).text(), forced='{"')
    return Dialogue("", "", (replace(exchange, reply=reply),), "")


KINDS: Final[tuple[tuple[Callable[[random.Random, bool], Dialogue], float], ...]] = (
    (by_format, 34), (by_schema, 22), (by_keys, 23), (freely, 12), (after_tool, 5), (forced, 4),
)  # fmt: skip


def json_dialogue(rng: random.Random, held: bool) -> Dialogue:
    """Return a dialogue of one turn that is answered in JSON."""
    makers, weights = zip(*(KINDS[:-1] if held else KINDS), strict=True)
    made: Dialogue = rng.choices(makers, weights)[0](rng, held)
    return made
