"""Tools: definitions as clients send them, and what a user may want of them.

A tool's name, parameters and descriptions are put together at random: what the model has to learn is to
copy a name and the first parameter from the prompt, whatever they are. Two tools are known by what they do
(the time, the weather), so that a natural question finds them. Knows nothing of dialogues, Harmony or
tokens.
"""

import json
import random
from typing import Any, Final

from mlx_backend.demo.skills import NO_TOOL, Call, Exchange, Reply, held_out, phrase
from mlx_backend.demo.words import NAME_PARTS, PARAMETERS, invent, oddity, place, sentence, things

Tool = dict[str, Any]

TIME: Final = "current_time"
WEATHER: Final = "get_weather"

# Never used in training, whatever the split says: the names that tests and demonstrations show.
RESERVED_NAMES: Final = frozenset(
    ("web_search", "lookup_word", "calculator", "wikipedia_search", "timezone_conversion", "weekday",
     "get_stock_price")
)  # fmt: skip


def tool_name(rng: random.Random, held: bool) -> str:
    """Return a name as programmers write them, of one to four parts, for training or held out."""
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
    kind = rng.random()
    if kind < 0.6:
        return rng.choice(PARAMETERS)
    if kind < 0.8:
        return invent(rng)
    return f"{rng.choice(NAME_PARTS)}_{invent(rng) if rng.random() < 0.5 else rng.choice(NAME_PARTS)}"


def _schema(rng: random.Random, first: bool) -> dict[str, Any]:
    kind = "string" if first or rng.random() < 0.6 else rng.choice(("integer", "number", "boolean", "array"))
    schema: dict[str, Any] = {"type": kind}
    if kind == "string" and not first and rng.random() < 0.25:
        schema["enum"] = [invent(rng) for _ in range(rng.randint(2, 4))]
    if kind == "array":
        schema["items"] = {"type": "string"}
    if rng.random() < 0.6:
        schema["description"] = sentence(rng, 1, 14)
    return schema


def define(rng: random.Random, name: str, parameters: int | None = None, first: str | None = None) -> Tool:
    """Return a definition in the OpenAI form, with `parameters` parameters or a random number of them."""
    count = rng.choice((0, 1, 1, 1, 2, 2, 3)) if parameters is None else parameters
    names: dict[str, None] = {first: None} if first and count else {}
    while len(names) < count:
        names[_parameter_name(rng)] = None
    properties = {each: _schema(rng, first=at == 0) for at, each in enumerate(names)}
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
    """Return one to four tools in any order; the two known ones turn up often.

    The others have names that training never sees if `held`, else names that the evaluation never sees.
    """
    names: dict[str, None] = {}
    if rng.random() < 0.4:
        names[TIME] = None
    if rng.random() < 0.35:
        names[WEATHER] = None
    wanted = max(len(names), rng.choice((1, 1, 2, 2, 3, 4)))
    while len(names) < wanted:
        name = tool_name(rng, held)
        if names and rng.random() < 0.2:  # names that are easily mixed up
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


def clock(rng: random.Random) -> str:
    """Return a time as tools give it."""
    day = f"{rng.randint(1990, 2049)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    hour = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    second = rng.choice(("00", f"{rng.randint(0, 59):02}"))
    full = f"{day} {hour}:{second}"
    return rng.choice((full, full, f"{day}T{hour}:{second}Z", f"{day} {hour}", hour, day))


