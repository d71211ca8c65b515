"""Tools: definitions as clients send them, and exchanges in which a user wants one called.

A tool's name, parameters and descriptions are random: the model has to learn to copy a name and the first parameter
from the prompt, whatever they are. Two tools are known by what they do (the time, the weather), so that a natural
question finds them. Knows nothing of dialogues, Harmony or tokens.
"""

import random
from typing import Any, Final

from training.chat.exchange import Call, Exchange, Reply, held_out
from training.chat.phrasing import loosely, phrase, preceded
from training.chat.results import parameter_name, random_time, result, result_reply, time_object, weather
from training.chat.skills import NO_TOOL
from training.chat.words import NAME_PARTS, invent, oddity, place, sentence, things

Tool = dict[str, Any]

TIME: Final = "current_time"
WEATHER: Final = "get_weather"
# Names under which these two are offered elsewhere; the first of each is the one that demonstrations use.
TIME_NAMES: Final = (
    TIME, "get_current_time", "get_time", "get_current_timestamp", "current_datetime", "get_datetime",
        "get_current_datetime",
    "time_now",
)  # fmt: skip
WEATHER_NAMES: Final = (
    WEATHER, "get_current_weather", "current_weather", "weather", "weather_forecast", "get_weather_forecast",
        "fetch_weather",
)  # fmt: skip
MAX_TOOLS: Final = 40

# Names that tests and demonstrations use; never used in training, whatever the split says.
RESERVED_NAMES: Final = frozenset(
    ("web_search", "lookup_word", "calculator", "wikipedia_search", "timezone_conversion", "weekday",
     "get_stock_price")
)  # fmt: skip

KNOWN_NAMES: Final = frozenset((*TIME_NAMES, *WEATHER_NAMES))


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
        if held_out(name) == held and name not in RESERVED_NAMES and name not in KNOWN_NAMES:
            return name


def _schema(rng: random.Random, first: bool) -> dict[str, Any]:
    types = ("integer", "number") if first else ("integer", "number", "boolean", "array")
    json_type = "string" if rng.random() < (0.88 if first else 0.6) else rng.choice(types)
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
        names[parameter_name(rng)] = None
    properties = {each: _schema(rng, first=i == 0) for i, each in enumerate(names)}
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.7:
        schema["required"] = [each for each in names if rng.random() < 0.5]
    return {
        "type": "function",
        "function": {"name": name, "description": _description(rng, name), "parameters": schema},
    }


def _description(rng: random.Random, name: str) -> str:
    if name in TIME_NAMES and rng.random() < 0.7:
        return rng.choice(("A tool for getting the current time.", "Get the current time.", "The time."))
    if name in WEATHER_NAMES and rng.random() < 0.7:
        return rng.choice(
            ("Get the weather in a city.", "The weather.", "Get the current weather in a given location")
        )
    text = sentence(rng, 2, 12)
    if rng.random() < 0.15:  # a docstring as it stands in the source
        parameter = f":param {invent(rng)}: {sentence(rng, 2, 9)}"
        text = f"\n    {text}\n\n    {parameter}\n    :return: {sentence(rng, 2, 5)}\n    "
    return text


def toolbox(rng: random.Random, held: bool, count: int = 0) -> list[Tool]:
    """Return `count` tools, or one to four and seldom up to 40, in random order; the two known ones are frequent.

    The names of the others are held out from training (`held`) or from the evaluation.
    """
    names: dict[str, None] = {}
    if rng.random() < 0.4:
        names[TIME if rng.random() < 0.6 else rng.choice(TIME_NAMES)] = None
    if rng.random() < 0.35:
        names[WEATHER if rng.random() < 0.6 else rng.choice(WEATHER_NAMES)] = None
    few = rng.choice((1, 1, 2, 2, 3, 4)) if rng.random() < 0.93 else rng.randint(5, 12)
    wanted = max(len(names), count or few)
    while len(names) < wanted:
        name = tool_name(rng, held)
        if names and rng.random() < 0.2:  # names that are easily confused
            name = f"{name.partition('_')[0]}_{rng.choice(list(names)).rpartition('_')[2]}"
            if held_out(name) != held or name in RESERVED_NAMES or name in KNOWN_NAMES:
                continue
        names[name] = None
    order = list(names)
    rng.shuffle(order)
    return [_defined(rng, name, is_large=count > 4) for name in order]


def _defined(rng: random.Random, name: str, is_large: bool) -> Tool:
    if name in TIME_NAMES:
        first = rng.choice(("format", "timezone", None))
        return define(rng, name, rng.choice((0, 1, 2, 2)), first)
    if name in WEATHER_NAMES:
        return define(rng, name, rng.choice((1, 1, 2)), rng.choice(("city", "location", "place", None)))
    return define(rng, name, rng.randint(0, 6) if is_large else None)


def first_parameter(tool: Tool) -> str | None:
    """Return the name of a tool's first parameter, if it has any."""
    return next(iter(tool["function"]["parameters"]["properties"]), None)


def call_analyses(name: str, parameter: str | None, value: str) -> tuple[str, str, str]:
    """Return the analysis of a call."""
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


