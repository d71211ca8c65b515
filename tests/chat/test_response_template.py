"""A model's own description of its output (`response_template`) is a dialect like any other.

What a template means is compared with transformers' own parser of it, an oracle; the templates that transformers
brings for models without one are read from there.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from transformers.cli.serving import utils as serving
from transformers.utils.chat_parsing import ResponseParser, parse_response

from mlx_backend.chat.response_template import (
    ResponseTemplateError,
    recognise,
    response_template_dialect,
)
from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.conversation.events import Channel
from mlx_backend.conversation.parser import ChannelParser, fold, parse_text

WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "units": {"type": "array"}},
    },
}
TOOLS = [{"type": "function", "function": WEATHER}]
SHAPE = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
QWEN, QWEN_XML, GEMMA_4 = serving._RESPONSE_TEMPLATE_FALLBACKS.values()


def _template(**calls: Any) -> dict[str, Any]:
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|bot|>",
        "fields": {
            "thinking": {"open": "<|plan|>", "close": "<|/plan|>"},
            "content": {"close": ["<|im_end|>"]},
            "tool_calls": {"repeats": True, **calls},
        },
    }


NAMED_JSON = _template(
    open_pattern=r"<\|use\|>(?P<name>[\w.-]+)<\|with\|>", close="<|/use|>", content="json", transform=SHAPE
)
TAGS = _template(
    open_pattern=r"<\|use\|>\s*<do name=\"(?P<name>[^\"]+)\">",
    close_pattern=r"</do>\s*<\|/use\|>",
    content="xml-inline",
    content_args={
        "tag_pattern": r"<arg name=\"(?P<key>[^\"]+)\">(?P<value>.*?)</arg>",
        "merge_duplicates": True,
    },
    transform=SHAPE,
)
LINES = _template(
    open_pattern=r"<\|use\|>(?P<name>\w+)\n",
    close="<|/use|>",
    content="kv-lines",
    content_args={"kv_sep": "="},
    transform=SHAPE,
)
LIST = _template(
    open="<|use|>",
    close="<|/use|>",
    content="json",
    transform={"type": "function", "function": {"name": "{tool}", "arguments": "{input}"}},
    transform_each=True,
)

TRANSCRIPTS: list[tuple[dict[str, Any], str]] = [
    (
        NAMED_JSON,
        '<|plan|>Look.<|/plan|>I look.<|use|>get_weather<|with|>{"city": "Paris", "days": 3}<|/use|>',
    ),
    (NAMED_JSON, '<|use|>get_weather<|with|>{"city": "a}\\"b"}<|/use|><|use|>get_weather<|with|>{}<|/use|>'),
    (NAMED_JSON, "<|plan|>Only a thought.<|/plan|>And an answer.<|im_end|>"),
    (
        TAGS,
        '<|use|>\n<do name="get_weather"><arg name="city">3</arg><arg name="days">3</arg></do>\n<|/use|>',
    ),
    (TAGS, '<|use|><do name="get_weather"></do><|/use|>'),
    (
        TAGS,
        '<|use|><do name="get_weather"><arg name="units">["a"]</arg><arg name="city">a\nb <i></arg></do><|/use|>',
    ),
    (LINES, "<|plan|>Look.<|/plan|><|use|>get_weather\ncity=Paris\ndays=3<|/use|>"),
    (
        LIST,
        '<|use|>[{"tool": "get_weather", "input": {"days": 1}}, {"tool": "f", "input": {"x": [1]}}]<|/use|>',
    ),
    (
        QWEN,
        '<think>\nLook.\n</think>\n\nI look.\n<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>',
    ),
    (
        QWEN_XML,
        "<think>\nLook.\n</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    ),
    (
        GEMMA_4,
        '<|channel>thought\nLook.<channel|><|tool_call>call:get_weather{city:<|"|>{Paris}<|"|>,days:3}<tool_call|>',
    ),
]


def _expected(template: dict[str, Any], text: str) -> tuple[str, str, list[Any]]:
    """Return what transformers makes of a turn."""
    message = parse_response(text, template, prefix="", tools=TOOLS)
    reasoning = message.get("reasoning_content") or message.get("thinking") or ""
    calls = message.get("tool_calls") or []
    flat = [call for each in calls for call in (each if isinstance(each, list) else [each])]
    functions = [call["function"] for call in flat]
    return reasoning, message.get("content", ""), [(each["name"], each["arguments"]) for each in functions]


def _meaning(events: list[Any]) -> tuple[str, str, list[Any]]:
    message = fold(events)
    calls = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
    return message.reasoning.strip(), message.content.strip(), calls


@pytest.mark.parametrize(("template", "text"), TRANSCRIPTS)
def test_a_turn_means_what_transformers_reads_in_it_at_every_split(
    template: dict[str, Any], text: str
) -> None:
    dialect, expected = response_template_dialect(template), _expected(template, text)
    for at in range(len(text) + 1):
        parser = ChannelParser(dialect, tools=[WEATHER])
        events = [*parser.feed(text[:at]), *parser.feed(text[at:]), *parser.close()]
        assert _meaning(events) == expected, at
    parser = ChannelParser(dialect, tools=[WEATHER])
    assert _meaning([*(event for one in text for event in parser.feed(one)), *parser.close()]) == expected


def test_control_tokens_are_taken_by_their_ids() -> None:
    dialect = response_template_dialect(NAMED_JSON)
    tokens = {1: "<|plan|>", 2: "<|/plan|>", 3: "<|use|>", 4: "<|/use|>", 5: "<|with|>", 6: "<|other|>"}
    parser = ChannelParser(dialect, tools=[WEATHER], special_tokens=tokens)
    pieces = [("<|plan|>", 1), ("Hm.", 9), ("<|other|>", 6), ("<|/plan|>", 2), ("Yes.", 9)]
    events = [event for text, token in pieces for event in parser.feed(text, token)]
    assert _meaning([*events, *parser.close()]) == ("Hm.", "Yes.", [])


def test_a_call_that_was_cut_is_not_put_out() -> None:
    parser = ChannelParser(response_template_dialect(NAMED_JSON), tools=[WEATHER])
    events = [*parser.feed('I look.<|use|>get_weather<|with|>{"city": "Par'), *parser.close("length")]
    assert _meaning(events) == ("", "I look.", [])


def test_a_call_without_arguments_has_an_empty_object() -> None:
    message = parse_text("<|use|>get_weather<|with|>null<|/use|>", response_template_dialect(NAMED_JSON))
    assert [call.arguments for call in message.tool_calls] == ["{}"]


def test_the_end_of_the_prompt_tells_what_is_open() -> None:
    dialect = response_template_dialect(NAMED_JSON)
    assert dialect.opens_in("<|bot|><|plan|>\n") is Channel.ANALYSIS
    assert dialect.opens_in("<|bot|><|plan|><|/plan|>") is Channel.FINAL
    parser = ChannelParser(dialect, opens_in=Channel.ANALYSIS)
    assert _meaning([*parser.feed("A thought.<|/plan|>4"), *parser.close()]) == ("A thought.", "4", [])


def test_nothing_is_lost_of_what_is_no_call_and_of_other_fields() -> None:
    template = {**TAGS, "fields": {**TAGS["fields"], "citations": {"open": "<|cite|>", "close": "<|/cite|>"}}}
    text = "See <|cite|>1<|/cite|>. <|use|>no call<|/use|>"
    message = parse_text(text, response_template_dialect(template), tools=[WEATHER])
    assert message.content == text


@pytest.mark.parametrize(
    ("template", "family"),
    [(QWEN, "hermes-json"), (QWEN_XML, "qwen-xml"), (GEMMA_4, "gemma4")],
)
def test_a_known_family_that_reads_and_writes_the_same_stays(template: dict[str, Any], family: str) -> None:
    source = {"gemma4": "<|tool_call>", "qwen-xml": "<function= <parameter="}.get(family, "<tool_call>")
    assert recognise(source, [], template).dialect is DIALECTS[family]


def test_a_response_template_wins_over_a_family_that_would_misread_it() -> None:
    template = _template(
        open="<tool_call>",
        close="</tool_call>",
        **{key: value for key, value in LINES["fields"]["tool_calls"].items() if key.startswith("content")},
        transform={"name": "get_weather", "arguments": "{content}"},
    )
    dialect = recognise("<think> <tool_call>", [], template).dialect
    assert dialect is response_template_dialect(template)
    assert recognise("<think> <tool_call>", [], None).dialect is DIALECTS["hermes-json"]
    assert recognise("<function= <parameter=", [], QWEN).dialect is not DIALECTS["qwen-xml"]


@pytest.mark.parametrize(
    "template",
    [
        7,
        [],
        {},
        {"fields": {}},
        {"fields": {"tool_calls": []}},
        {"version": 2, **NAMED_JSON},
        {**NAMED_JSON, "grammar": ""},
        _template(open="<use>", close="</use>", content="yaml"),
        _template(open="<use>", open_pattern="<use>", close="</use>"),
        _template(open_pattern=r"(<a+)+>", close="</use>"),
        _template(open_pattern=r"<use>(?P<name>(\w+\s?)*)>", close="</use>"),
        _template(open_pattern=r"<use>(?P<n>\w+)\1", close="</use>"),
        _template(open_pattern=r"<use>[", close="</use>"),
        _template(open_pattern=r"<use>(?P<name>\w+)x", close="</use>"),
        _template(open="<use>", close="</use>", content="json", transform="a {content}"),
        _template(open="<use>", close="</use>", content="json", transform_each=True),
        {"fields": {"thinking": {"close": "</think>"}}},
        {"fields": {"thinking": {"open": "<think>"}}},
        {"fields": {"content": {"close": "<|im_end|>"}}},
        {"fields": {"thinking": {"open": "<" * 70_000, "close": ">"}}},
    ],
)
def test_what_cannot_be_used_is_refused_with_a_reason_and_changes_nothing(template: Any) -> None:
    reasons: list[str] = []
    assert recognise("<think>", [], template, on_refused=reasons.append).dialect is DIALECTS["hermes-json"]
    assert len(reasons) == 1
    with pytest.raises(ResponseTemplateError):
        response_template_dialect(template)


def test_the_older_response_schema_is_not_read() -> None:
    schema = {"type": "object", "properties": {"content": {"type": "string", "x-regex": "(a+)+$"}}}
    with pytest.raises(ResponseTemplateError, match="Unknown keys"):
        response_template_dialect(schema)


def test_text_behind_a_calls_marker_that_begins_none_is_let_go_at_once() -> None:
    parser = ChannelParser(response_template_dialect(NAMED_JSON), tools=[WEATHER])
    assert _meaning(parser.feed("<|use|> is a marker."))[1] == "<|use|> is a marker."


def test_messages_with_recipients_are_read_as_muse_glimmer_writes_them() -> None:
    template = {
        "start_anchor": "<|start|>assistant",
        "fields": {
            "thinking": {"open": " to=self<|message|>", "close": "<|eom|>"},
            "content": {
                "open_pattern": r"(?:<\|start\|>assistant)? to=user<\|message\|>",
                "close": "<|eot|>",
            },
            "tool_calls": {
                "open_pattern": r'<atem:invoke name="(?P<name>[^"]+)">',
                "close": "</atem:invoke>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r'<atem:parameter name="(?P<key>[^"]+)">(?P<value>.*?)</atem:parameter>'
                },
                "transform": SHAPE,
            },
        },
    }
    dialect = response_template_dialect(template)
    assert dialect.opens_in("<|start|>user<|message|>Hi<|eot|><|start|>assistant") is None
    assert dialect.opens_in("<|start|>assistant to=self<|message|>") is Channel.ANALYSIS
    tokens = {1: "<|start|>", 2: "<|message|>", 3: "<|eom|>", 4: "<|eot|>"}
    ids = {text: token for token, text in tokens.items()}
    said = "<|start|>assistant to=user<|message|>I look."
    call = (
        '<atem:function_calls><atem:invoke name="get_weather"><atem:parameter name="city">Paris</atem:parameter>'
        '<atem:parameter name="days">3</atem:parameter></atem:invoke></atem:function_calls>'
    )
    thought = " to=self<|message|>Hm.<|eom|>"
    for written, calls in (
        (f"{thought}<|start|>assistant to=tools<|message|>{call}<|eot|>", True),
        (f"{thought}{said}<|eot|>", False),
    ):
        parser = ChannelParser(dialect, tools=[WEATHER], special_tokens=tokens)
        pieces = [piece for piece in re.split(r"(<\|\w+\|>)", written) if piece]
        events = [event for piece in pieces for event in parser.feed(piece, ids.get(piece, 9))]
        reasoning, content, made = _meaning([*events, *parser.close()])
        assert reasoning == "Hm."
        if calls:
            assert made == [("get_weather", {"city": "Paris", "days": 3})]
        else:
            assert (content, made) == ("I look.", [])


def test_a_search_that_takes_too_long_leaves_the_rest_to_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = ResponseParser.feed

    def slow(parser: ResponseParser, text: str) -> list[dict[str, Any]]:
        if text == "!":
            raise TimeoutError
        events: list[dict[str, Any]] = feed(parser, text)
        return events

    monkeypatch.setattr(ResponseParser, "feed", slow)
    text = "<|plan|>Hm.<|/plan|>Well <|use|! and <|plan|>so on."
    message = parse_text(text, response_template_dialect(NAMED_JSON), tools=[WEATHER])
    assert (message.reasoning, message.content) == ("Hm.", "Well <|use|! and <|plan|>so on.")


@pytest.mark.parametrize("template", [NAMED_JSON, QWEN, GEMMA_4], ids=["named", "qwen", "gemma"])
@pytest.mark.parametrize(
    ("text", "opens_in", "reasoning", "content"),
    [
        ("Hi.{c}", Channel.FINAL, "", "Hi."),
        ("{c}Hi.", None, "", "Hi."),
        ("A{c}{c}Hi.{c}", Channel.ANALYSIS, "A", "Hi."),
        ("{o}A{c}Hi. {o}B{c}Bye.{c}", None, "AB", "Hi. Bye."),
        ("It is `{c}`.", None, "", "It is `{c}`."),
    ],
)
def test_what_closes_no_reasoning_is_dropped(
    template: dict[str, Any], text: str, opens_in: Channel | None, reasoning: str, content: str
) -> None:
    dialect = response_template_dialect(template)
    opener, closer = next(iter(dialect.blocks.items()))
    text, content = (each.replace("{o}", opener).replace("{c}", closer) for each in (text, content))
    for pieces in ([text], list(text)):
        parser = ChannelParser(dialect, tools=TOOLS, opens_in=opens_in)
        events = [event for piece in pieces for event in parser.feed(piece)]
        message = fold([*events, *parser.close()])
        assert (message.reasoning, message.content) == (reasoning, content)
