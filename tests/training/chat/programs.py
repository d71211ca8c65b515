"""What programs ask of a model: to classify a text, to extract parameters, to name a chat, to suggest questions.

The prompts have the structure of Dify's and Open WebUI's own, with other words around what matters: long instructions,
examples as earlier turns, the text at the end. Knows nothing of Harmony's messages or tokens.
"""

import json
import random
from collections.abc import Callable
from typing import Any, Final

from training.chat.classifier import classifier
from training.chat.exchange import Call, Dialogue, Exchange, Reply
from training.chat.program_prompts import RECORDED, padded, question, recorded, section
from training.chat.records import record
from training.chat.schemas import ObjectShape, analyses, schema, shape, tool_of
from training.chat.words import invent, sentence, things

_TAGS: Final = {"capital": ["Geography", "Capitals"], "sum": ["Mathematics", "Sums"], "no sum": ["Mathematics"],
    "count": ["Mathematics", "Counting"],
                "colour": ["Colours"], "sound": ["Animals"], "opposite": ["Language"]}  # fmt: skip
_NEXT: Final = {
    "capital": ["What is the capital of Italy?", "What is the capital of Spain?", "What is the capital of Japan?"],
    "sum": ["What is 2 + 3?", "What is 7 + 8?", "What is 20 + 20?"],
    "colour": ["What colour is grass?", "What colour is the sky?", "What colour is snow?"],
    "sound": ["What does a dog say?", "What does a cat say?", "What does a cow say?"],
    "opposite": ["What is the opposite of big?", "What is the opposite of old?", "What is the opposite of up?"],
}  # fmt: skip
_NEXT_DEFAULT: Final = ["What can you do?", "What is the capital of France?", "What is 17 + 5?"]


def _extraction(rng: random.Random, held: bool) -> tuple[str, ObjectShape]:
    drawn = record(rng, held)
    optional = frozenset(field.key for field in drawn.fields if rng.random() < 0.25)
    return drawn.text, ObjectShape(drawn.fields, optional=optional)


def _dify_schema(rng: random.Random, wanted: ObjectShape) -> str:
    properties: dict[str, Any] = {}
    for field in wanted.fields:
        kind = "string" if field.type == "enum" else "number" if field.type == "integer" else field.type
        items: dict[str, Any] = {"description": field.description or sentence(rng, 2, 6), "type": kind}
        if field.type == "enum":
            items["enum"] = list(field.choices)
        if field.type == "array":
            items["items"] = {"type": "string"}
        if rng.random() < 0.15:
            items["required"] = True
        properties[field.key] = items
    required = [field.key for field in wanted.fields if field.key not in wanted.optional]
    return json.dumps({"type": "object", "properties": properties, "required": required}, ensure_ascii=False)


def _dify_extractor(rng: random.Random, held: bool) -> Dialogue:
    text, wanted = _extraction(rng, held)
    message = (
        "### Structure\nHere is the structure of the JSON object, you should always follow the structure.\n"
        f"<structure>\n{_dify_schema(rng, wanted)}\n</structure>\n\n### Text to be converted to JSON\n"
        "Inside <text></text> XML tags, there is a text that you should convert to a JSON object.\n"
        f"<text>\n{text}\n</text>"
    )
    instructions, examples = recorded(rng, held, "extractor_prompt")
    exchange = Exchange("extractor (prompt)", "", message, Reply(analyses(wanted), wanted.text()))
    return Dialogue("", "", (exchange,), instructions, history=tuple(examples))


def extractor_prompt(rng: random.Random, held: bool) -> Dialogue:
    """A schema and a text in tags, after examples with other schemas; the answer is the object."""
    if rng.random() < RECORDED:
        return _dify_extractor(rng, held)
    instructions = padded(rng, "You should output a valid JSON object. " + sentence(rng, 3, 10))

    def asked(text: str, wanted: ObjectShape) -> str:
        return (
            f"### Structure\n{sentence(rng, 3, 12)}\n<structure>\n{_dify_schema(rng, wanted)}\n</structure>\n\n"
            f"### Text to be converted to JSON\n{sentence(rng, 3, 14)}\n<text>\n{text}\n</text>"
        )

    drawn = [_extraction(rng, held) for _ in range(rng.choice((1, 2, 3, 3)))]
    exchanges = tuple(
        Exchange("extractor (prompt)", "", asked(text, wanted), Reply(analyses(wanted), wanted.text()))
        for text, wanted in drawn
    )
    return Dialogue("", "", exchanges, instructions)


