"""Random calls, written by each family's codec, are read back as they were; mlx-lm's tool parsers read the same.

200 a family: names, Unicode, nested and empty arguments. mlx-lm is an oracle here, and only its readers are asked: what
they are known to change (white space at the ends of texts, texts that say null) is not generated for them.
"""

from __future__ import annotations

import importlib
import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.conversation.parser import ChannelParser, fold
from mlx_backend.conversation.tool_names import can_write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.conversation.dialects import Dialect

CALLS = 200
WITH_CALLS = [dialect for dialect in DIALECTS.values() if dialect.calls is not None]
SEVERAL = [dialect for dialect in WITH_CALLS if dialect.name != "harmony"]  # there a call ends its turn
ORACLES = {
    "hermes-json": "json_tools",
    "qwen-xml": "qwen3_coder",
    "nemotron": "qwen3_coder",
    "glm": "glm47",
    "laguna": "laguna",
    "longcat": "longcat",
    "gemma4": "gemma4",
    "kimi-k2": "kimi_k2",
    "kimi-k3": "kimi_k3",
    "minimax-m2": "minimax_m2",
    "mistral": "mistral",
    "lfm2": "pythonic",
    "minicpm5": "minicpm5",
}
WORDS = ["get_weather", "search", "f", "create_event_2", "readFile", "x9"]
NAMES = [*WORDS, "look-up", "files.read", "天気"]
KEYS = ["city", "query", "a", "max_items", "userId", "from_date", "z9", "城市", "größe"]
TEXTS = [
    "Paris",
    "3",
    "true",
    "0.5",
    "[1]",
    "naïve café",
    "日本語 👋",
    "a, b: c",
    "it's",
    "x = 1 < 2 && 3 > 2",
    "two\nlines",
]


def value(choose: random.Random, depth: int = 0) -> tuple[Any, dict[str, Any]]:
    """A value, and its schema."""
    kind = choose.choice(
        ["string", "string", "integer", "number", "boolean", "array", "object"][: 5 if depth > 1 else 7]
    )
    match kind:
        case "string":
            return choose.choice(TEXTS), {"type": "string"}
        case "integer":
            return choose.randint(-(10**6), 10**6), {"type": "integer"}
        case "number":
            return choose.choice([0.5, -2.25, 1e-3, 3.75]), {"type": "number"}
        case "boolean":
            return choose.random() < 0.5, {"type": "boolean"}
        case "array":
            item, schema = value(choose, depth + 2)
            return [item] * choose.randint(1, 3), {"type": "array", "items": schema}
    keys = choose.sample(KEYS, choose.randint(1, 3))
    pairs = {key: value(choose, depth + 1) for key in keys}
    properties = {key: schema for key, (_, schema) in pairs.items()}
    return {key: item for key, (item, _) in pairs.items()}, {"type": "object", "properties": properties}


def call(
    choose: random.Random, names: Sequence[str] = WORDS
) -> tuple[str, dict[str, Any], list[dict[str, Any]]]:
    """A name, arguments (perhaps none), and the tools of the request."""
    keys = choose.sample(KEYS, choose.randint(0, 4))
    pairs = {key: value(choose) for key in keys}
    parameters = {"type": "object", "properties": {key: schema for key, (_, schema) in pairs.items()}}
    name = choose.choice(names)
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}}]
    return name, {key: item for key, (item, _) in pairs.items()}, tools


def names_of(dialect: Dialect) -> list[str]:
    """The names that a family's models can say; others are mapped to such names before."""
    return [name for name in NAMES if can_write(name, dialect)]


def written(dialect: Dialect, name: str, arguments: dict[str, Any]) -> str:
    assert dialect.calls is not None
    return "".join(piece.text for piece in dialect.calls.encode(name, arguments))


@pytest.mark.parametrize("dialect", WITH_CALLS, ids=lambda dialect: dialect.name)
def test_what_a_family_writes_is_read_back(dialect: Dialect) -> None:
    choose = random.Random(dialect.name)
    for _ in range(CALLS):
        name, arguments, tools = call(choose, names_of(dialect))
        text = written(dialect, name, arguments)
        size = choose.randint(1, 9)
        parser = ChannelParser(dialect, tools=tools)
        events = [event for at in range(0, len(text), size) for event in parser.feed(text[at : at + size])]
        message = fold([*events, *parser.close()])
        assert [(each.name, json.loads(each.arguments)) for each in message.tool_calls] == [
            (name, arguments)
        ], text
        assert not message.content, text


@pytest.mark.parametrize(("name", "module"), ORACLES.items())
def test_mlx_lms_parser_reads_the_same(name: str, module: str) -> None:
    pytest.importorskip("mlx_lm")
    oracle = importlib.import_module(f"mlx_lm.tool_parsers.{module}")
    dialect, choose = DIALECTS[name], random.Random(name)
    for _ in range(CALLS):
        called, arguments, tools = call(choose)
        if name == "longcat" and not arguments:
            continue  # its parser cannot read a call without arguments
        text = written(dialect, called, arguments).strip()
        body = text.removeprefix(oracle.tool_call_start)
        found = oracle.parse_tool_call(body.removesuffix(oracle.tool_call_end or "\0"), tools)
        [single] = found if isinstance(found, list) else [found]
        assert (single["name"], single["arguments"]) == (called, arguments), text


@pytest.mark.parametrize("dialect", SEVERAL, ids=lambda dialect: dialect.name)
def test_several_calls_with_text_between_are_all_read(dialect: Dialect) -> None:
    choose = random.Random(7)
    for _ in range(20):
        name, arguments, tools = call(choose, names_of(dialect))
        text = written(dialect, name, arguments)
        parser = ChannelParser(dialect, tools=tools)
        message = fold([*parser.feed(f"{text}\n{text}"), *parser.close()])
        assert [json.loads(each.arguments) for each in message.tool_calls] == [arguments] * 2, text
        assert not message.content, text
