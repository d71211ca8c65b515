"""What a dialect carries, and that a new family needs nothing but a dialect."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from mlx_backend.conversation.dialects import DIALECTS, detect
from mlx_backend.conversation.dialects.base import HistoryPolicy, Piece
from mlx_backend.conversation.dialects.block_format import BlockCalls, CallSection
from mlx_backend.conversation.dialects.block_reader import BlockReader
from mlx_backend.conversation.dialects.calls.base import CallSyntax, DecodedCall
from mlx_backend.conversation.dialects.think import FORMAT, THINK
from mlx_backend.conversation.history import sanitise
from mlx_backend.conversation.parser import ChannelParser, fold, parse_text
from mlx_backend.conversation.tools import ToolSet

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_backend.conversation.dialects import Dialect

WITH_CALLS = [dialect for dialect in DIALECTS.values() if dialect.calls is not None]
GET_AGE = {
    "type": "function",
    "function": {
        "name": "get_age",
        "parameters": {"type": "object", "properties": {"years": {"type": "integer"}}},
    },
}


def test_every_model_has_exactly_one_dialect() -> None:
    assert detect(None, []) is DIALECTS["plain"]
    assert [dialect.name for dialect in DIALECTS.values()] == list(DIALECTS)
    assert list(DIALECTS)[-1] == "plain"  # it recognises any model


def test_no_two_dialects_claim_the_same_leaked_markup() -> None:
    openers = [
        opener
        for dialect in DIALECTS.values()
        for opener in {*dialect.leaks.openers, *dialect.leaks.message_openers, *dialect.leaks.call_openers}
    ]
    assert len(openers) == len(set(openers))


@pytest.mark.parametrize("dialect", WITH_CALLS, ids=lambda dialect: dialect.name)
def test_a_call_that_a_dialect_writes_is_the_call_its_reader_reads(dialect: Dialect) -> None:
    assert dialect.calls is not None
    pieces = dialect.calls.encode("get_age", {"years": 3})
    message = parse_text("".join(piece.text for piece in pieces), dialect, tools=[GET_AGE])
    [call] = message.tool_calls
    assert (call.name, call.arguments, message.finish) == ("get_age", '{"years": 3}', "tool_calls")
    assert not message.content


class UntypedCalls(CallSyntax):
    """`name|key=value`: only the schema tells what type a value has."""

    def decode(self, body: str, tools: ToolSet) -> list[DecodedCall]:
        name, _, pair = body.partition("|")
        key, _, value = pair.partition("=")
        properties: Mapping[str, Any] = tools.parameters(name).get("properties", {})
        is_number = properties.get(key, {}).get("type") == "integer"
        return [DecodedCall(name, f'{{"{key}": {value if is_number else f"{chr(34)}{value}{chr(34)}"}}}')]

    def encode(self, name: str, arguments: Mapping[str, Any]) -> tuple[Piece, ...]:
        return (Piece(f"{name}|" + "".join(f"{key}={value}" for key, value in arguments.items())),)


def test_a_codec_sees_the_schemas_of_the_request() -> None:
    section = CallSection(openers=("<use>",), closer="</use>", syntax=UntypedCalls())
    form = dataclasses.replace(FORMAT, sections=(section,))
    family = dataclasses.replace(
        THINK, name="untyped", calls=BlockCalls(form), reader=partial(BlockReader, form=form)
    )
    text = "<think>hm</think>\n<use>get_age|years=3</use>"
    typed = parse_text(text, family, tools=[GET_AGE])
    untyped = parse_text(text, family, tools=["get_age"])
    assert typed.tool_calls[0].arguments == '{"years": 3}'
    assert untyped.tool_calls[0].arguments == '{"years": "3"}'
    parser = ChannelParser(family, tools=[GET_AGE])
    events = [*(event for character in text for event in parser.feed(character)), *parser.close()]
    assert fold(events) == typed
    assert family.calls is not None
    assert "".join(piece.text for piece in family.calls.encode("get_age", {"years": 3})) in text


def test_tools_may_be_definitions_or_names() -> None:
    tools = ToolSet([GET_AGE, "look", {"name": "flat", "parameters": {"type": "object"}}])
    assert tools.names == {"get_age", "look", "flat"}
    assert tools.parameters("flat") == {"type": "object"}
    assert tools.parameters("look") == {}
    assert ToolSet(None).may_be_called
    assert not ToolSet([]).may_be_called


HISTORY = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "1", "reasoning_content": "earlier"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "2", "reasoning_content": "later"},
    {"role": "user", "content": "three"},
]


@pytest.mark.parametrize(("keeps", "kept"), [(False, []), (True, ["earlier", "later"])])
def test_the_history_policy_says_which_reasoning_stays(keeps: bool, kept: list[str]) -> None:
    messages = sanitise(HISTORY, policy=HistoryPolicy(keeps_answered_turns=keeps))
    assert [m["reasoning_content"] for m in messages if "reasoning_content" in m] == kept


@pytest.mark.parametrize(
    ("text", "dialect"),
    [
        ("<|channel|>analysis", "harmony"),
        ("analysisWe need", "harmony"),
        ("analysis of it", None),
        ("<think>hm", "hermes-json"),
        ("◁think▷", "hermes-json"),
        ("Hello", None),
    ],
)
def test_leaked_markup_tells_its_dialect(text: str, dialect: str | None) -> None:
    begins = {name: each.leaks.begins(text) for name, each in DIALECTS.items()}
    assert next((name for name, leaked in begins.items() if leaked), None) == dialect
    if dialect is not None:
        assert all(DIALECTS[dialect].leaks.begins(text[:at]) is None for at in range(1, 4))