def extractor_call(rng: random.Random, held: bool) -> Dialogue:
    """A tool whose parameters are to be taken from a text in tags, after calls of it in examples."""
    name = (
        "extract_parameters"
        if rng.random() < 0.6
        else rng.choice(("extract", "save", "set_fields", "fill_form", invent(rng) + "_data"))
    )
    orders = f"Always call the `{name}` function with the correct parameters."
    instructions = padded(rng, f"### Task\n{orders} {sentence(rng, 3, 10)}")
    history: list[dict[str, Any]] = []
    for _ in range(rng.choice((0, 1, 2, 2))):
        text, wanted = _extraction(rng, held)
        call = {"id": "1", "type": "function", "function": {"name": name, "arguments": wanted.object()}}
        history += [
            {"role": "user", "content": text},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": sentence(rng, 2, 10)},
            {"role": "assistant", "content": sentence(rng, 2, 10)},
        ]
    text, wanted = _extraction(rng, held)
    description, draw = sentence(rng, 3, 8), rng.random()
    if rng.random() < RECORDED:
        name, description = "extract_parameters", "Extract parameters from the natural language text"
        instructions, history = recorded(rng, held, "extractor_call")
        message = (
            "extract structured information from context inside <context></context> XML tags by calling the function "
            "extract_parameters with the correct parameters with structure inside <structure></structure> XML tags.\n"
            f"<context>\n{text}\n</context>\n\n<structure>\n{_dify_schema(rng, wanted)}\n</structure>"
        )
    elif draw < 0.7:
        message = (
            f"Extract information from the context by calling the function {name}. "
            f"{sentence(rng, 3, 10)}\n<context>\n{text}\n</context>\n\n"
            f"<structure>\n{_dify_schema(rng, wanted)}\n</structure>"
        )
    else:
        message = rng.choice(
            (f"Use {name} for this text: {text}", f"Call {name} with the data of this text.\n\n{text}", text)
        )
    _, medium, high = analyses(wanted)
    reply = Reply(
        (f"Use {name}.", medium, high.replace("write the object", "call")), call=Call(name, wanted.object())
    )
    final = Reply(
        ("Tell the result.", "The call is done.", "There is nothing else to do. I say so in one line."),
        "Done.",
    )
    exchange = Exchange("extractor (call)", "", message, reply, "ok", final)
    return Dialogue(
        "",
        "",
        (exchange,),
        instructions,
        [tool_of(rng, wanted, name, description)],
        history=tuple(history),
    )


def structured(rng: random.Random, held: bool) -> Dialogue:
    """An example with a schema of its own in the system prompt, then the schema that counts."""
    example, other = _extraction(rng, held)
    text, wanted = _extraction(rng, held)
    wanted = shape(rng, wanted.fields)
    gap = rng.choice(("", "    "))
    system = (
        f"{sentence(rng, 3, 8)} You could answer questions and output in JSON format.\nconstraints:\n"
        + "".join(f"{gap}- {sentence(rng, 3, 9)}\n" for _ in range(rng.randint(1, 4)))
        + f"eg:\n{gap}Here is the JSON schema:\n{gap}{json.dumps(schema(rng, other), ensure_ascii=False)}\n\n"
        f"{gap}Here is the user's question:\n{gap}{example}\n\n{gap}output:\n{gap}{other.text()}\n"
        "Here is the JSON schema:\n"
        + json.dumps(schema(rng, wanted), ensure_ascii=False, indent=rng.choice((None, None, 2)))
        + "\n"
    )
    reply = Reply(analyses(wanted), wanted.text())
    return Dialogue("", "", (Exchange("structured by prompt", "", text, reply),), system)


def _title(exchange: Exchange) -> str:
    """Return the title of a chat that begins with a message: its subject, if it is one that the model knows."""
    return exchange.title or "General question"


def _program_reply(value: Any, what: str) -> Reply:
    text = json.dumps(value, ensure_ascii=False)
    return Reply(
        (
            what,
            "A program reads my answer, so I write JSON and nothing else.",
            "Let me keep it short. I name the subject and stop.",
        ),
        text,
    )


def chat_title(rng: random.Random, held: bool) -> Dialogue:
    """A title for a first message, with the language and a reason next to it."""
    exchange = question(rng, held)
    parts = [section(rng) for _ in range(rng.randint(0, 4))]
    for _ in range(rng.choice((0, 0, 1, 2, 4))):  # examples
        keys = ("Language Type", "Your Reasoning", "Your Output")
        parts.append(
            f"User Input: {sentence(rng, 2, 8)}\n"
            + json.dumps({key: sentence(rng, 2, 6) for key in keys}, indent=2)
        )
    shown = json.dumps(
        dict.fromkeys(("Language Type", "Your Reasoning", "Your Output"), f"<{sentence(rng, 1, 4)}>"),
        indent=2,
    )
    head = "You are asked to generate a concise chat title " + sentence(rng, 3, 10)
    gap = rng.choice(("\n", "\n\n", " "))
    before = rng.choice(("User Input:\n", "User Input: "))
    asked = (
        "the keys " + '"Language Type", "Your Reasoning" and "Your Output".' if rng.random() < 0.4 else shown
    )
    message = gap.join([head, *parts, asked, f"{before}{exchange.message.strip()}\n"])
    title = _title(exchange)
    value = {
        "Language Type": "English",
        "Your Reasoning": "The subject in a few words.",
        "Your Output": title,
    }
    return Dialogue("", "", (Exchange("title", "", message, _program_reply(value, "Name the chat.")),))


