"""A reply without a service: what `on_finished` is told and when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scripted_engine import ScriptedEngine

from mlx_backend.chat.reply import FinishedReply, Reply, ReplySetup
from mlx_backend.conversation.events import StreamEnd
from mlx_backend.conversation.parser import ChannelParser
from mlx_backend.engine.base import GenerationRequest

if TYPE_CHECKING:
    from collections.abc import Callable

CALL = (
    "<|channel|>analysis<|message|>Hm.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.f json<|message|>{}<|call|>"
)
ANSWER = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"


def reply_of(
    engine: ScriptedEngine, on_finished: Callable[[FinishedReply], None], *, max_tokens: int = 1000
) -> Reply:
    special_tokens = engine.tokenizer.special_tokens
    prompt = engine.tokenizer.encode("<|start|>assistant", control_tokens=True)
    plan = ReplySetup(
        parser=ChannelParser("harmony", special_tokens=special_tokens),
        prompt_tokens=len(prompt),
        special_tokens=special_tokens,
        on_finished=on_finished,
    )
    return Reply(engine.generate(GenerationRequest(prompt=prompt, max_tokens=max_tokens)), plan)


def test_on_finished_is_called_before_the_end_is_handed_out() -> None:
    finished: list[FinishedReply] = []
    with ScriptedEngine([ANSWER]) as engine:
        for event in reply_of(engine, finished.append).events():
            assert not finished or isinstance(event, StreamEnd)
    [only] = finished
    assert only.as_history() == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "Hm.",
    }
    assert not only.is_cut


def test_the_history_of_a_call_has_its_reasoning_and_the_id_the_client_was_given() -> None:
    finished: list[FinishedReply] = []
    with ScriptedEngine([CALL]) as engine:
        reply = reply_of(engine, finished.append)
        list(reply.events())
    function = {"name": "f", "arguments": "{}"}
    assert finished[0].as_history() == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": reply.call_id(0), "type": "function", "function": function}],
        "reasoning_content": "Hm.",
    }


def test_a_call_that_the_token_limit_cut_has_no_id() -> None:
    finished: list[FinishedReply] = []
    with ScriptedEngine([CALL]) as engine:
        length = len(engine.tokenizer.encode(CALL, control_tokens=True))
        list(reply_of(engine, finished.append, max_tokens=length - 1).events())
    assert finished[0].is_cut
    assert not finished[0].call_ids


def test_on_finished_is_not_called_for_a_reply_that_was_closed() -> None:
    finished: list[FinishedReply] = []
    with ScriptedEngine([ANSWER], gated=True) as engine:
        reply = reply_of(engine, finished.append)
        reply.close()
        assert list(reply.events()) == []
    assert not finished