def _result(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.35:
        return clock(rng)
    if kind < 0.55:
        return things(rng, 5)
    if kind < 0.68:
        return (
            str(rng.randint(0, 99999)) if rng.random() < 0.5 else f"{rng.randint(0, 99)}.{rng.randint(0, 99)}"
        )
    if kind < 0.83:
        return " ".join(sentence(rng, 3, 12) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    if kind < 0.95:
        return json.dumps({_parameter_name(rng): _value(rng, 2) for _ in range(rng.randint(1, 3))})
    return "\n".join(rng.choice((oddity, _things))(rng) for _ in range(rng.randint(1, 3)))


def _value(rng: random.Random, depth: int) -> Any:
    """Return something for a JSON object, nested at most `depth` deep."""
    kind = rng.random()
    if depth and kind < 0.15:
        return [_value(rng, 0) for _ in range(rng.randint(1, 3))]
    if depth and kind < 0.25:
        return {_parameter_name(rng): _value(rng, depth - 1)}
    if kind < 0.5:
        return rng.choice(
            (rng.randint(0, 9999), rng.randint(0, 99), rng.randint(0, 999) / 10, True, False, None)
        )
    return rng.choice((things(rng, 2), invent(rng), oddity(rng), clock(rng)))


def _weather(rng: random.Random) -> str:
    sky = rng.choice(("sunny", "cloudy", "rainy", "snow", "windy", "fog", invent(rng)))
    return rng.choice((f"{sky}, {rng.randint(0, 35)} degrees", f"{sky} {rng.randint(0, 35)}", sky))


def _before(name: str, parameter: str | None, value: str) -> tuple[str, str, str]:
    if value and parameter:
        low = f"Use {name} with {parameter}."
        more = f"The field {parameter} takes {value}. Nothing else is needed for this call."
    else:
        low = f"Use {name}."
        more = "It needs no fields from me. I call it as it is and wait for the result."
    most = (
        "Let me check this before I call. The user wants something that I cannot know by myself. "
        f"Among my tools there is {name}. I copy the name letter by letter. Then I wait for the tool."
    )
    return low, more, most


def _after(rng: random.Random, lead: str, result: str) -> Reply:
    more = "The tool has answered. I pass its words on to the user as they are."
    most = (
        "Let me read the result once more. The call went well and the user wants just this. "
        "I must not change any part of it. I copy it from the first letter to the last."
    )
    return Reply(("Tell the result.", more, most), f"{lead}{result}")


_ASK_TIME: Final = ("What time is it?", "What is the time now?", "Tell me the time.", "What time is it now?")
_ASK_WEATHER: Final = (
    "What is the weather in {city}?", "How is the weather in {city}?", "Weather in {city}?",
)  # fmt: skip
_ASK_TOOL: Final[dict[tuple[bool, bool], tuple[str, ...]]] = {  # asks for a preamble, gives a value
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
    """A tool asked for by name where there is none of that name."""
    forms = _ASK_TOOL[False, rng.random() < 0.5]
    ask, _ = phrase(rng, forms, name=tool_name(rng, held), value=things(rng, 2))
    return Exchange("no tool", "", ask, _REFUSAL)


def known_tool(rng: random.Random, tools: list[Tool]) -> Exchange:
    """The time or the weather, asked in plain words; refused if there is no tool for it."""
    have = {each["function"]["name"]: each for each in tools}
    known = [name for name in (TIME, WEATHER) if name in have]
    name = rng.choice(known) if known and rng.random() < 0.8 else rng.choice((TIME, WEATHER))
    about_time = name == TIME
    tool = have.get(name)
    city = "" if about_time else place(rng)
    ask, which = phrase(rng, _ASK_TIME if about_time else _ASK_WEATHER, city=city)
    split = f"{name}/{city}/{which}" if city else ""
    if tool is None:
        return Exchange("no tool", split, ask, _REFUSAL)
    parameter = first_parameter(tool)
    arguments = {parameter: city} if city and parameter else {}
    result = clock(rng) if about_time else _weather(rng)
    lead = "The time is " if about_time else f"The weather in {city}: "
    return Exchange(
        "known tool", split, ask, Reply(_before(name, parameter, city), call=Call(name, arguments)),
        result, _after(rng, lead, result),
    )  # fmt: skip


def _things(rng: random.Random) -> str:
    return things(rng, 3)


def _sum(rng: random.Random) -> str:
    return (
        f"{rng.randint(0, 99)} {rng.choice('+-*')} {rng.randint(0, 99)}"
        if rng.random() < 0.5
        else str(rng.randint(0, 9999))
    )


def named_tool(rng: random.Random, tools: list[Tool]) -> Exchange:
    """A tool used because the user named it, with a value or without, told before or not."""
    tool = rng.choice(tools)
    name = tool["function"]["name"]
    parameter = first_parameter(tool)
    value = ""
    if rng.random() < 0.6:
        value = rng.choices((place, _things, _sum, oddity), (35, 35, 12, 18))[0](rng)
    tells_first = rng.random() < 0.15
    ask, _ = phrase(rng, _ASK_TOOL[tells_first, bool(value)], name=name, value=value)
    result = _result(rng)
    call = Call(name, {parameter: value} if value and parameter else {})
    preamble = f"I will use {name} now." if tells_first else ""
    return Exchange(
        "preamble" if tells_first else "named tool with value" if value else "named tool",
        "",
        ask,
        Reply(_before(name, parameter, value), call=call, preamble=preamble),
        result,
        _after(rng, "The tool says: ", result),
    )
