"""Every family's transcripts give their messages, however they are cut, by text and by tokens."""

from __future__ import annotations

import json
import re
from itertools import combinations
from typing import TYPE_CHECKING

import pytest
from conversation_cases import OFFERED, PLAIN_TOKEN, cut, load_families, pieces

from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.conversation.events import Channel, ToolCallDelta, ToolCallEnd, ToolCallStart
from mlx_backend.conversation.parser import ChannelParser, fold, parse_text
from mlx_backend.conversation.tools import ToolSet

if TYPE_CHECKING:
    from conversation_cases import Case

    from mlx_backend.conversation.dialects import Dialect
    from mlx_backend.conversation.events import Event, Message

CASES = load_families()
MAX_PAIRS = 60
# What a tokenizer of one family or another has as one token. Tags of calls are plain text in most of them.
CONTROL = re.compile(
    r"<\|[^<>|\s]{1,40}\|?>|<[a-z_]{1,20}\|>|\[/?[A-Z_]{3,12}\]|<｜[^｜<>]{1,40}｜>|｜DSML｜|\]<\]minimax\[>\["
    r"|</?(?:seed:|mm:|minimax:|longcat_)?(?:think|tool_call|tool_calls|arg_key|arg_value|tool_sep)(?::\w+)?>"
    r"|<end_of_turn>|</s>|</assistant>|<seed:eos>|\[e~\[|<(?:start|end)_function_\w+>"
)
FAMILIES = [dialect for dialect in DIALECTS.values() if dialect.name not in ("harmony", "plain")]

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_family = pytest.mark.parametrize("dialect", FAMILIES, ids=lambda dialect: dialect.name)


@by_case
def test_a_transcript_means_its_message(case: Case) -> None:
    assert case.read(case.text) == case.message