_ASK_TIME: Final = (
    "What time is it?", "What is the time now?", "Tell me the time.", "What time is it now?", "What's the time?",
    "Can you tell me the time?", "Do you know what time it is?", "What is the current time?",
    "Give me the current time.",
    "What is the time?", "Current time?", "Time?", "Please tell me the time.", "What's the current time?",
    "whats the time",
    "What is the date?", "What day is it today?", "What is today's date?", "What is the date today?", "How late is it?",
)  # fmt: skip
_ASK_TIME_IN: Final = (
    "What time is it in {city}?", "What is the time in {city}?", "Tell me the time in {city}.", "Time in {city}?",
    "What's the current time in {city}?",
)  # fmt: skip
_ASK_WEATHER: Final = (
    "What is the weather in {city}?", "How is the weather in {city}?", "Weather in {city}?",
    "What's the weather in {city}?",
    "What's the weather like in {city}?", "Tell me the weather in {city}.", "How's the weather in {city}?",
    "What is the weather like in {city}?", "What is the weather today in {city}?",
    "What is the weather in {city} today?",
    "Weather for {city}?", "Give me the weather for {city}.", "Check the weather in {city}.",
    "Is it raining in {city}?",
    "How is the weather today in {city}?", "Get the weather for {city}.", "I want to know the weather in {city}.",
    "What is the current weather in {city}?", "Can you check the weather in {city}?", "What's the forecast for {city}?",
)  # fmt: skip
_WEATHER_FOLLOW_UPS: Final = (
    "And in {city}?", "What about {city}?", "And {city}?", "How about {city}?", "And for {city}?", "and in {city}",
)  # fmt: skip
_ASK_TOOL: Final[dict[tuple[bool, bool], tuple[str, ...]]] = {  # with a preamble, with a value
    (False, False): (
        "Use {name}.", "Please use {name}.", "Call {name}.", "Use the tool {name}.", "Use {name} now.",
        "Use the {name} tool.",
        "Can you use {name}?", "Run {name}.", "Please call {name}.", "Call the function {name}.", "use {name}",
    ),
    (False, True): (
        "Use {name} for {value}.", "Please use {name} for {value}.", "Call {name} for {value}.",
        "Use the tool {name} for {value}.", "Use {name} for {value}.", "Use {name} with {value}.",
        "Call {name} with {value}.",
        "Use the {name} tool for {value}.", "Use {name} on {value}.", "Please call {name} for {value}.",
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


def known_tool(rng: random.Random, tools: list[Tool], follow_up: bool = False) -> Exchange:
    """The time or the weather, asked for without naming a tool; refused if there is none for it."""
    by_name = {each["function"]["name"]: each for each in tools}
    known = [name for name in by_name if name in KNOWN_NAMES]
    name = rng.choice(known) if known and rng.random() < 0.8 else rng.choice((TIME, WEATHER))
    if follow_up:
        name = next((each for each in known if each in WEATHER_NAMES), WEATHER)
    about_time = name in TIME_NAMES
    if name not in by_name:  # another name of the same
        name = next((each for each in known if each in (TIME_NAMES if about_time else WEATHER_NAMES)), name)
    tool = by_name.get(name)
    city = "" if about_time and rng.random() < 0.85 else place(rng)
    forms = (
        (_ASK_TIME_IN if city else _ASK_TIME)
        if about_time
        else _WEATHER_FOLLOW_UPS
        if follow_up
        else _ASK_WEATHER
    )
    plain = not follow_up and rng.random() < 0.3
    message, which = phrase(rng, forms[:3] if plain else forms, city=city)
    if not plain:
        message = preceded(rng, message) if city else loosely(rng, message)
    split = f"{name}/{city}/{which}" if city else ""
    title = "Current time" if about_time else f"Weather in {city}"
    if tool is None:
        return Exchange("no tool", split, message, _REFUSAL, title=title, fields=(("error", NO_TOOL),))
    parameter = first_parameter(tool)
    is_text = (
        parameter is not None and tool["function"]["parameters"]["properties"][parameter]["type"] == "string"
    )
    arguments = {parameter: city} if city and parameter and is_text else {}
    if about_time:
        answered, said = time_object(rng) if rng.random() < 0.4 else (random_time(rng),) * 2
        reply = result_reply("The time is ", said)
    else:
        answered = weather(rng)
        reply = result_reply(f"The weather in {city}: ", answered)
    return Exchange(
        "known tool (follow-up)" if follow_up else "known tool", split, message,
        Reply(call_analyses(name, parameter, city if arguments else ""), call=Call(name, arguments)), answered, reply,
        title=title,
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
    argument: str | int | float = ""
    if rng.random() < 0.6:
        argument = rng.choices((place, _some_things, _sum, oddity), (35, 35, 12, 18))[0](rng)
        if parameter and tool["function"]["parameters"]["properties"][parameter]["type"] != "string":
            argument = rng.choice((rng.randint(0, 9_999), rng.randint(0, 99), rng.randint(1, 999) / 10))
    value = str(argument)
    has_preamble = rng.random() < 0.15
    message, _ = phrase(rng, _ASK_TOOL[has_preamble, bool(value)], name=name, value=value)
    if rng.random() < 0.3:
        message = preceded(rng, message)
    answered = result(rng)
    call = Call(name, {parameter: argument} if value and parameter else {})
    preamble = f"I will use {name} now." if has_preamble else ""
    return Exchange(
        "preamble" if has_preamble else "named tool with value" if value else "named tool",
        "",
        message,
        Reply(call_analyses(name, parameter, value), call=call, preamble=preamble),
        answered,
        result_reply("The tool says: ", answered),
        title="Use of a tool",
    )