def _talk(rng: random.Random, held: bool) -> tuple[Exchange, list[Exchange]]:
    """Return the last exchange of a short talk, and all."""
    talk = [question(rng, held) for _ in range(rng.choice((1, 1, 2, 3)))]
    return talk[-1], talk


def suggestions(rng: random.Random, held: bool) -> Dialogue:
    """Three questions that a user may ask next, as a list."""
    last, talk = _talk(rng, held)
    history = "\n".join(f"Human: {each.message.strip()}\nAssistant: {each.reply.answer}" for each in talk)
    asked = (
        "Please predict the three most likely questions that human would ask, as a JSON list of strings. "
        + sentence(rng, 3, 12)
    )
    if rng.random() < 0.5:
        asked = (
            "Please help me predict the three most likely questions that human would ask"
            + f", {sentence(rng, 3, 9)}"
        )
    shown = '["question1", "question2", "question3"]' if rng.random() < 0.6 else ""
    message = "\n".join(
        part
        for part in (history, asked, section(rng) if rng.random() < 0.4 else "", shown, "questions:\n")
        if part
    )
    reply = _program_reply(_NEXT.get(last.skill, _NEXT_DEFAULT), "Suggest questions.")
    return Dialogue("", "", (Exchange("suggestions", "", message, reply),))


_WEBUI_TASKS: Final = (("title", "Generate a concise title", "title"), ("tags",
    "Generate tags for the themes of the chat history", "tags"),
                       ("follow-ups", "Predict useful messages this user might send next", "follow_ups"))  # fmt: skip


def webui_task(rng: random.Random, held: bool) -> Dialogue:
    """A title, tags or next messages for a chat that stands in tags at the end."""
    last, talk = _talk(rng, held)
    kind, asked, key = rng.choice(_WEBUI_TASKS)
    value: Any = {
        "title": _title(talk[-1]),
        "tags": _TAGS.get(last.skill, ["General"]),
        "follow_ups": _NEXT.get(last.skill, _NEXT_DEFAULT),
    }[key]
    holder: Any = (
        sentence(rng, 2, 5) if key == "title" else [sentence(rng, 1, 3).rstrip(".!") for _ in range(3)]
    )
    shown = json.dumps({key: holder})
    if rng.random() < 0.7:
        shown = "{ " + shown[1:-1] + " }"
    examples = (
        [f'- {{ "{key}": "{things(rng, 3)}" }}' for _ in range(rng.randint(1, 5))]
        if key == "title" and rng.random() < 0.6
        else []
    )
    chat = "\n".join(f"USER: {each.message.strip()}\nASSISTANT: {each.reply.answer}" for each in talk)
    if kind == "title" and rng.random() < 0.5:
        talk = talk[-1:]
        chat = f"USER: {last.message.strip()}"  # the title is wanted before there is an answer
    head = f"### Task:\n{asked} {sentence(rng, 2, 9)}"
    message = "\n".join(
        [head, *(section(rng, "Guidelines:", 8) for _ in range(rng.choice((0, 1, 1)))),
        f"### Output:\nJSON format: {shown}",
         *(["### Examples:", *examples] if examples else ()),
             f"### Chat History:\n<chat_history>\n{chat}\n</chat_history>"]
    )  # fmt: skip
    return Dialogue(
        "", "", (Exchange(f"webui {kind}", "", message, _program_reply({key: value}, "Read the chat.")),)
    )


KINDS: Final[tuple[tuple[Callable[[random.Random, bool], Dialogue], float], ...]] = (
    (classifier, 30), (extractor_prompt, 15), (extractor_call, 14), (structured, 18), (chat_title, 10),
    (suggestions, 5), (webui_task, 8),
)  # fmt: skip


def program_dialogue(rng: random.Random, held: bool) -> Dialogue:
    """Return a dialogue that a program begins."""
    makers, weights = zip(*KINDS, strict=True)
    made: Dialogue = rng.choices(makers, weights)[0](rng, held)
    return made
