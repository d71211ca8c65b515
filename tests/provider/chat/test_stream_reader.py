"""StreamReader on the streams of every server: all their shapes, and every way to split them."""

from __future__ import annotations

import tomllib
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from dify_mlx_provider.chat import stream_reader as chunks_module
from dify_mlx_provider.chat import tool_calls as calls_module
from dify_mlx_provider.chat.stream_reader import StreamReader, iter_text
from dify_mlx_provider.chat.think_block import ThinkBlockWriter
from dify_mlx_provider.chat.tool_calls import ToolCallAssembler
from dify_mlx_provider.upstream.errors import Unavailable
from mlx_backend.conversation.events import ContentDelta, ReasoningDelta
from mlx_backend.conversation.parser import parse_text

BLOCK = "<think>\nwhy\n</think>\n\nHi"


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def dify_text(
    *deltas: dict[str, Any], finish: str = "stop", reader: StreamReader | None = None, tools: Any = ()
) -> str:
    """The text Dify gets for a stream of deltas."""
    reader = reader or StreamReader(tools)
    stream = [*(chunk(**delta) for delta in deltas), chunk(finish)]
    return "".join(iter_text(reader, ThinkBlockWriter(), stream))


def cut(text: str, *positions: int) -> list[dict[str, Any]]:
    """A text as content deltas, split at some positions."""
    edges = [0, *positions, len(text)]
    return [{"content": text[start:end]} for start, end in pairwise(edges)]


# -- names and shapes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reasoning",
    [
        {"reasoning_content": "why"},
        {"reasoning": "why"},
        {"thinking": "why"},
        {"reasoning_text": "why"},
        {"thinking_blocks": [{"type": "thinking", "thinking": "why", "signature": "x"}]},
        {"reasoning": {"content": "why"}},
        {"reasoning": "why", "reasoning_details": [{"type": "reasoning.text", "text": "why"}]},
        {
            "reasoning_details": [
                {"type": "reasoning.text", "text": "w"},
                {"type": "reasoning.summary", "summary": "hy"},
            ]
        },
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "why"}]}]},
        {"content": None, "reasoning_content": "why", "tool_calls": None},
    ],
)
def test_reasoning_is_found_under_each_of_its_names(reasoning: dict[str, Any]) -> None:
    assert dify_text(reasoning, {"content": "Hi"}) == BLOCK
    assert dify_text({**reasoning}, {}, {"content": [{"type": "text", "text": "Hi"}]}) == BLOCK


NOTHING: list[dict[str, Any]] = [
    {}, {"role": "assistant"}, {"content": ""}, {"content": None}, {"reasoning_content": ""}, {"content": "\n"},
    {"content": "", "reasoning_content": None, "tool_calls": []}, {"content": []}, {"reasoning": {}}, {"role": None},
]  # fmt: skip


@pytest.mark.parametrize("nothing", NOTHING)
def test_an_empty_delta_never_splits_a_block(nothing: dict[str, Any]) -> None:
    deltas: list[dict[str, Any]] = [
        {"reasoning_content": "w"}, {"reasoning_content": "h"}, {"reasoning_content": "y"}, {"content": "Hi"}
    ]  # fmt: skip
    for position in range(1, len(deltas)):
        assert dify_text(*deltas[:position], nothing, *deltas[position:]) == BLOCK


@pytest.mark.parametrize(
    "odd",
    [
        {"choices": None}, {"choices": []}, {"choices": "x"}, {"choices": [None, 3]}, {"usage": None}, {"usage": {}},
        {"choices": [{"delta": None}]}, {"choices": [{"index": 0}]},
        {"choices": [{"index": 1, "delta": {"content": "x"}}]},
        {"choices": [{"delta": {"content": 5, "reasoning": True, "tool_calls": "x", "function_call": 1}}]},
        {"choices": [{"delta": {"tool_calls": [None, "x", {}, {"index": None, "function": None}]}}]},
    ],
)  # fmt: skip
def test_fields_of_wrong_types_are_ignored(odd: dict[str, Any]) -> None:
    reader = StreamReader()
    stream = [
        odd,
        chunk(reasoning="why"),
        odd,
        chunk(content="Hi"),
        odd,
        {"usage": {"prompt_tokens": 3}},
        odd,
    ]
    assert "".join(iter_text(reader, ThinkBlockWriter(), stream)) == BLOCK
    assert reader.result.usage == {"prompt_tokens": 3}
    assert reader.result.calls == []