@by_case
def test_it_means_the_same_at_every_cut(case: Case) -> None:
    assert case.read(*case.text) == case.message
    for place in range(len(case.text) + 1):
        assert case.read(*cut(case.text, place)) == case.message, cut(case.text, place)
    places = list(combinations(range(1, len(case.text)), 2))
    for pair in places[:: max(1, len(places) // MAX_PAIRS)]:
        assert case.read(*cut(case.text, *pair)) == case.message, cut(case.text, *pair)


@by_case
def test_it_means_the_same_by_tokens(case: Case) -> None:
    for size in (1, 4):
        assert read_tokens(case, size) == case.message, size


def read_tokens(case: Case, size: int) -> Message:
    """Control tokens by their ids, all other text in tokens of `size` characters."""
    texts = sorted({match[0] for match in CONTROL.finditer(case.text)})
    ids = {text: at for at, text in enumerate(texts)}
    parser = ChannelParser(
        case.dialect,
        tools=case.tools,
        opens_in=case.opens_in,
        special_tokens={token: text for text, token in ids.items()},
    )
    events: list[Event] = []
    at = 0
    for match in [*CONTROL.finditer(case.text), None]:
        plain = case.text[at : match.start() if match else len(case.text)]
        events += [event for piece in pieces(plain, size) for event in parser.feed(piece, PLAIN_TOKEN)]
        if match:
            events += parser.feed(match[0], ids[match[0]])
            at = match.end()
    return fold([*events, *parser.close(case.ended_by)])


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda dialect: dialect.name)
def test_the_example_of_a_dialect_is_what_it_reads(dialect: Dialect) -> None:
    message = parse_text(dialect.example, dialect, tools=OFFERED)
    [call] = message.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris", "days": 3})
    assert message.reasoning in ("", "I need the weather.")
    assert not message.content


@by_family
def test_every_family_has_cases(dialect: Dialect) -> None:
    assert [case for case in CASES if case.dialect == dialect.name]


@by_family
def test_calls_of_a_request_without_tools_are_text(dialect: Dialect) -> None:
    message = parse_text(dialect.example, dialect, tools=())
    assert not message.tool_calls
    assert "get_weather" in message.reasoning + message.content


@by_family
def test_markers_that_reasoning_quotes_are_text_where_ids_tell(dialect: Dialect) -> None:
    if not dialect.has_reasoning:
        return
    tokens = dict(enumerate(sorted({match[0] for match in CONTROL.finditer(dialect.example)}), start=2))
    parser = ChannelParser(dialect, tools=OFFERED, opens_in=Channel.ANALYSIS, special_tokens=tokens)
    quoted = f"as in {' '.join(tokens.values())} so"
    events = [event for piece in pieces(quoted, 3) for event in parser.feed(piece, 1)]
    assert fold([*events, *parser.close()]).reasoning == quoted


@pytest.mark.parametrize("dialect", ["hermes-json", "mistral", "kimi-k2", "deepseek-v3", "deepseek-v3.1"])
def test_arguments_of_json_come_while_they_are_written(dialect: str) -> None:
    example = DIALECTS[dialect].example
    begins, ends = example.index('"Paris"') + 3, example.index("3}") + 1
    parser = ChannelParser(dialect, tools=OFFERED)
    assert parser.feed(example[:begins])[-2:] == [
        ToolCallStart(0, "get_weather", "functions.get_weather:0" if dialect == "kimi-k2" else ""),
        ToolCallDelta(0, '{"city": "Pa'),
    ]
    assert parser.feed(example[begins:ends]) == [ToolCallDelta(0, 'ris", "days": 3')]
    rest = [*parser.feed(example[ends:]), *parser.close()]
    assert rest[:2] == [ToolCallDelta(0, "}"), ToolCallEnd(0)]


STREAMED = [
    "lfm2",
    "olmo",
    "llama-pythonic",
    "gemma3-tool_code",
    "qwen-xml",
    "minimax-m2",
    "minimax-m3",
    "dsml",
    "glm",
    "kimi-k3",
    "gemma4",
    "functiongemma",
]


@pytest.mark.parametrize("name", STREAMED)
@pytest.mark.parametrize("unit", ["a line, and 'quotes' too.\n", 'if a < b: "x" \\ {y}\n', "</b> 日本語\t"])
def test_a_text_in_another_notation_comes_while_it_is_written(name: str, unit: str) -> None:
    dialect, value = DIALECTS[name], unit * 40 + "end"
    assert dialect.calls is not None
    text = "".join(piece.text for piece in dialect.calls.encode("search", {"query": value, "limit": 5}))
    begins = text.index(unit[:8])
    parser = ChannelParser(dialect, tools=OFFERED)
    events: list[Event] = []
    for at, piece in enumerate(pieces(text, 3)):
        events += parser.feed(piece)
        written = min(max(0, (at + 1) * 3 - begins), len(value))
        out = "".join(event.arguments for event in events if isinstance(event, ToolCallDelta))
        assert len(out) >= written - len("</parameter") or written < 8
    message = fold([*events, *parser.close()])
    assert [json.loads(call.arguments) for call in message.tool_calls] == [{"query": value, "limit": 5}]


def test_text_behind_an_opener_is_held_only_as_long_as_it_may_begin_a_call() -> None:
    parser = ChannelParser("qwen-xml", tools=OFFERED)
    assert fold(parser.feed("Write <tool_call>")).content == "Write "
    assert fold(parser.feed(" and then")).content == "<tool_call> and then"


def test_the_end_of_a_turn_may_be_spelt_in_a_string_of_json() -> None:
    """As HTML does it. A control token is the end wherever it stands."""
    call = '[TOOL_CALLS]search[ARGS]{"query": "<s>a</s>"}'
    [read] = parse_text(f"{call}</s>", "mistral", tools=OFFERED).tool_calls
    assert read.arguments == '{"query": "<s>a</s>"}'
    parser = ChannelParser(
        "mistral", tools=OFFERED, special_tokens={2: "</s>", 5: "[TOOL_CALLS]", 6: "[ARGS]"}
    )
    for text, token in (("[TOOL_CALLS]", 5), ("search", 9), ("[ARGS]", 6), ('{"query": "a', 9), ("</s>", 2)):
        parser.feed(text, token)
    assert parser.ended


def test_line_breaks_before_a_call_are_layout_and_others_are_not() -> None:
    call = '<tool_call>{"name": "search", "arguments": {}}</tool_call>'
    parser = ChannelParser("hermes-json", tools=OFFERED)
    assert fold(parser.feed("Hi\n\n")).content == "Hi"
    assert fold(parser.feed("there\n")).content == "\n\nthere"
    assert fold(parser.feed(call)).content == ""
    assert parse_text("Hi\n\n", "hermes-json", tools=OFFERED).content == "Hi\n\n"
    assert parse_text("Hi\n<tool_call>no</tool_call>", "hermes-json", tools=OFFERED).content.startswith(
        "Hi\n<"
    )


HOSTILE = [
    "</think>",
    "<think>",
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "<function=f>",
    "</function>",
    "<parameter=a>",
    '<tool_call>{"name": "f", ',
    "<arg_key>a</arg_key>",
    "[TOOL_CALLS]",
    "{",
    "[f(",
    "\\",
    '"',
    "<|open|>",
    "<|tool_call>call:f{",
    "<|channel>thought",
    "<｜DSML｜",
    "\n",
]


@pytest.mark.parametrize(
    "dialect", ["hermes-json", "qwen-xml", "glm", "mistral", "gemma4", "dsml", "kimi-k3", "llama3-json"]
)
@pytest.mark.parametrize("hostile", HOSTILE)
def test_what_never_ends_is_read_in_pieces_as_in_one(dialect: str, hostile: str) -> None:
    """Nothing raises, however deep it nests, and no piece of it is looked at again and again."""
    text = hostile * 3000
    whole = parse_text(text, dialect, tools=["f"])
    parser = ChannelParser(dialect, tools=["f"])
    events = [event for piece in pieces(text, 97) for event in parser.feed(piece)]
    assert fold([*events, *parser.close()]) == whole


def test_a_model_that_changes_a_name_calls_the_tool_it_means() -> None:
    tools = ToolSet(["web-search", "Files.read"])
    assert tools.offered_name("web_search") == "web-search"
    assert tools.offered_name("functions.web-search") == "web-search"
    assert tools.offered_name("default_api.files_read") == "Files.read"
    assert tools.offered_name("other") == "other"


@pytest.mark.parametrize("size", [1, 4, 999])
@pytest.mark.parametrize("by_ids", [False, True])
def test_the_beginning_of_a_call_may_be_quoted_in_reasoning(size: int, by_ids: bool) -> None:
    reasoning = "It is written <tool_call>\n<function=search>\n<parameter=query>\nx and so on."
    tokens = {7: "<tool_call>", 8: "</think>"} if by_ids else {}
    parser = ChannelParser("qwen-xml", tools=OFFERED, opens_in=Channel.ANALYSIS, special_tokens=tokens)
    events: list[Event] = []
    for part in re.split("(<tool_call>|</think>)", f"{reasoning}\n</think>\n\nI look."):
        token = next((token for token, text in tokens.items() if text == part), 1)
        for piece in [part] if token > 1 else pieces(part, size):
            events += parser.feed(piece, token if by_ids else None)
    message = fold([*events, *parser.close()])
    assert (message.reasoning, message.content) == (reasoning, "I look.")
    assert not any(call.complete for call in message.tool_calls)
