"""An answer that is nothing but the JSON of a call is that call, if its tool is offered; anything else is text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mlx_backend.conversation.dialects.calls import unwrapped
from mlx_backend.conversation.events import Channel, ContentDelta, Message
from mlx_backend.conversation.parser import ChannelParser, fold
from mlx_backend.conversation.tools import ToolSet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.conversation.events import EndedBy, Event

WEATHER = '{"name": "weather", "arguments": {"city": "Oslo"}}'
CLOCK = '{"name": "clock", "parameters": {}}'
BY_WORDS = '{"name": "weather", "arguments": {"city": "a } <tool_call> ``` </tools> \\" b"}}'


def feed(
    pieces: Sequence[str],
    dialect: str = "hermes-json",
    tools: Sequence[str] = ("weather", "clock"),
    opens_in: Channel | None = None,
) -> tuple[ChannelParser, list[Event]]:
    parser = ChannelParser(dialect, tools=ToolSet(tools, unwrapped=True), opens_in=opens_in)
    return parser, [event for piece in pieces for event in parser.feed(piece)]


def read(
    pieces: Sequence[str],
    dialect: str = "hermes-json",
    tools: Sequence[str] = ("weather", "clock"),
    opens_in: Channel | None = None,
    ended_by: EndedBy = "stop",
) -> Message:
    parser, events = feed(pieces, dialect, tools, opens_in)
    return fold([*events, *parser.close(ended_by)])


@pytest.mark.parametrize("dialect", ["hermes-json", "plain", "glm", "cohere"])
@pytest.mark.parametrize(
    ("text", "names"),
    [
        (WEATHER, ["weather"]),
        (f" \n{WEATHER} \n", ["weather"]),
        ('{\n  "name": "weather",\n  "arguments": {\n    "city": "Oslo"\n  }\n}\n', ["weather"]),
        ('{"arguments": {"city": "Oslo"}, "name": "Weather"}', ["weather"]),
        ('{"type": "function", "function": {"name": "weather", "arguments": {"city": "x"}}}', ["weather"]),
        (f"[{WEATHER}, {CLOCK}]", ["weather", "clock"]),
        (f"{WEATHER}\n{CLOCK}", ["weather", "clock"]),
        (f"```json\n{WEATHER}\n```", ["weather"]),
        (f"```\n[{WEATHER}]\n```\n", ["weather"]),
        (f"<tools>\n{WEATHER}\n{CLOCK}\n</tools>", ["weather", "clock"]),
        (f"<function>{BY_WORDS}</function>", ["weather"]),
        (f"{WEATHER}\n</tool_call>", ["weather"]),
        (WEATHER[:-1], ["weather"]),
        (f"[{WEATHER}", ["weather"]),
        (f"[{WEATHER}]]", ["weather"]),
        (f"{WEATHER} That is all.", []),
        (f"I look it up: {WEATHER}", []),
        ('{"name": "Oslo", "arguments": {}}', []),
        (f'[{WEATHER}, {{"name": "Oslo", "arguments": {{}}}}]', []),
        ('{"name": "weather"}', []),
        ('{"name": "weather", "description": "Tells it.", "parameters": {"type": "object"}}', []),
        (WEATHER[:-2], []),
        ('{"city": "Oslo"}', []),
        ("[1, 2]", []),
        ("```python\nprint(1)\n```", []),
        ("<table><tr></table>", []),
        *((WEATHER[:length], []) for length in (1, 2, 5, 10)),
        ("``", []),
        (" " * 100, []),
        ("\n" * 20 + WEATHER, []),
    ],
)
def test_an_answer_that_is_only_a_call_is_one_however_it_is_cut(
    dialect: str, text: str, names: list[str]
) -> None:
    whole = read([text], dialect)
    assert [call.name for call in whole.tool_calls] == names
    assert all(call.complete for call in whole.tool_calls)
    assert whole.content == ("" if names else text)
    assert whole.finish == ("tool_calls" if names else "stop")
    for opens_in in (None, Channel.FINAL):
        assert read([*text], dialect, opens_in=opens_in) == whole
    for at in range(1, len(text)):
        assert read([text[:at], text[at:]], dialect) == whole


@pytest.mark.parametrize("dialect", ["llama3-json", "llama-pythonic"])
def test_a_family_that_writes_calls_without_markers_may_wrap_them_too(dialect: str) -> None:
    for text in (f"```json\n{WEATHER}\n```", f"<tools>{WEATHER}</tools>"):
        for pieces in ([text], [*text]):
            message = read(pieces, dialect)
            assert [call.name for call in message.tool_calls] == ["weather"]
            assert not message.content
    code = f"```python\ncall = {WEATHER}\n```"
    assert read([*code], dialect).content == code


def test_its_arguments_are_as_they_were_written() -> None:
    [call] = read([BY_WORDS]).tool_calls
    assert call.arguments == '{"city": "a } <tool_call> ``` </tools> \\" b"}'


def test_it_may_follow_reasoning_and_nothing_else() -> None:
    after = read([f"<think>\nI look.\n</think>\n\n{WEATHER}"])
    assert (after.reasoning, after.content, len(after.tool_calls)) == ("I look.", "", 1)
    assert read(["I look.\n</think>\n\n", *WEATHER], opens_in=Channel.ANALYSIS) == after
    wrapped = f"<tool_call>\n{CLOCK}\n</tool_call>"
    assert [call.name for call in read([wrapped + WEATHER]).tool_calls] == ["clock"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('{"c', '{"c'),
        ('{"name": "Oslo"', '{"name": "Oslo"'),
        ('{"n', ""),
        ("[3", "[3"),
        ("```py", "```py"),
        ("```json\n{", ""),
        ("<tr", "<tr"),
        (f"{WEATHER}\n.", f"{WEATHER}\n."),
    ],
)
def test_text_is_shown_at_the_first_character_that_is_no_calls(text: str, shown: str) -> None:
    _, events = feed([*text])
    assert "".join(event.text for event in events if isinstance(event, ContentDelta)) == shown


def test_a_call_that_the_limit_cut_is_none() -> None:
    cut = read([WEATHER[:-8]], ended_by="length")
    assert [call.complete for call in cut.tool_calls] == [False]
    assert (cut.content, cut.finish) == ("", "length")


def test_what_is_held_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unwrapped, "MAX_LENGTH", 200)
    long = WEATHER.replace("Oslo", "o" * 200)
    parser, events = feed([*long])
    assert "".join(event.text for event in events if isinstance(event, ContentDelta)) == long
    assert fold([*events, *parser.close()]).content == long


def test_without_offered_tools_or_where_it_is_not_wanted_json_is_text() -> None:
    for tools in (ToolSet([], unwrapped=True), ToolSet(None, unwrapped=True), ToolSet(["weather"])):
        parser = ChannelParser("hermes-json", tools=tools)
        assert fold([*parser.feed(WEATHER), *parser.close()]).content == WEATHER
