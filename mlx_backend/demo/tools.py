"""Tools: definitions as clients send them, and exchanges in which a user wants one called.

A tool's name, parameters and descriptions are random: the model has to learn to copy a name and the first parameter
from the prompt, whatever they are. Two tools are known by what they do (the time, the weather), so that a natural
question finds them. Knows nothing of dialogues, Harmony or tokens.
"""

import json
import random
from typing import Any, Final

from mlx_backend.demo.skills import NO_TOOL, Call, Exchange, Reply, held_out, phrase
from mlx_backend.demo.words import NAME_PARTS, PARAMETERS, invent, oddity, place, sentence, things

Tool = dict[str, Any]

TIME: Final = "current_time"
WEATHER: Final = "get_weather"

# Names that tests and demonstrations use; never used in training, whatever the split says.
RESERVED_NAMES: Final = frozenset(
    ("web_search", "lookup_word", "calculator", "wikipedia_search", "timezone_conversion", "weekday",
     "get_stock_price")
)  # fmt: skip


def tool_name(rng: random.Random, held: bool) -> str:
    """Return a function name of one to four parts, for training or held out."""
    while True:
        count = rng.choice((1, 2, 2, 2, 3, 3, 4))
        parts = [invent(rng) if rng.random() < 0.35 else rng.choice(NAME_PARTS) for _ in range(count)]
        if len(set(parts)) < len(parts):
            continue
        name = "_".join(parts)
        if rng.random() < 0.08 and len(parts) > 1:
            name = parts[0] + "".join(part.capitalize() for part in parts[1:])
        if held_out(name) == held and name not in RESERVED_NAMES and name not in (TIME, WEATHER):
            return name


