"""Calls that a server left in the text: typed by the tools' schemas, checked by their names, also after a block."""

from __future__ import annotations

import json
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest

from dify_mlx_provider.chat.stream_reader import StreamReader, iter_text
from dify_mlx_provider.chat.think_block import ThinkBlockWriter
from mlx_backend.conversation.dialects import DIALECTS, Dialect
from mlx_backend.conversation.parser import fold

if TYPE_CHECKING:
    from mlx_backend.conversation.events import Event

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "zip": {"type": "string"},
            },
        },
    },
}
WANTED = {"city": "Paris", "days": 3, "zip": "01234"}
WRITTEN = json.dumps(WANTED)
CALLS = {
    "Qwen": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n<parameter=zip>\n01234\n</parameter>\n</function>\n</tool_call>"
    ),
    "GLM": (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n<arg_key>zip</arg_key>\n<arg_value>01234</arg_value>\n</tool_call>"
    ),
    "MiniMax": (
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">3</parameter>\n<parameter name="zip">01234</parameter>\n</invoke>\n'
        "</minimax:tool_call>"
    ),
    "LFM2": "<|tool_call_start|>[get_weather(city='Paris', days=3, zip='01234')]<|tool_call_end|>",
    "Mistral": f"[TOOL_CALLS]get_weather[ARGS]{WRITTEN}",
    "Harmony without its markers": f"commentary to=functions.get_weather json{WRITTEN}",
    "Hermes": f'<tool_call>\n{{"name": "get-weather", "arguments": {WRITTEN}}}\n</tool_call>',
}


def read(pieces: list[str], **how: Any) -> tuple[str, list[tuple[str, Any]]]:
    """The text Dify gets, and the calls."""
    reader = StreamReader([WEATHER], **how)
    stream = [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
    text = "".join(iter_text(reader, ThinkBlockWriter(), stream))
    return text, [(call.name, json.loads(call.arguments)) for call in reader.result.calls]


def splits(text: str) -> list[list[str]]:
    """A text whole, letter by letter, and at every place but in the middle of plain words."""
    places = [at for at in range(1, len(text)) if text[at] in "<>|[]=\n" or text[at - 1] in "<>|[]=\n"]
    pairs = [pair for pair in combinations(places, 2) if pair[1] - pair[0] < 12]
    cuts = [(), *((at,) for at in places), *pairs]
    halves = [[text[a:b] for a, b in zip((0, *cut), (*cut, len(text)), strict=True)] for cut in cuts]
    return [*halves, [*text]]


@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize("before", ["", "Let me look.\n", "<think>\nI need it.\n</think>\n\n"])
def test_a_call_of_any_family_is_typed_by_the_schema_wherever_it_stands(family: str, before: str) -> None:
    expected = {
        "": "",
        "Let me look.\n": "Let me look.\n",
        "<think>\nI need it.\n</think>\n\n": "<think>\nI need it.\n</think>\n\n",
    }[before]
    for pieces in splits(before + CALLS[family]):
        text, calls = read(pieces)
        assert calls == [("get_weather", WANTED)], pieces
        assert text.strip() == expected.strip(), pieces


@pytest.mark.parametrize("family", CALLS)
def test_a_call_after_a_block_that_the_prompt_opened_is_a_call(family: str) -> None:
    text, calls = read(["I need it.\n</think>\n\n" + CALLS[family]], starts_in_reasoning=True)
    assert calls == [("get_weather", WANTED)]
    assert text.strip() == "<think>\nI need it.\n</think>"


def test_an_answer_after_a_block_may_talk_about_markup() -> None:
    answer = "Write `[TOOL_CALLS]f[ARGS]{}` or `<|tool_call_start|>` there; `<think>` begins it, `</think>` ends it."
    for pieces in splits(f"<think>\nwhy\n</think>\n\n{answer}"):
        text, calls = read(pieces)
        assert calls == []
        assert text.partition("</think>\n\n")[2].replace("\u200b", "") == answer


@pytest.mark.parametrize("end", ["<|im_end|>", ""])
def test_an_end_marker_after_the_answer_is_not_part_of_it(end: str) -> None:
    text, _ = read([f"<think>\nwhy\n</think>\n\nParis.{end}"])
    assert text == "<think>\nwhy\n</think>\n\nParis."


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        f'{{"name": "get_weather", "arguments": {WRITTEN}}}',
        f'```json\n{{"name": "get_weather", "arguments": {WRITTEN}}}\n```\n',
        f'<tools>\n{{"name": "get_weather", "arguments": {WRITTEN}}}\n</tools>',
    ],
)
def test_an_answer_that_is_only_a_calls_json_is_a_call(text: str, scan: bool) -> None:
    for pieces in splits(text):
        assert read(pieces, scan=scan, unwrapped=True) == ("", [("get_weather", WANTED)])
        assert read(pieces, scan=scan) == (text, [])
        more = [*pieces, "Done."]
        assert read(more, scan=scan, unwrapped=True) == (f"{text}Done.", [])


def test_an_answer_of_other_json_is_shown_as_it_comes() -> None:
    reader = StreamReader([WEATHER], unwrapped=True)
    shown = [
        fold(reader.feed({"choices": [{"index": 0, "delta": {"content": piece}}]})).content
        for piece in ('{"', "na", 'me": "Os', 'lo"', ', "x": 1}')
    ]
    assert shown == ["", "", "", '{"name": "Oslo"', ', "x": 1}']


def reasoned(pieces: list[str], **how: Any) -> tuple[str, str]:
    """The reasoning and the answer."""
    reader = StreamReader([WEATHER], **how)
    events: list[Event] = []
    for piece in pieces:
        events += reader.feed({"choices": [{"index": 0, "delta": {"content": piece}}]})
    events += reader.close()
    message = fold(events)
    return message.reasoning, message.content


@pytest.mark.parametrize(
    "dialect", [each for each in DIALECTS.values() if each.blocks], ids=lambda dialect: dialect.name
)
@pytest.mark.parametrize(
    ("template", "reasoning", "answer"),
    [
        ("{o}\nHm.\n{c}\n\nHi.", "Hm.", "Hi."),
        ("{o}Hm.{c}Hi.\n{o}Yes.{c}\nBye.{c}", "Hm.\n\nYes.", "Hi.\n\nBye."),
        ("Hi.\n{c}\nBye.{c}", "", "Hi.\n\nBye."),
        ("Hi. {o}Hm.{c} Bye.", "Hm.", "Hi.  Bye."),
        ("Write `{o}` and `{c}`.\n```\n{o}\n{c}\n```", "", "Write `{o}` and `{c}`.\n```\n{o}\n{c}\n```"),
    ],
)
def test_blocks_of_any_family_that_a_server_lets_through_are_reasoning(
    dialect: Dialect, template: str, reasoning: str, answer: str
) -> None:
    opener, closer = next(iter(dialect.blocks.items()))
    text, wanted = (each.replace("{o}", opener).replace("{c}", closer) for each in (template, answer))
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        assert reasoned(pieces) == (reasoning, wanted), pieces
