"""When events come: as early as they are certain, each once, and exactly one end."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.conversation.dialects.families.shared import OPENERS
from mlx_backend.conversation.dialects.harmony import HARMONY_TOKENS
from mlx_backend.conversation.dialects.harmony.reader import MAX_STRIPPED
from mlx_backend.conversation.events import (
    Channel,
    ContentDelta,
    EndedBy,
    Event,
    ReasoningDelta,
    StreamEnd,
    ToolCall,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from mlx_backend.conversation.parser import ChannelParser, fold, parse_text
from mlx_backend.conversation.tools import ToolSet

IDS = {text: token for token, text in HARMONY_TOKENS.items()}


def joined(events: list[Event]) -> list[Event]:
    """Join neighbouring deltas, so that streams can be compared."""
    result: list[Event] = []
    for event in events:
        match (result[-1] if result else None), event:
            case ReasoningDelta(before), ReasoningDelta(text):
                result[-1] = ReasoningDelta(before + text)
            case ContentDelta(before, channel), ContentDelta(text, same) if channel is same:
                result[-1] = ContentDelta(before + text, channel)
            case ToolCallDelta(index, before), ToolCallDelta(_, text):
                result[-1] = ToolCallDelta(index, before + text)
            case _:
                result.append(event)
    return result


def fed(parser: ChannelParser, *texts: str) -> list[Event]:
    """Feed texts one by one; neighbouring deltas are joined."""
    return joined([event for text in texts for event in parser.feed(text)])


def test_body_text_streams_at_once() -> None:
    parser = ChannelParser()
    assert fed(parser, "<|channel|>analysis<|message|>") == []
    assert fed(parser, "We ") == [ReasoningDelta("We ")]
    assert fed(parser, "think") == [ReasoningDelta("think")]
    assert fed(parser, "<|end|><|start|>assistant<|channel|>commentary<|message|>") == []
    assert fed(parser, "Let me see") == [ContentDelta("Let me see", Channel.COMMENTARY)]
    assert fed(parser, "<|end|><|start|>assistant<|channel|>final<|message|>") == []
    assert fed(parser, "4") == [ContentDelta("4")]


def test_a_call_starts_with_its_header_and_its_arguments_stream() -> None:
    parser = ChannelParser(tools=["f"])
    assert fed(parser, "<|channel|>commentary to=functions.f <|constrain|>json") == []
    assert fed(parser, "<|message|>") == [ToolCallStart(0, "f")]
    assert fed(parser, '{"a"') == [ToolCallDelta(0, '{"a"')]
    assert fed(parser, ":1}") == [ToolCallDelta(0, ":1}")]
    assert not parser.ended
    assert fed(parser, "<|call|>") == [ToolCallEnd(0)]
    assert parser.ended


@pytest.mark.parametrize("held", ["<", "<|", "<|en", "<|message|"])
def test_only_what_may_become_a_marker_is_held(held: str) -> None:
    parser = ChannelParser()
    fed(parser, "<|channel|>final<|message|>")
    assert fed(parser, f"a {held}") == [ContentDelta("a ")]
    assert fed(parser, "x") == [ContentDelta(f"{held}x")]
    parser.feed(held)
    assert parser.close() == [ContentDelta(held), StreamEnd("stop")]


def test_with_token_ids_nothing_is_held_in_a_body() -> None:
    parser = ChannelParser()
    for text in ("<|channel|>", "final", "<|message|>"):
        parser.feed(text, IDS.get(text, 1))
    assert parser.feed("a <|end", 1) == [ContentDelta("a <|end")]
    assert parser.feed("|>", 1) == [ContentDelta("|>")]


def test_an_answer_without_any_markup_streams_from_its_first_character() -> None:
    assert fed(ChannelParser(), '{"sta') == [ContentDelta('{"sta')]
    assert fed(ChannelParser(), "The") == [ContentDelta("The")]
    parser = ChannelParser()
    assert fed(parser, "a") == []  # may become "assistant" or "analysis"
    assert fed(parser, "n a") == [ContentDelta("an a")]


def test_a_body_without_message_marker_streams_from_its_brace_on() -> None:
    parser = ChannelParser()
    assert fed(parser, '<|channel|>final {"answer"') == [ContentDelta('{"answer"')]
    parser = ChannelParser()
    assert fed(parser, "<|channel|>commentary to=functions.f json") == []
    assert fed(parser, '{"a"') == [ToolCallStart(0, "f"), ToolCallDelta(0, '{"a"')]


def test_prose_without_message_marker_streams_once_it_is_longer_than_header_noise() -> None:
    parser = ChannelParser()
    parser.feed("<|channel|>analysis ")
    early = [len(parser.feed("so on ")) for _ in range(40)]
    assert early.index(1) <= 15
    assert early[early.index(1) :] == [1] * (40 - early.index(1))


@pytest.mark.parametrize("noise", ["word ", "to=", "commentary ", "<|constrain|>", "x"])
@pytest.mark.parametrize(
    "opening", ["<|channel|>", "<|start|>assistant", "<|channel|>analysis to=functions.f ", ""]
)
def test_a_header_that_never_ends_is_bounded_and_its_text_is_not_lost(opening: str, noise: str) -> None:
    parser = ChannelParser()
    fed(parser, opening, noise * 300)
    assert any(not isinstance(event, StreamEnd) for event in parser.feed("and then the text"))


def test_stripped_reasoning_waits_for_its_end_and_no_longer_than_the_limit() -> None:
    parser = ChannelParser()
    assert fed(parser, "analysisWe need") == []
    assert fed(parser, " it.assistantfinal") == [ReasoningDelta("We need it.")]
    assert fed(parser, "4") == [ContentDelta("4")]
    parser = ChannelParser()
    long = "analysisWe need" + " more" * MAX_STRIPPED
    assert fold(fed(parser, *(long[at : at + 1000] for at in range(0, len(long), 1000)))).content == long


def test_prose_that_begins_with_a_channels_word_does_not_wait() -> None:
    assert fed(ChannelParser(), "analysis of") == [ContentDelta("analysis of")]
    assert fed(ChannelParser(), "finally, ") == [ContentDelta("finally, ")]


def test_a_think_block_streams_and_so_does_the_answer() -> None:
    parser = ChannelParser("think")
    assert fed(parser, "<think>\n") == []
    assert fed(parser, "We") == [ReasoningDelta("We")]
    assert fed(parser, " think\n") == [ReasoningDelta(" think")]
    assert fed(parser, "so") == [ReasoningDelta("\nso")]
    assert fed(parser, "</think>", "\n\n") == []
    assert fed(parser, "Four <thi") == [ContentDelta("Four ")]
    assert fed(parser, "s <tool") == [ContentDelta("<this ")]
    assert fed(parser, "s") == [ContentDelta("<tools")]


def test_a_character_split_over_tokens_is_neither_lost_nor_repeated() -> None:
    parser = ChannelParser()
    events = []
    for text, token in [("<|channel|>", 200005), ("final", 17196), ("<|message|>", 200008)]:
        events += parser.feed(text, token)
    for text in ("a", "", "", "👋", "", "\ufffd", "z"):
        events += parser.feed(text, 1)
    assert fold(events).content == "a👋\ufffdz"


def test_the_end_comes_once_and_nothing_after_it() -> None:
    parser = ChannelParser()
    parser.feed("Hi")
    assert parser.close("length") == [StreamEnd("length")]
    assert parser.close() == []
    assert fed(parser, "more") == []
    assert parser.feed("<|end|>", 200007) == []


@pytest.mark.parametrize("marker", ["<|return|>", "<|call|>", "<|endoftext|>"])
def test_a_turn_that_ended_hears_no_more(marker: str) -> None:
    parser = ChannelParser()
    fed(parser, "<|channel|>final<|message|>ok")
    assert not parser.ended
    assert fed(parser, marker) == []
    assert parser.ended
    assert fed(parser, "more", "<|channel|>final<|message|>more") == []
    assert parser.close("length") == [StreamEnd("stop")]


def test_an_invented_user_ends_the_turn() -> None:
    parser = ChannelParser()
    fed(parser, "<|channel|>final<|message|>ok<|end|><|start|>user")
    assert not parser.ended
    assert fed(parser, "<|message|>") == []
    assert parser.ended


def test_a_cut_call_is_not_complete() -> None:
    message = parse_text("<|channel|>commentary to=functions.f<|message|>{", ended_by="length")
    assert message.tool_calls == (ToolCall("f", "{", complete=False),)
    assert message.finish == "length"


def test_another_tokenizers_ids_are_used_where_they_are_given() -> None:
    tokens = {7: "<|channel|>", 8: "<|message|>", 9: "<|return|>", 11: "<|reserved_1|>"}
    parser = ChannelParser(special_tokens=tokens)
    stream = [("<|channel|>", 7), ("final", 1), ("<|message|>", 8), ("<|return|>", 2), ("<|reserved_1|>", 11)]
    events = [event for text, token in stream for event in parser.feed(text, token)]
    assert fold(events).content == "<|return|>"
    parser.feed("<|return|>", 9)
    assert parser.ended


def test_a_marker_that_is_no_control_token_of_the_tokenizer_counts_by_its_text() -> None:
    parser = ChannelParser("think", special_tokens={5: "<|im_end|>"})
    stream = [("<thi", 1), ("nk>", 1), ("so", 1), ("</think>", 1), ("4", 1), ("<|im_end|>", 5)]
    events = [event for text, token in stream for event in parser.feed(text, token)]
    assert events == [ReasoningDelta("so"), ContentDelta("4")]
    assert parser.ended


def test_a_marker_that_is_a_control_token_counts_by_its_id_alone() -> None:
    parser = ChannelParser("think", special_tokens={1: "<think>", 2: "</think>"})
    stream = [("<think>", 1), ("not </think> yet", 9), ("</think>", 2), ("4", 9)]
    events = [event for text, token in stream for event in parser.feed(text, token)]
    assert events == [ReasoningDelta("not </think> yet"), ContentDelta("4")]


def test_plain_text_has_no_markup() -> None:
    message = parse_text("<think>a</think> <|channel|>final", "plain")
    assert message.content == "<think>a</think> <|channel|>final"


# Anything at all may come out of a model.

HARMONY_PARTS = [
    *(*IDS, *IDS),
    *(
        "assistant",
        "analysis",
        "commentary",
        "final",
        "to=",
        "functions.",
        "f",
        "Web Search",
        "json",
        " ",
        "\n",
    ),
    *(
        "{",
        '"a":1}',
        "[1]",
        "user",
        "system",
        "tool",
        "the end",
        "<",
        "|",
        ">",
        "<|",
        "?",
        "364",
        "code",
        "x",
        "ü",
    ),
    *(
        "assistantfinal",
        "thinking",
        "=",
        " to=functions.f ",
        "Hello world. ",
        "😀",
        "\x00",
        "\ud800",
        "a b " * 90,
    ),
]
THINK_PARTS = [
    *(
        *OPENERS,
        *OPENERS.values(),
        "<tool_call>",
        "</tool_call>",
        '{"name":"f","arguments":{}}',
        "<|im_end|>",
    ),
    *("\n", " ", "think", "<", "/", "◁", "[", "Hello", '"name":"g"', "\ud800", "\n" * 40),
]


def check_order(events: list[Event]) -> None:
    """Calls are counted from 0, opened before they are fed, closed once, and nothing comes in between."""
    opened, calls = None, 0
    for event in events[:-1]:
        match event:
            case ToolCallStart(index):
                assert opened is None
                assert index == calls
                opened, calls = index, calls + 1
            case ToolCallDelta(index, text):
                assert index == opened
                assert text
            case ToolCallEnd(index):
                assert index == opened
                opened = None
            case ReasoningDelta(text) | ContentDelta(text):
                assert opened is None
                assert text
            case StreamEnd():
                raise AssertionError("an end before the end")
    assert opened is None
    assert isinstance(events[-1], StreamEnd)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("dialect", ["harmony", "think", "plain"])
def test_anything_is_read_without_error_and_cuts_do_not_matter(dialect: str, seed: int) -> None:
    choose = random.Random(seed)
    for _ in range(40):
        parts = choose.choices(
            HARMONY_PARTS if dialect == "harmony" else THINK_PARTS, k=choose.randint(1, 25)
        )
        tools = choose.choice([None, (), ["f", "Web Search"]])
        ended_by = choose.choice(["stop", "length"])
        text = "".join(parts)
        places = sorted(choose.choices(range(len(text) + 1), k=4))
        streams = []
        for pieces in ([text], list(text), [text[a:b] for a, b in pairwise([0, *places, len(text)])]):
            parser = ChannelParser(dialect, tools=tools)
            events = [*fed(parser, *pieces), *parser.close("length" if ended_by == "length" else "stop")]
            check_order(events)
            streams.append(joined(events))
        assert streams[0] == streams[1] == streams[2], parts


@pytest.mark.parametrize("seed", range(8))
def test_anything_is_read_without_error_by_tokens(seed: int) -> None:
    choose = random.Random(seed)
    for _ in range(40):
        parts = choose.choices(HARMONY_PARTS, k=choose.randint(1, 25))
        streams = []
        for tokens in (
            [(part, IDS.get(part, 1)) for part in parts],
            [
                piece
                for part in parts
                for piece in ([(part, IDS[part])] if part in IDS else [(c, 1) for c in part])
            ],
        ):
            parser = ChannelParser()
            events = [event for text, token in tokens for event in parser.feed(text, token)] + parser.close()
            check_order(events)
            streams.append(joined(events))
        assert streams[0] == streams[1], parts


@pytest.mark.parametrize("seed", range(4))
def test_no_body_is_lost_or_shown_twice(seed: int) -> None:
    """Sound bodies in broken frames: every body comes out exactly once, in order."""
    choose = random.Random(seed)
    for _ in range(50):
        text, words = "", []
        for at in range(choose.randint(1, 6)):
            word = f"word{at} of a body"
            words.append(word)
            text += choose.choice(["<|start|>assistant", "<|start|>", "<|start|><|start|>assistant", ""])
            text += choose.choice(
                ["<|channel|>analysis", "<|channel|>finalx", "<|channel|>––commentary json"]
            )
            text += choose.choice(["<|message|>", "<|message|><|message|>", "<|constrain|>json<|message|>"])
            text += word + choose.choice(["<|end|>", "<|end|><|end|>", "", "<|end|> 3 "])
        text = text.removesuffix(" 3 ")  # at the end of a turn it would be an answer
        message = parse_text(text)
        shown = message.reasoning + message.content
        assert [shown.count(word) for word in words] == [1] * len(words), text
        assert len(shown.replace("\n\n", "")) == sum(map(len, words)), text


@pytest.mark.parametrize("ended_by", ["stop", "length"])
@pytest.mark.parametrize(
    "text",
    [
        '[get_weather(city="Paris", daily)]',  # a string that a bracket closes, and no argument follows
        '[get_weather(city="Paris"daily)] and so on',
        "<|python_start|>no call [/ <|python_end|> and so on",  # what may be a call, in text that was none
    ],
)
def test_a_call_that_is_none_is_shown_alike_however_it_is_cut(text: str, ended_by: EndedBy) -> None:
    tools = [{"name": "get_weather"}]
    whole = ChannelParser(DIALECTS["llama-pythonic"], tools=tools)
    message = fold([*whole.feed(text), *whole.close(ended_by)])
    for size in (1, 2, 5):
        parser = ChannelParser(DIALECTS["llama-pythonic"], tools=tools)
        events = [event for at in range(0, len(text), size) for event in parser.feed(text[at : at + size])]
        assert fold([*events, *parser.close(ended_by)]) == message
    assert message.content == text


def test_a_marker_after_json_that_is_no_call_is_one_however_it_is_cut() -> None:
    text = '{"name"]<mm:think>I wonder.</mm:think> So be it.'
    tools = ToolSet([{"name": "get_weather"}], unwrapped=True)
    for size in (1, 3, len(text)):
        parser = ChannelParser(DIALECTS["minimax-m3"], tools=tools)
        events = [event for at in range(0, len(text), size) for event in parser.feed(text[at : at + size])]
        message = fold([*events, *parser.close()])
        assert (message.content, message.reasoning) == ('{"name"] So be it.', "I wonder.")


def test_an_id_with_a_bracket_in_it_does_not_move_the_arguments() -> None:
    text = '[TOOL_CALLS]get_weather[CALL_ID]a1{b2[ARGS]{"city": "Oslo"}'
    whole = parse_text(text, "mistral-ids")
    parser = ChannelParser(DIALECTS["mistral-ids"])
    events = [event for character in text for event in parser.feed(character)]
    assert fold([*events, *parser.close()]) == whole