def test_a_message_is_read_instead_of_deltas_but_not_after_them() -> None:
    message = {
        "choices": [{"index": 0, "message": {"reasoning": "why", "content": "Hi"}, "finish_reason": "stop"}]
    }
    assert "".join(iter_text(StreamReader(), ThinkBlockWriter(), [message])) == BLOCK
    stream = [chunk(reasoning="why"), chunk(content="Hi"), message]
    assert "".join(iter_text(StreamReader(), ThinkBlockWriter(), stream)) == BLOCK


@pytest.mark.parametrize("start", ["a", "analysis", "<", "<|chan", "[THI", "<think>why</th"])
def test_a_possible_marker_is_not_overtaken_by_the_next_field(start: str) -> None:
    expected = {"<think>why</th": "why</th"}.get(start, start)
    text = dify_text({"reasoning": start}, {"content": "Hi"})
    assert text.replace("\u200b", "") == f"<think>\n{expected}\n</think>\n\nHi"
    first = dify_text({"content": start}, {"reasoning": "why"}, {"content": "Hi"})
    assert first.index("Hi") > first.index("why")
    if not start.startswith("<think>"):
        assert first.index(start) < first.index("why")


def test_an_answer_without_an_end_is_stopped_and_its_block_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks_module, "MAX_ANSWER_LENGTH", 100)
    pieces: list[str] = []
    with pytest.raises(Unavailable, match="more than 100 characters"):
        pieces.extend(iter_text(StreamReader(), ThinkBlockWriter(), [chunk(reasoning="loop ")] * 1000))
    assert len("".join(pieces)) < 200
    assert "".join(pieces).endswith("\n</think>")


@pytest.mark.parametrize("marker", ["</think>", "<tool_call>", "<|end|>"])
def test_an_answer_full_of_possible_markup_is_not_split_at_each(marker: str) -> None:
    text = "Behind <think> " + f"see {marker} " * 1000
    pieces = list(iter_text(StreamReader(), ThinkBlockWriter(), [chunk("stop", content=text)]))
    assert "".join(pieces) == text.replace("<think", "<\u200bthink").replace("</think", "<\u200b/think")
    assert len(pieces) < 4


def test_a_large_piece_is_split_into_chunks_that_dify_accepts() -> None:
    pieces = list(iter_text(StreamReader(), ThinkBlockWriter(), [chunk("stop", content="x" * 1_000_000)]))
    assert max(map(len, pieces)) <= 2**18
    assert len("".join(pieces)) == 1_000_000


def test_surrogate_halves_are_joined_and_a_lone_half_is_replaced() -> None:
    assert dify_text({"content": "a\ud83d"}, {}, {"content": "\ude00b"}) == "a😀b"
    assert dify_text({"reasoning": "\ud83d"}, {"reasoning": "\ude00"}, {"content": "Hi"}) == (
        "<think>\n😀\n</think>\n\nHi"
    )
    assert dify_text({"content": "\ude00 \ud83d"}, {"content": "x\ud83d"}) == "\ufffd \ufffdx"
    reader = StreamReader()
    dify_text({"tool_calls": [{"function": {"name": "f", "arguments": '{"a": "\ud83d'}}]},
          {"tool_calls": [{"function": {"arguments": '\ude00\ud83d"}'}}]}, reader=reader)  # fmt: skip
    assert [call.arguments for call in reader.result.calls] == ['{"a": "😀\ufffd"}']


