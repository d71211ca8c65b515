"""Events in, chunks out; a completion is the fold of the same chunks."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from mlx_backend.api.errors import ApiError
from mlx_backend.api.openai import chat, completions
from mlx_backend.api.openai.stream import ChunkWriter, usage_object
from mlx_backend.api.tools import Tools
from mlx_backend.chat.reply import Usage
from mlx_backend.conversation.events import (
    Channel,
    ContentDelta,
    ReasoningDelta,
    StreamEnd,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from mlx_backend.engine.base import Progress, Queued
from mlx_backend.settings import ReasoningField, ReasoningFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.conversation.events import Event

ANSWER: list[Event] = [
    ReasoningDelta("Capital"),
    ReasoningDelta(" of France."),
    ContentDelta("Paris"),
    ContentDelta("."),
    StreamEnd("stop"),
]
CALL: list[Event] = [
    ReasoningDelta("Look it up."),
    ContentDelta("One moment.", Channel.COMMENTARY),
    ToolCallStart(0, "weather"),
    ToolCallDelta(0, '{"city":'),
    ToolCallDelta(0, '"Oslo"}'),
    ToolCallEnd(0),
    StreamEnd("tool_calls"),
]


USAGE = Usage(10, completion_tokens=4, reasoning_tokens=3, cached_tokens=2, decode_seconds=2.0)


def chat_writer(*, include_usage: bool = False, **options: Any) -> ChunkWriter:
    choice = chat.ChatWriter(call_id=lambda index: f"call_{index}", tools=Tools(), **options)
    return ChunkWriter(chat.FORM, "m", [choice], include_usage=include_usage)


def text_writer() -> ChunkWriter:
    return ChunkWriter(completions.FORM, "m", [completions.TextWriter()])


def streamed(writer: ChunkWriter, events: Sequence[Event]) -> list[dict[str, Any]]:
    """The chunks of a stream, decoded."""
    *most, end = events
    assert isinstance(end, StreamEnd)
    data = writer.open() + b"".join(map(writer.feed, most)) + writer.finish(end, USAGE)
    *sent, done, rest = data.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in sent if not event.startswith(":")]


def deltas_of(events: Sequence[Event], **options: Any) -> list[dict[str, Any]]:
    chunks = streamed(chat_writer(**options), events)
    return [delta for chunk in chunks for choice in chunk["choices"] if (delta := choice["delta"])]


def message_of(events: Sequence[Event], **options: Any) -> dict[str, Any]:
    whole = json.loads(chat_writer(**options).fold(events, USAGE))
    message: dict[str, Any] = whole["choices"][0]["message"]
    return message


def test_each_delta_has_one_key_and_the_role_comes_once() -> None:
    assert deltas_of(ANSWER) == [
        {"role": "assistant"},
        {"reasoning_content": "Capital"},
        {"reasoning_content": " of France."},
        {"content": "Paris"},
        {"content": "."},
    ]


def test_a_completion_is_the_fold_of_its_chunks() -> None:
    assert message_of(ANSWER) == {
        "role": "assistant",
        "content": "Paris.",
        "reasoning_content": "Capital of France.",
    }


@pytest.mark.parametrize(
    ("where", "names"),
    [
        (ReasoningField.REASONING, {"reasoning"}),
        (ReasoningField.BOTH, {"reasoning", "reasoning_content"}),
    ],
)
def test_the_reasoning_field_can_be_chosen(where: ReasoningField, names: set[str]) -> None:
    message = message_of(ANSWER, reasoning_field=where)
    assert message.keys() - {"role", "content"} == names
    assert {message[name] for name in names} == {"Capital of France."}


def test_a_tool_call_is_named_once_and_its_arguments_are_sent_as_they_come() -> None:
    assert [delta["tool_calls"] for delta in deltas_of(CALL) if "tool_calls" in delta] == [
        [{"index": 0, "id": "call_0", "type": "function", "function": {"name": "weather", "arguments": ""}}],
        [{"index": 0, "function": {"arguments": '{"city":'}}],
        [{"index": 0, "function": {"arguments": '"Oslo"}'}}],
    ]


def test_a_whole_reply_has_the_calls_joined() -> None:
    second: list[Event] = [ToolCallStart(1, "now"), ToolCallDelta(1, "{}"), ToolCallEnd(1)]
    message = message_of([*CALL[:-1], *second, CALL[-1]])
    assert message["content"] == "One moment."
    assert message["tool_calls"] == [
        {
            "id": "call_0",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city":"Oslo"}'},
        },
        {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]


def test_a_message_with_calls_only_has_null_content() -> None:
    assert message_of([ToolCallStart(0, "f"), ToolCallEnd(0), StreamEnd("tool_calls")])["content"] is None


def test_a_call_cut_by_the_limit_stays_open_in_a_stream_and_is_left_out_of_a_whole_reply() -> None:
    cut: list[Event] = [
        ToolCallStart(0, "f"),
        ToolCallDelta(0, '{"a'),
        ToolCallEnd(0, complete=False),
        StreamEnd("length"),
    ]
    pieces = [call["function"]["arguments"] for delta in deltas_of(cut)[1:] for call in delta["tool_calls"]]
    assert pieces == ["", '{"a']
    assert message_of(cut) == {"role": "assistant", "content": ""}


def test_think_puts_the_reasoning_into_the_content_with_each_tag_a_chunk() -> None:
    contents = [d["content"] for d in deltas_of(ANSWER, reasoning_format=ReasoningFormat.THINK)[1:]]
    assert contents == ["<think>\n", "Capital", " of France.", "\n</think>\n\n", "Paris", "."]


@pytest.mark.parametrize("events", [[ReasoningDelta("cut"), StreamEnd("length")], CALL[:1] + CALL[2:]])
def test_an_open_think_block_is_always_closed(events: list[Event]) -> None:
    content = message_of(events, reasoning_format=ReasoningFormat.THINK)["content"]
    assert content.startswith("<think>\n")
    assert content.endswith("\n</think>\n\n")


@pytest.mark.parametrize("cut", range(1, len("a </think> b <thi")))
def test_a_tag_inside_the_reasoning_cannot_end_the_block(cut: int) -> None:
    text = "a </think> b <thi"
    events: list[Event] = [
        ReasoningDelta(text[:cut]),
        ReasoningDelta(text[cut:]),
        ContentDelta("c"),
        StreamEnd("stop"),
    ]
    message = message_of(events, reasoning_format=ReasoningFormat.THINK)
    assert message["content"] == "<think>\na ‹/think> b <thi\n</think>\n\nc"


def test_details_escapes_and_quotes_the_reasoning() -> None:
    events: list[Event] = [ReasoningDelta("1 < 2\nso </details>"), ContentDelta("yes"), StreamEnd("stop")]
    assert message_of(events, reasoning_format=ReasoningFormat.DETAILS)["content"] == (
        '<details type="reasoning" done="true">\n<summary>Thought</summary>\n'
        "> 1 &lt; 2\n> so &lt;/details&gt;\n</details>\n\nyes"
    )


def test_hidden_reasoning_is_not_sent() -> None:
    assert message_of(ANSWER, reasoning_format=ReasoningFormat.HIDDEN) == {
        "role": "assistant",
        "content": "Paris.",
    }


@pytest.mark.parametrize(
    ("writer", "name"), [(chat_writer, "chat.completion.chunk"), (text_writer, "text_completion")]
)
def test_every_chunk_has_the_same_head(writer: Any, name: str) -> None:
    one = writer()
    heads = {
        json.dumps({key: value for key, value in chunk.items() if key not in ("choices", "timings")})
        for chunk in streamed(one, ANSWER)
    }
    [head] = heads
    assert json.loads(head)["id"] == one.id
    assert json.loads(head)["object"] == name


def test_a_chat_chunk_has_one_choice_with_its_delta() -> None:
    chunks = streamed(chat_writer(), CALL)
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "delta": delta, "finish_reason": None}] for delta in deltas_of(CALL)
    ] + [[{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]]


def test_usage_has_a_chunk_of_its_own_and_timings_come_last() -> None:
    *_, finish, last = streamed(chat_writer(include_usage=True), ANSWER)
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert "usage" not in finish
    assert "timings" not in finish
    assert last["choices"] == []
    assert last["usage"] == usage_object(USAGE)
    assert last["timings"]["predicted_per_second"] == 2.0
    *_, only = streamed(chat_writer(), ANSWER)
    assert only["timings"]["predicted_n"] == 4
    assert "usage" not in only


def test_timings_say_how_many_tokens_were_drafted_and_accepted_if_any_were() -> None:
    whole = json.loads(chat_writer().fold(ANSWER, USAGE))
    assert "draft_n" not in whole["timings"]
    drafted = replace(USAGE, drafted_tokens=8, accepted_tokens=3)
    whole = json.loads(chat_writer().fold(ANSWER, drafted))
    assert (whole["timings"]["draft_n"], whole["timings"]["draft_n_accepted"]) == (8, 3)


def test_a_reply_that_is_not_streamed_always_has_usage_and_timings() -> None:
    whole = json.loads(chat_writer().fold(ANSWER, USAGE))
    assert whole["object"] == "chat.completion"
    assert whole["usage"] == usage_object(USAGE)
    assert whole["timings"]["predicted_n"] == 4


def test_a_text_completion_has_text_and_no_message() -> None:
    events: list[Event] = [ContentDelta("on"), StreamEnd("stop")]
    whole = json.loads(text_writer().fold(events, USAGE))
    assert whole["choices"] == [{"index": 0, "text": "on", "finish_reason": "stop"}]
    text, finish = streamed(text_writer(), events)
    assert text["choices"] == [{"index": 0, "text": "on", "finish_reason": None}]
    assert finish["choices"] == [{"index": 0, "text": "", "finish_reason": "stop"}]


def test_a_stream_without_an_opening_chunk_opens_with_a_comment() -> None:
    assert text_writer().open() == b": accepted\n\n"


def test_a_silence_is_filled_with_comments_that_say_how_far_the_prefill_is() -> None:
    writer = chat_writer()
    assert writer.keepalive() == b": keepalive\n\n"
    assert writer.keepalive(Progress(5, 10)) == b": keepalive 5/10\n\n"
    assert writer.keepalive(Queued(3)) == b": keepalive queued 3\n\n"


def test_an_error_in_mid_stream_is_the_same_object_as_before_it() -> None:
    error = ApiError(503, "Later.", code="engine_failed", numbers={"retry_after": 1})
    event = chat_writer().error(error)
    assert json.loads(event.removeprefix(b"data: ")) == {
        "error": {
            "message": "Later.",
            "type": "server_error",
            "param": None,
            "code": "engine_failed",
            "retry_after": 1,
        }
    }
