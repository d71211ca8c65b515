"""A family's own markers where they mean nothing: never in the answer, and what they enclose is reasoning.

Models write them though they were told not to reason, close what is closed, and reason again in the middle of an
answer. In code and in quotation marks the answer is about them.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
from conversation_cases import OFFERED, PLAIN_TOKEN, cut

from mlx_backend.conversation.dialects import DIALECTS, Dialect
from mlx_backend.conversation.dialects.block_format import BlockCalls
from mlx_backend.conversation.events import Channel, Event, Message
from mlx_backend.conversation.parser import ChannelParser, fold

if TYPE_CHECKING:
    from collections.abc import Iterator

REASONING = [dialect for dialect in DIALECTS.values() if dialect.blocks]
WITH_CALLS = [
    dialect
    for dialect in DIALECTS.values()
    if isinstance(dialect.calls, BlockCalls)
    and "```" not in dialect.calls.markers  # a fence is Markdown, too
]
# Parts of a marker that are control tokens, where the whole of it is none.
PARTS = re.compile(r"<\|(?:open|close|sep)\|>|<\|channel>")

ANALYSIS, FINAL = Channel.ANALYSIS, Channel.FINAL
# What the prompt has opened, what is written ({o} opens a block and {c} closes it), the reasoning and the answer in it.
OUT_OF_PLACE: list[tuple[Channel | None, str, str, str]] = [
    (FINAL, "Hi.{c}", "", "Hi."),
    (FINAL, "\n\n{c}\n\nHi.", "", "Hi."),
    (FINAL, "{c} {c}\n{c}\n\nHi.{c}\n{c}\n", "", "Hi."),
    (FINAL, "{o}Hm.{c}\n\nHi.", "Hm.", "Hi."),
    (FINAL, "Hi. {o}Hm.{c}Yes.", "Hm.", "Hi. Yes."),
    (FINAL, "Hi.\n\n{o}Hm.{c}\n\nYes.", "Hm.", "Hi.\n\nYes."),
    (FINAL, "Hi.\n{o}Hm.", "Hm.", "Hi."),
    (FINAL, "Hi.\n{c}\n\n\nYes.", "", "Hi.\n\nYes."),
    (None, "{o}A.{c}\n\nHi. {o}B.{c} Yes.\n{o}D.{c}Bye.{c}", "A.\n\nB.\n\nD.", "Hi.  Yes.\nBye."),
    (ANALYSIS, "A.{c}\n\n{c}\n\nHi.{c}", "A.", "Hi."),
    (ANALYSIS, "{o}A.{c}\n\n{o}B.{c}\n\nHi.", "A.\n\nB.", "Hi."),
    (ANALYSIS, "A.{c} Hi.\n{o}{o}B.{c}{c}\nYes.", "A.\n\nB.", " Hi.\n\nYes."),
]
TALKED_ABOUT = [
    "It is `{o}`, then `{c}`.",
    "``{o}`` or `` ` {c}``.",
    "As here:\n```html\n{o}Hm.\n{c}\n```\nYes.",
    "````md\n```\n{c}\n```\n{o}\n````\nYes.",
    "~~~\n{o}Hm.{c}\n~~~\nYes.",
    "It is \"{o}\", then '{c}'. Or ({o}) and “{c}”.",
    '{"tag": "{o} a \\"b\\" {c}", "n": [1]}',
]


def written(dialect: Dialect, text: str) -> str:
    opener, closer = next(iter(dialect.blocks.items()))
    return text.replace("{o}", opener).replace("{c}", closer)


def read(dialect: Dialect, opens_in: Channel | None, fed: list[str] | list[tuple[str, int]]) -> Message:
    return fold(list(_events(dialect, opens_in, fed)))


def _events(
    dialect: Dialect, opens_in: Channel | None, fed: list[str] | list[tuple[str, int]]
) -> Iterator[Event]:
    special = {} if isinstance(fed[0], str) else {at: text for text, at in _ids(dialect).items()}
    parser = ChannelParser(dialect, tools=OFFERED, opens_in=opens_in, special_tokens=special)
    for piece in fed:
        yield from parser.feed(piece) if isinstance(piece, str) else parser.feed(*piece)
    yield from parser.close()


def _ids(dialect: Dialect) -> dict[str, int]:
    texts: set[str] = set()
    for marker in (*dialect.blocks, *dialect.blocks.values()):
        texts.update(PARTS.findall(marker) or [marker])
    return {text: at for at, text in enumerate(sorted(texts))}


def tokens(dialect: Dialect, text: str) -> list[tuple[str, int]]:
    """Cut a text into control tokens and characters."""
    ids = _ids(dialect)
    pieces = re.split(f"({'|'.join(map(re.escape, sorted(ids, key=len, reverse=True)))})", text)
    return [
        each for piece in pieces for each in ([(piece, ids[piece])] if piece in ids else _characters(piece))
    ]


def _characters(text: str) -> list[tuple[str, int]]:
    return [(character, PLAIN_TOKEN) for character in text]


by_dialect = pytest.mark.parametrize("dialect", REASONING, ids=lambda dialect: dialect.name)


@by_dialect
def test_a_marker_out_of_place_is_not_shown_and_what_it_encloses_is_reasoning(dialect: Dialect) -> None:
    for opens_in, template, reasoning, content in OUT_OF_PLACE:
        text = written(dialect, template)
        for pieces in (list(text), *(cut(text, place) for place in range(len(text)))):
            assert read(dialect, opens_in, pieces) == Message(reasoning, content), pieces
        assert read(dialect, opens_in, tokens(dialect, text)) == Message(reasoning, content), text


# Not where one marker ends reasoning and answers: it ends them wherever it stands.
@pytest.mark.parametrize(
    "dialect",
    [each for each in REASONING if not {*each.blocks.values()} & {*each.answers.values()}],
    ids=lambda dialect: dialect.name,
)
def test_a_marker_that_the_answer_is_about_is_shown(dialect: Dialect) -> None:
    for text in (written(dialect, template) for template in TALKED_ABOUT):
        for opens_in in (None, FINAL):
            for pieces in (list(text), *(cut(text, place) for place in range(len(text)))):
                assert read(dialect, opens_in, pieces) == Message(content=text), pieces
        assert read(dialect, FINAL, tokens(dialect, text)) == Message(content=text), text


@by_dialect
def test_a_marker_that_plain_tokens_spell_is_text_where_ids_tell(dialect: Dialect) -> None:
    spelt = [marker for marker in next(iter(dialect.blocks.items())) if marker in _ids(dialect)]
    text = f"Hi {' '.join(spelt)} there."
    assert read(dialect, FINAL, _characters(text)) == Message(content=text)


@pytest.mark.parametrize("dialect", REASONING, ids=lambda dialect: dialect.name)
def test_the_marker_of_another_family_is_text(dialect: Dialect) -> None:
    foreign = "<|START_THINKING|>" if dialect.name == "apertus" else "<|inner_prefix|>"
    text = f"Hi {foreign} there."
    assert read(dialect, None, [text]) == Message(content=text)


@pytest.mark.parametrize("dialect", WITH_CALLS, ids=lambda dialect: dialect.name)
def test_what_closes_a_call_is_dropped_where_it_comes_again(dialect: Dialect) -> None:
    assert isinstance(dialect.calls, BlockCalls)
    pieces = dialect.calls.encode("get_weather", {"city": "Rome"})
    call = "".join(piece.text for piece in pieces)
    closers = [
        piece.text for piece in pieces[1:][-2:] if piece.marker and piece.text in dialect.calls.markers
    ]
    text = f"Look.\n{call}" + "".join(f"\n{closer}" for closer in closers * 2) + "\nDone."
    for fed in ([text], list(text)):
        message = read(dialect, FINAL, fed)
        assert [json.loads(each.arguments) for each in message.tool_calls] == [{"city": "Rome"}], text
        assert message.content.split() == ["Look.", "Done."]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<|channel>x<channel|>Hi.", "x", "Hi."),
        ("Hi.<channel|>", "", "Hi."),
        ("Hi. <|channel>thought\n<channel|>", "", "Hi. "),
        ("<|channel>thought\nHm.<channel|><|channel>thought\nYes.<channel|>Hi.", "Hm.\n\nYes.", "Hi."),
    ],
)
def test_a_channel_of_gemma_is_reasoning_whatever_its_name(text: str, reasoning: str, content: str) -> None:
    dialect = DIALECTS["gemma4"]
    for fed in ([text], list(text), tokens(dialect, text)):
        assert read(dialect, None, fed) == Message(reasoning, content)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mistral", "Hi.[/TOOL_CALLS] Yes.[ARGS]"),
        ("kimi-k2", "Hi. <|tool_call_argument_begin|>Yes.<|tool_calls_section_end|>"),
        ("kimi-k3", "Hi.<|sep|> Yes.<|close|>"),
        ("deepseek-v3.1", "Hi. <｜tool▁sep｜>Yes."),
        ("minimax-m3", "Hi. ]<]minimax[>[Yes."),
        ("gemma4", 'Hi.<|"|> Yes.'),
    ],
)
def test_parts_of_markers_alone_are_dropped(name: str, text: str) -> None:
    for fed in ([text], list(text)):
        assert read(DIALECTS[name], FINAL, fed) == Message(content="Hi. Yes.")


@pytest.mark.parametrize("dialect", WITH_CALLS, ids=lambda dialect: dialect.name)
def test_all_of_a_call_is_text_where_there_are_no_tools(dialect: Dialect) -> None:
    assert isinstance(dialect.calls, BlockCalls)
    written = "".join(piece.text for piece in dialect.calls.encode("search", {"query": "x"})).strip()
    for fed in ([written], list(written)):
        parser = ChannelParser(dialect, tools=[], opens_in=FINAL)
        events = [event for piece in fed for event in parser.feed(piece)]
        assert fold([*events, *parser.close()]) == Message(content=written)


EMPTY_PAIRS = [
    ("hermes-json", "<tool_call>\n</tool_call>"),
    ("kimi-k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
    ("deepseek-v3.1", "<｜tool▁calls▁begin｜>\n<｜tool▁calls▁end｜>"),
    ("minimax-m2", "<minimax:tool_call>\n\n</minimax:tool_call>"),
    ("apertus", "<|tools_prefix|>[]<|tools_suffix|>"),
    ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>"),
    ("gemma4", "<|tool_call><tool_call|>"),
]


@pytest.mark.parametrize(("name", "pair"), EMPTY_PAIRS)
def test_markers_without_a_call_between_them_are_not_shown_but_in_code(name: str, pair: str) -> None:
    dialect = DIALECTS[name]
    text = f"Hi.\n{pair}\nYes."
    for pieces in (list(text), *(cut(text, place) for place in range(len(text)))):
        assert read(dialect, FINAL, pieces) == Message(content="Hi.\n\nYes."), pieces
    for text in (f"It is `{pair}`.", f"```\n{pair}\n```\nYes."):
        for pieces in ([text], list(text)):
            assert read(dialect, FINAL, pieces) == Message(content=text), pieces


def test_an_answer_streams_though_a_marker_may_come() -> None:
    for opens_in in (FINAL, None):
        parser = ChannelParser("hermes-json", tools=OFFERED, opens_in=opens_in)
        shown = [fold(parser.feed(text)).content for text in ("One", " `two`", " three", " <thi", "s> five")]
        assert "".join(shown[:-1]) == "One `two` three "
        assert shown[-1] == "<this> five"