def test_calls_without_an_end_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "MAX_CALLS_LENGTH", 100)
    endless = [chunk(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": "loop "}}])] * 1000
    with pytest.raises(Unavailable, match="tool calls have more than 100 characters"):
        list(iter_text(StreamReader(), ThinkBlockWriter(), endless))


# -- leaks -------------------------------------------------------------------------------------------

LEAKS = {
    "harmony": "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>",
    "harmony after the prompt": "<|start|>assistant<|channel|>analysis<|message|>why<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Hi",
    "harmony without its markers": "analysisWhy not?assistantfinalHi",
    "think": "<think>\nwhy\n</think>\n\nHi",
    "think after white space": "\n\n<think>why</think>Hi",
    "another word for it": "<thinking>why</thinking>Hi",
    "brackets": "[THINK]why[/THINK]Hi",
    "think without an end": "<think>why",
    "end marker": "Hi there<|im_end|>",
    "end marker of harmony": "Hi there<|return|>",
    "a turn after the answer": "One.<|end|><|start|>assistant<|channel|>final<|message|>Two.",
}
READ = {
    "harmony without its markers": "<think>\nWhy not?\n</think>\n\nHi",
    "think without an end": "<think>\nwhy\n</think>",
    "end marker": "Hi there",
    "end marker of harmony": "Hi there",
    "a turn after the answer": "One.Two.",
}


@pytest.mark.parametrize("name", LEAKS)
def test_leaked_markup_is_parsed_the_same_however_it_is_split(name: str) -> None:
    leak, expected = LEAKS[name], READ.get(name, BLOCK)
    for positions in (
        combinations(range(1, len(leak)), 2) if len(leak) < 40 else ((at,) for at in range(len(leak)))
    ):
        assert dify_text(*cut(leak, *positions)) == expected
    assert dify_text(*cut(leak, *range(1, len(leak)))) == expected


def test_markup_in_the_reasoning_field_is_parsed() -> None:
    assert dify_text({"reasoning_content": "<think>\nwhy"}, {"content": "Hi"}) == BLOCK
    assert dify_text({"reasoning_content": "<think>why</think>Hi"}) == BLOCK
    assert dify_text({"reasoning": "<|channel|>analysis<|message|>why"}, {"content": "Hi"}) == BLOCK


TEXTS = [
    "The tag `<think>` begins it.",
    "In code:\n```\n<|start|>assistant<|channel|>final<|message|>x\n</think>\n<tool_call>\n```\nDone.",
    'Write "<|channel|>analysis" first.',
    "A header is <|channel|>final and then a text.",
    "Analysis of the matter: analysis",
    "analysis of the matter",
    "finalScore = 10",
    "final关键字",
    "commentary",
    "commentary关键字",
    "commentary on it: commentaryHi",
    "Write `commentary to=functions.clock` first.",
    "a < b, <| and <|x|>",
    "Use `</think>` to end it.",
    "Open with <think> and close with </think>.",
]


@pytest.mark.parametrize("text", TEXTS)
def test_an_answer_that_talks_about_markup_stays_as_it_is(text: str) -> None:
    for at in range(len(text)):
        assert dify_text(*cut(text, at), tools=["clock"]).replace("\u200b", "") == text


@pytest.mark.parametrize(
    "text",
    ["Hi <|start|>assistant<|channel|>final<|message|>x", "so </think> it", "Hi<|im_end|>"],
)
def test_markup_is_text_from_a_server_known_to_separate(text: str) -> None:
    assert dify_text({"content": text}, reader=StreamReader(scan=False)).replace("\u200b", "") == text


def test_a_closing_tag_that_was_opened_in_the_prompt_is_noticed_and_removed() -> None:
    text = "I wonder.\n</think>\n\nHi"
    for at in range(len(text)):
        reader = StreamReader()
        assert dify_text(*cut(text, at), reader=reader) == "I wonder.\n\n\nHi"
        assert reader.started_in_reasoning is True


def test_an_answer_may_start_inside_a_block() -> None:
    text = "why\n</think>\n\nHi"
    for at in range(len(text)):
        assert dify_text(*cut(text, at), reader=StreamReader(starts_in_reasoning=True)) == BLOCK


def test_an_answer_expected_to_start_inside_a_block_may_be_all_answer() -> None:
    assert dify_text({"content": "Hi"}, reader=StreamReader(starts_in_reasoning=True)).endswith(
        "</think>\n\nHi"
    )
    assert (
        dify_text({"reasoning": "why"}, {"content": "Hi"}, reader=StreamReader(starts_in_reasoning=True))
        == BLOCK
    )
    assert (
        dify_text({"content": "why"}, reader=StreamReader(starts_in_reasoning=True), finish="length")
        == "<think>\nwhy\n</think>"
    )


CASES = Path(__file__).parents[2] / "conversation" / "cases"


@pytest.mark.parametrize("file", ["valid.toml", "malformed.toml"])
def test_every_recorded_turn_is_parsed_as_our_own_server_parses_it(file: str) -> None:
    turns = [case["raw"] for case in tomllib.loads((CASES / file).read_text())["case"] if "raw" in case]
    turns = [turn for turn in turns if turn.startswith(("<|channel|>", "<|start|>"))]
    assert len(turns) > 10
    for turn in turns:
        message = parse_text(turn)
        reader = StreamReader()
        events = [event for letter in turn for event in reader.feed(chunk(content=letter))] + reader.close()
        assert (
            "".join(event.text for event in events if isinstance(event, ReasoningDelta)) == message.reasoning
        )
        assert "".join(event.text for event in events if isinstance(event, ContentDelta)) == message.content
        whole = [call.name for call in message.tool_calls if call.complete]
        assert [call.name for call in reader.result.calls] == whole


# -- calls -------------------------------------------------------------------------------------------


def calls(*pieces: dict[str, Any], cut_off: bool = False) -> list[tuple[str, str]]:
    made = ToolCallAssembler()
    for piece in pieces:
        made.add_delta(piece)
    finished = made.finish(cut=cut_off)
    assert len({call.id for call in finished}) == len(finished)
    assert all(call.id for call in finished)
    return [(call.name, call.arguments) for call in finished]


def piece(name: str | None = None, arguments: Any = None, **more: Any) -> dict[str, Any]:
    return {**more, "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("written", "called"),
    [
        ("functions.current_time", "current_time"),
        ("default_api:current_time", "current_time"),
        ("Current-Time", "current_time"),
        ("functions.other", "functions.other"),
    ],
)
def test_a_call_goes_to_the_tool_that_was_offered_whatever_stands_before_its_name(
    written: str, called: str
) -> None:
    reader = StreamReader([{"type": "function", "function": {"name": "current_time"}}], scan=False)
    reader.feed(chunk(tool_calls=[piece(written, "{}", index=0)]))
    reader.close()
    assert [call.name for call in reader.result.calls] == [called]


def test_calls_that_all_have_index_0_are_kept_apart() -> None:
    both = [("clock", '{"a": 1}'), ("clock", '{"a": 2}')]
    whole = [piece(*both[0], index=0, id="x"), piece(*both[1], index=0, id="y")]
    assert calls(*whole) == both
    assert calls(*(piece(*call, index=0) for call in both)) == both
    assert calls(*(piece("clock", part, index=0) for part in ("{'a': 1}", '{"a": 2,}'))) == both


def test_a_name_repeated_in_every_piece_is_one_call() -> None:
    pieces = ["", '{"zo', 'ne": ', '"UTC"}']
    assert calls(*(piece("clock", part, index=0, id="x") for part in pieces)) == [
        ("clock", '{"zone": "UTC"}')
    ]
    assert calls(*(piece("clock", part, index=0) for part in pieces)) == [("clock", '{"zone": "UTC"}')]
    assert calls(*(piece("clock", part) for part in pieces[1:])) == [("clock", '{"zone": "UTC"}')]


def test_a_name_in_pieces_is_one_name() -> None:
    assert calls(piece("cl", index=0), piece("ock", index=0), piece(None, "{}", index=0)) == [("clock", "{}")]


def test_interleaved_pieces_without_an_index_go_to_the_call_of_their_id() -> None:
    made = calls(
        piece("a", '{"x"', id="1"),
        piece("b", "{", id="2"),
        piece(None, ": 1}", id="1"),
        piece(None, "}", id="2"),
    )
    assert made == [("a", '{"x": 1}'), ("b", "{}")]


def test_two_calls_with_one_id_get_two() -> None:
    assert len(calls(piece("a", "{}", index=0, id="call_0"), piece("b", "{}", index=1, id="call_0"))) == 2


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        (None, "{}"),
        ("", "{}"),
        (" ", "{}"),
        ("null", "{}"),
        ({"a": "あ"}, '{"a": "あ"}'),
        ('"{\\"a\\": 1}"', '{"a": 1}'),
        ('{"a": 1}]', '{"a": 1}'),
        ('{"a": 1}\n```', '{"a": 1}'),
        ('{"a": "one\ntwo", "b": "D:\\d", "c": None,}', r'{"a": "one\ntwo", "b": "D:\\d", "c": null}'),
        ("{'a': 'b'}", '{"a": "b"}'),
        ("ls -l", "ls -l"),
        ('{"a": 1} and more', '{"a": 1} and more'),
    ],
)
def test_arguments_are_the_object_that_was_meant(given: Any, arguments: str) -> None:
    assert calls(piece("clock", given, index=0)) == [("clock", arguments)]


def test_a_call_in_openais_older_field_is_a_call() -> None:
    reader = StreamReader()
    dify_text(
        {"function_call": {"name": "clock", "arguments": "{"}},
        {"function_call": {"arguments": "}"}},
        finish="function_call",
        reader=reader,
    )
    assert [(call.name, call.arguments) for call in reader.result.calls] == [("clock", "{}")]
    assert reader.result.finish_reason == "tool_calls"


TOOL_CALL = 'Let me see.\n<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'


def test_a_call_in_the_content_is_a_call_however_it_is_split() -> None:
    for at in range(len(TOOL_CALL)):
        reader = StreamReader(["clock"])
        assert (
            dify_text({"reasoning": "why"}, *cut(TOOL_CALL, at), reader=reader)
            .rstrip()
            .endswith("Let me see.")
        )
        assert [(call.name, call.arguments) for call in reader.result.calls] == [("clock", '{"zone": "UTC"}')]


def test_without_tools_it_is_text() -> None:
    assert "<tool_call>" in dify_text({"content": TOOL_CALL})
