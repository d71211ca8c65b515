"""Events in, chunks out; a completion is the fold of the same chunks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from mlx_backend.api.openai.stream import ChatWriter, Chunk, Envelope, TextWriter, last_chunks, usage_object
from mlx_backend.chat.usage import Usage
from mlx_backend.conversation.events import (
    Channel,
    ContentDelta,
    ReasoningDelta,
    StreamEnd,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
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


def chunks_of(events: Sequence[Event], **options: Any) -> list[Chunk]:
    writer = ChatWriter(call_id=lambda index: f"call_{index}", **options)
    return [*writer.open(), *(chunk for event in events for chunk in writer.feed(event))]


def deltas_of(events: Sequence[Event], **options: Any) -> list[dict[str, Any]]:
    return [chunk.delta for chunk in chunks_of(events, **options) if chunk.delta]


def message_of(events: Sequence[Event], **options: Any) -> dict[str, Any]:
    whole = Envelope("m", "f", chat=True).whole(chunks_of(events, **options))
    message: dict[str, Any] = whole["choices"][0]["message"]
    return message


def test_each_delta_says_one_thing_and_the_role_comes_once() -> None:
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
def test_the_field_of_the_reasoning_can_be_chosen(where: ReasoningField, names: set[str]) -> None:
    message = message_of(ANSWER, reasoning_field=where)
    assert message.keys() - {"role", "content"} == names
    assert {message[name] for name in names} == {"Capital of France."}


def test_a_tool_call_is_sent_whole_with_its_index_and_id() -> None:
    call = {
        "index": 0,
        "id": "call_0",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city":"Oslo"}'},
    }
    assert deltas_of(CALL)[-1] == {"tool_calls": [call]}
    message = message_of(CALL)
    assert message["content"] == "One moment."
    assert message["tool_calls"] == [{key: call[key] for key in ("id", "type", "function")}]


def test_a_message_of_calls_alone_has_null_content() -> None:
    assert message_of([ToolCallStart(0, "f"), ToolCallEnd(0), StreamEnd("tool_calls")])["content"] is None


def test_a_call_cut_by_the_limit_is_never_sent() -> None:
    cut: list[Event] = [
        ToolCallStart(0, "f"),
        ToolCallDelta(0, '{"a'),
        ToolCallEnd(0, complete=False),
        StreamEnd("length"),
    ]
    assert deltas_of(cut) == [{"role": "assistant"}]
    assert message_of(cut) == {"role": "assistant", "content": ""}


def test_think_puts_the_reasoning_into_the_content_each_tag_a_chunk() -> None:
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


def test_hidden_reasoning_is_nowhere() -> None:
    assert message_of(ANSWER, reasoning_format=ReasoningFormat.HIDDEN) == {
        "role": "assistant",
        "content": "Paris.",
    }


def test_every_chunk_is_the_same_json_whichever_way_it_is_written() -> None:
    envelope = Envelope("m", "f", chat=True)
    for chunk in chunks_of([*ANSWER[:-1], *CALL]):
        data = envelope.sse(chunk)
        assert data.startswith(b"data: ")
        assert data.endswith(b"\n\n")
        written = json.loads(data[6:])
        assert written["object"] == "chat.completion.chunk"
        assert written["id"] == envelope.id
        assert written["choices"] == [{"index": 0, "delta": chunk.delta, "finish_reason": chunk.finish}]


def test_usage_comes_alone_and_timings_come_last() -> None:
    envelope = Envelope("m", "f", chat=True)
    usage = Usage(10, completion_tokens=4, reasoning_tokens=3, cached_tokens=2, decode_seconds=2.0)
    finish, last = (
        json.loads(envelope.sse(chunk)[6:])
        for chunk in last_chunks(Chunk(finish="stop"), usage, include_usage=True)
    )
    assert "usage" not in finish
    assert "timings" not in finish
    assert last["choices"] == []
    assert last["usage"] == usage_object(usage)
    assert last["timings"]["predicted_per_second"] == 2.0
    (only,) = last_chunks(Chunk(finish="stop"), usage, include_usage=False)
    assert json.loads(envelope.sse(only)[6:])["timings"]["predicted_n"] == 4


def test_a_text_completion_has_text_and_no_message() -> None:
    envelope, writer = Envelope("m", "f", chat=False), TextWriter()
    chunks = [*writer.open(), *writer.feed(ContentDelta("on")), *writer.feed(StreamEnd("stop"))]
    assert envelope.whole(chunks)["choices"] == [{"index": 0, "text": "on", "finish_reason": "stop"}]
    assert json.loads(envelope.sse(chunks[0])[6:])["choices"] == [
        {"index": 0, "text": "on", "finish_reason": None}
    ]
    assert json.loads(envelope.sse(chunks[1])[6:])["choices"][0]["text"] == ""