def _parameter_name(rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.6:
        return rng.choice(PARAMETERS)
    if draw < 0.8:
        return invent(rng)
    return f"{rng.choice(NAME_PARTS)}_{invent(rng) if rng.random() < 0.5 else rng.choice(NAME_PARTS)}"


def _schema(rng: random.Random, first: bool) -> dict[str, Any]:
    json_type = (
        "string" if first or rng.random() < 0.6 else rng.choice(("integer", "number", "boolean", "array"))
    )
    schema: dict[str, Any] = {"type": json_type}
    if json_type == "string" and not first and rng.random() < 0.25:
        schema["enum"] = [invent(rng) for _ in range(rng.randint(2, 4))]
    if json_type == "array":
        schema["items"] = {"type": "string"}
    if rng.random() < 0.6:
        schema["description"] = sentence(rng, 1, 14)
    return schema


def define(rng: random.Random, name: str, parameters: int | None = None, first: str | None = None) -> Tool:
    """Return a definition in OpenAI's format, with `parameters` parameters or a random number of them."""
    count = rng.choice((0, 1, 1, 1, 2, 2, 3)) if parameters is None else parameters
    names: dict[str, None] = {first: None} if first and count else {}
    while len(names) < count:
        names[_parameter_name(rng)] = None
    properties = {each: _schema(rng, first=i == 0) for i, each in enumerate(names)}
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.7:
        schema["required"] = [each for each in names if rng.random() < 0.5]
    description = sentence(rng, 2, 12)
    if name == TIME:
        description = rng.choice(
            ("A tool for getting the current time.", "Get the current time.", description)
        )
    elif name == WEATHER:
        description = rng.choice(("Get the weather in a city.", "The weather.", description))
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def toolbox(rng: random.Random, held: bool) -> list[Tool]:
    """Return one to four tools in random order; the two known ones are frequent.

    The names of the others are held out from training (`held`) or from the evaluation.
    """
    names: dict[str, None] = {}
    if rng.random() < 0.4:
        names[TIME] = None
    if rng.random() < 0.35:
        names[WEATHER] = None
    wanted = max(len(names), rng.choice((1, 1, 2, 2, 3, 4)))
    while len(names) < wanted:
        name = tool_name(rng, held)
        if names and rng.random() < 0.2:  # names that are easily confused
            name = f"{name.partition('_')[0]}_{rng.choice(list(names)).rpartition('_')[2]}"
            if held_out(name) != held or name in RESERVED_NAMES:
                continue
        names[name] = None
    order = list(names)
    rng.shuffle(order)
    tools = []
    for name in order:
        if name == TIME:
            first = rng.choice(("format", "timezone", None))
            tools.append(define(rng, name, rng.choice((0, 1, 2, 2)), first))
        elif name == WEATHER:
            tools.append(
                define(rng, name, rng.choice((1, 1, 2)), rng.choice(("city", "location", "place", None)))
            )
        else:
            tools.append(define(rng, name))
    return tools


def first_parameter(tool: Tool) -> str | None:
    """Return the name of a tool's first parameter, if it has any."""
    return next(iter(tool["function"]["parameters"]["properties"]), None)


def random_time(rng: random.Random) -> str:
    """Return a time in one of the formats that tools use."""
    day = f"{rng.randint(1990, 2049)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    hour = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    second = rng.choice(("00", f"{rng.randint(0, 59):02}"))
    full = f"{day} {hour}:{second}"
    return rng.choice((full, full, f"{day}T{hour}:{second}Z", f"{day} {hour}", hour, day))


def _result(rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.35:
        return random_time(rng)
    if draw < 0.55:
        return things(rng, 5)
    if draw < 0.68:
        return (
            str(rng.randint(0, 99999)) if rng.random() < 0.5 else f"{rng.randint(0, 99)}.{rng.randint(0, 99)}"
        )
    if draw < 0.83:
        return " ".join(sentence(rng, 3, 12) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    if draw < 0.95:
        return json.dumps({_parameter_name(rng): _value(rng, 2) for _ in range(rng.randint(1, 3))})
    return "\n".join(rng.choice((oddity, _some_things))(rng) for _ in range(rng.randint(1, 3)))


def _value(rng: random.Random, depth: int) -> Any:
    """Return a random JSON value, nested at most `depth` deep."""
    draw = rng.random()
    if depth and draw < 0.15:
        return [_value(rng, 0) for _ in range(rng.randint(1, 3))]
    if depth and draw < 0.25:
        return {_parameter_name(rng): _value(rng, depth - 1)}
    if draw < 0.5:
        return rng.choice(
            (rng.randint(0, 9999), rng.randint(0, 99), rng.randint(0, 999) / 10, True, False, None)
        )
    return rng.choice((things(rng, 2), invent(rng), oddity(rng), random_time(rng)))


def _weather(rng: random.Random) -> str:
    sky = rng.choice(("sunny", "cloudy", "rainy", "snow", "windy", "fog", invent(rng)))
    return rng.choice((f"{sky}, {rng.randint(0, 35)} degrees", f"{sky} {rng.randint(0, 35)}", sky))


def _call_analyses(name: str, parameter: str | None, value: str) -> tuple[str, str, str]:
    if value and parameter:
        low = f"Use {name} with {parameter}."
        medium = f"The field {parameter} takes {value}. Nothing else is needed for this call."
    else:
        low = f"Use {name}."
        medium = "It needs no fields from me. I call it as it is and wait for the result."
    high = (
        "Let me check this before I call. The user wants something that I cannot know by myself. "
        f"Among my tools there is {name}. I copy the name letter by letter. Then I wait for the tool."
    )
    return low, medium, high


def _result_reply(rng: random.Random, prefix: str, result: str) -> Reply:
    medium = "The tool has answered. I pass its words on to the user as they are."
    high = (
        "Let me read the result once more. The call went well and the user wants just this. "
        "I must not change any part of it. I copy it from the first letter to the last."
    )
    return Reply(("Tell the result.", medium, high), f"{prefix}{result}")


_ASK_TIME: Final = ("What time is it?", "What is the time now?", "Tell me the time.", "What time is it now?")
_ASK_WEATHER: Final = (
    "What is the weather in {city}?", "How is the weather in {city}?", "Weather in {city}?",
)  # fmt: skip
_ASK_TOOL: Final[dict[tuple[bool, bool], tuple[str, ...]]] = {  # with a preamble, with a value
    (False, False): (
        "Use {name}.", "Please use {name}.", "Call {name}.", "Use the tool {name}.", "Use {name} now.",
    ),
    (False, True): (
        "Use {name} for {value}.", "Please use {name} for {value}.", "Call {name} for {value}.",
        "Use the tool {name} for {value}.", "Use {name} for {value}.",
    ),
    (True, False): ("Tell me what you do, then use {name}.", "First say what you do, then use {name}."),
    (True, True): (
        "Tell me what you do, then use {name} for {value}.",
        "First say what you do, then use {name} for {value}.",
    ),
}  # fmt: skip
_REFUSAL: Final = Reply(
    (
        "There is no tool.",
        "I would need a tool for this. I see none that can do it, so I have to say no.",
        "Let me look at my tools once more. I read the names from the first to the last. "
        "None of them gives what the user asks for. A made up answer would be worse than no answer.",
    ),
    NO_TOOL,
)


def missing_tool(rng: random.Random, held: bool) -> Exchange:
    """A tool requested by name that does not exist."""
    forms = _ASK_TOOL[False, rng.random() < 0.5]
    message, _ = phrase(rng, forms, name=tool_name(rng, held), value=things(rng, 2))
    return Exchange("no tool", "", message, _REFUSAL)


def known_tool(rng: random.Random, tools: list[Tool]) -> Exchange:
    """The time or the weather, asked for without naming a tool; refused if there is none for it."""
    by_name = {each["function"]["name"]: each for each in tools}
    known = [name for name in (TIME, WEATHER) if name in by_name]
    name = rng.choice(known) if known and rng.random() < 0.8 else rng.choice((TIME, WEATHER))
    about_time = name == TIME
    tool = by_name.get(name)
    city = "" if about_time else place(rng)
    message, which = phrase(rng, _ASK_TIME if about_time else _ASK_WEATHER, city=city)
    split = f"{name}/{city}/{which}" if city else ""
    if tool is None:
        return Exchange("no tool", split, message, _REFUSAL)
    parameter = first_parameter(tool)
    arguments = {parameter: city} if city and parameter else {}
    result = random_time(rng) if about_time else _weather(rng)
    prefix = "The time is " if about_time else f"The weather in {city}: "
    return Exchange(
        "known tool", split, message, Reply(_call_analyses(name, parameter, city), call=Call(name, arguments)),
        result, _result_reply(rng, prefix, result),
    )  # fmt: skip


def _some_things(rng: random.Random) -> str:
    return things(rng, 3)


def _sum(rng: random.Random) -> str:
    return (
        f"{rng.randint(0, 99)} {rng.choice('+-*')} {rng.randint(0, 99)}"
        if rng.random() < 0.5
        else str(rng.randint(0, 9999))
    )


def named_tool(rng: random.Random, tools: list[Tool]) -> Exchange:
    """A tool requested by name, with or without a value, with or without a preamble."""
    tool = rng.choice(tools)
    name = tool["function"]["name"]
    parameter = first_parameter(tool)
    value = ""
    if rng.random() < 0.6:
        value = rng.choices((place, _some_things, _sum, oddity), (35, 35, 12, 18))[0](rng)
    has_preamble = rng.random() < 0.15
    message, _ = phrase(rng, _ASK_TOOL[has_preamble, bool(value)], name=name, value=value)
    result = _result(rng)
    call = Call(name, {parameter: value} if value and parameter else {})
    preamble = f"I will use {name} now." if has_preamble else ""
    return Exchange(
        "preamble" if has_preamble else "named tool with value" if value else "named tool",
        "",
        message,
        Reply(_call_analyses(name, parameter, value), call=call, preamble=preamble),
        result,
        _result_reply(rng, "The tool says: ", result),
    )
