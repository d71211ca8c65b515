"""The service without HTTP: what a request becomes, and what a reply keeps."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest
from scripted_engine import ScriptedEngine, Transcript

from mlx_backend.chat.model_settings import ModelSettings
from mlx_backend.chat.request import ChatRequest, CompletionRequest
from mlx_backend.chat.service import Service
from mlx_backend.constraints.vocabulary import Vocabulary
from mlx_backend.conversation.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    StreamEnd,
    ToolCallEnd,
    ToolCallStart,
)
from mlx_backend.demo import MODEL_PATH
from mlx_backend.engine.base import Progress
from mlx_backend.engine.mlx import load_engine
from mlx_backend.errors import RequestError

if TYPE_CHECKING:
    from mlx_backend.chat.reply import Reply

USER: dict[str, Any] = {"role": "user", "content": "hello"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ANSWER = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Paris.<|return|>"
)


def call(argument: int) -> str:
    return (
        f"<|channel|>analysis<|message|>Round {argument}.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.f json<|message|>{argument}<|call|>"
    )


def events_of(reply: Reply) -> list[Event]:
    return [event for event in reply.events() if isinstance(event, Event.__value__)]


def text_of(events: list[Event], kind: type[ContentDelta] | type[ReasoningDelta]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def test_a_reply_is_events_up_to_one_end() -> None:
    with ScriptedEngine([ANSWER]) as engine:
        reply = Service(engine).chat(ChatRequest(messages=[USER]))
        events = events_of(reply)
        assert text_of(events, ReasoningDelta) == "Hm."
        assert text_of(events, ContentDelta) == "Paris."
        assert events[-1] == StreamEnd("stop")
        assert reply.finish == "stop"


@pytest.mark.parametrize(
    ("fields", "is_call"),
    [
        ({}, True),
        ({"tools": []}, False),
        ({"messages": [USER, {"role": "assistant", "content": "I send "}]}, False),
    ],
)
def test_an_answer_that_is_only_a_calls_json_is_a_call_where_it_may_be(
    fields: dict[str, Any], is_call: bool
) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<tool_call>{% endfor %}"
    with ScriptedEngine(
        ['{"name": "f", "arguments": {}}'], markers=("<|im_start|>", "<|im_end|>"), chat_template=template
    ) as engine:
        request = ChatRequest(**{"messages": [USER], "tools": [TOOL], **fields})
        events = events_of(Service(engine).chat(request))
        assert events[-1] == StreamEnd("tool_calls" if is_call else "stop")


def test_reasoning_tokens_are_those_whose_text_was_reasoning() -> None:
    # The scripted vocabulary has three bytes to a token: "Hm." is one, "Paris." two, "日" one.
    for thought, tokens in (("Hm.", 1), ("Hm. Hm.", 3), ("日本", 2), ("a日b本", 3), ("", 0)):
        with ScriptedEngine([ANSWER.replace("Hm.", thought)]) as engine:
            reply = Service(engine).chat(ChatRequest(messages=[USER]))
            events_of(reply)
            assert reply.usage.reasoning_tokens == tokens, thought


@pytest.mark.parametrize("budget", range(1, 7))
def test_a_character_cut_by_a_limit_is_counted_as_what_it_would_have_been(budget: int) -> None:
    # Each of them is two tokens: three bytes, and the one that is left with what follows.
    script = ANSWER.replace("Hm.", "\N{GRINNING FACE}" * 9)
    with ScriptedEngine(lambda _: script) as engine:
        limited = Service(engine).chat(ChatRequest(messages=[USER], thinking_budget=budget))
        assert text_of(events_of(limited), ContentDelta) == "Paris."
        assert limited.usage.reasoning_tokens == budget
        cut = Service(engine).chat(ChatRequest(messages=[USER], max_tokens=5 + budget))
        assert events_of(cut)[-1] == StreamEnd("length")
        assert cut.usage.reasoning_tokens == budget


def test_closing_a_reply_cancels_it() -> None:
    with ScriptedEngine([ANSWER], gated=True) as engine:
        reply = Service(engine).chat(ChatRequest(messages=[USER]))
        engine.advance()
        events = reply.events(patience=0.01)
        next(events)
        reply.close()
        assert [event for event in events if event is not None] == []
        assert reply.finish is None
        assert not engine.requests or engine.requests[0].cancelled.wait(60)


def test_closing_the_iterator_cancels_too() -> None:
    with ScriptedEngine([ANSWER], gated=True) as engine:
        events = Service(engine).chat(ChatRequest(messages=[USER])).events()
        engine.advance(30)
        for event in events:
            if isinstance(event, ReasoningDelta):
                break
        events.close()
        engine.advance(1)
        assert engine.requests[0].ended.wait(60)


def test_none_is_yielded_when_patience_runs_out() -> None:
    with ScriptedEngine([ANSWER], gated=True) as engine:
        events = Service(engine).chat(ChatRequest(messages=[USER])).events(patience=0.001)
        assert next(events) is None
        engine.advance(100)
        assert (
            text_of([event for event in events if isinstance(event, ContentDelta)], ContentDelta) == "Paris."
        )


def test_prefill_is_reported() -> None:
    with ScriptedEngine([Transcript(text=ANSWER, prefill=3)]) as engine:
        reply = Service(engine).chat(ChatRequest(messages=[USER]))
        progress = [event for event in reply.events() if isinstance(event, Progress)]
        assert [step.total for step in progress] == [reply.usage.prompt_tokens] * 3


def history(reply: Reply, thought: str | None = None) -> list[dict[str, Any]]:
    """What a client sends after a call: often without the reasoning."""
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": reply.call_id(0), "type": "function", "function": {"name": "f", "arguments": "1"}}
        ],
    }
    if thought is not None:
        called["reasoning_content"] = thought
    return [called, {"role": "tool", "tool_call_id": reply.call_id(0), "content": "result"}]


def test_reasoning_lost_by_the_client_is_restored_over_several_rounds() -> None:
    with ScriptedEngine([call(1), call(2), ANSWER, ANSWER]) as engine:
        service = Service(engine)

        def reply_to(messages: list[dict[str, Any]]) -> Reply:
            reply = service.chat(ChatRequest(messages=messages, tools=[TOOL]))
            events_of(reply)
            return reply

        one = reply_to([USER])
        two = reply_to([USER, *history(one)])
        reply_to([USER, *history(one), *history(two)])
        assert "Round 1." in engine.requests[1].prompt
        assert "Round 1." in engine.requests[2].prompt
        assert "Round 2." in engine.requests[2].prompt
        # The turn has ended in an answer: its reasoning is gone.
        reply_to([USER, *history(one), *history(two), {"role": "assistant", "content": "Paris."}, USER])
        assert "Round" not in engine.requests[3].prompt


def test_the_clients_own_reasoning_wins_over_the_stored_one() -> None:
    with ScriptedEngine([call(1), ANSWER]) as engine:
        service = Service(engine)
        one = service.chat(ChatRequest(messages=[USER], tools=[TOOL]))
        events_of(one)
        second = [USER, *history(one, thought="Kept.")]
        events_of(service.chat(ChatRequest(messages=second, tools=[TOOL])))
        assert "Kept." in engine.requests[1].prompt
        assert "Round 1." not in engine.requests[1].prompt


def test_arguments_that_cannot_be_repaired_are_logged_once_by_the_tools_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken, repaired = "ls secret", "{'a': True}"
    for body, lines in ((broken, 1), (repaired, 0)):
        caplog.clear()
        text = f"<|channel|>commentary to=functions.f<|message|>{body}"
        with ScriptedEngine([f"{text}<|end|><|start|>assistant{text}<|call|>"]) as engine:
            events_of(Service(engine).chat(ChatRequest(messages=[USER], tools=[TOOL])))
        assert len(caplog.messages) == lines
        assert all('"f"' in line and "secret" not in line for line in caplog.messages)


def test_without_parallel_tool_calls_the_reply_ends_at_the_first_call() -> None:
    two_calls = call(1).removesuffix("<|call|>") + "<|end|><|start|>assistant" + call(2)
    with ScriptedEngine(lambda _: two_calls) as engine:
        service = Service(engine)

        def calls(*, parallel: bool) -> int:
            request = ChatRequest(messages=[USER], tools=[TOOL], parallel_tool_calls=parallel)
            events = events_of(service.chat(request))
            assert events[-1] == StreamEnd("tool_calls")
            assert sum(isinstance(event, ToolCallStart) for event in events) == sum(
                isinstance(event, ToolCallEnd) for event in events
            )
            return sum(isinstance(event, ToolCallEnd) for event in events)

        assert calls(parallel=True) == 2
        assert calls(parallel=False) == 1


def test_a_last_assistant_message_is_continued() -> None:
    with ScriptedEngine(["is Paris.<|return|>"]) as engine:
        messages = [USER, {"role": "assistant", "content": "The capital "}]
        events = events_of(Service(engine).chat(ChatRequest(messages=messages)))
        assert engine.requests[0].prompt.endswith("<|channel|>final<|message|>The capital ")
        assert text_of(events, ContentDelta) == "is Paris."


def test_it_is_continued_even_without_earlier_messages() -> None:
    with ScriptedEngine(["is Paris.<|return|>"]) as engine:
        messages = [{"role": "assistant", "content": "The capital "}]
        events = events_of(Service(engine).chat(ChatRequest(messages=messages)))
        assert text_of(events, ContentDelta) == "is Paris."


def test_it_is_not_continued_if_the_request_says_so() -> None:
    with ScriptedEngine([ANSWER]) as engine:
        messages = [USER, {"role": "assistant", "content": "The capital "}]
        events_of(Service(engine).chat(ChatRequest(messages=messages, continue_last=False)))
        assert engine.requests[0].prompt.endswith("<|start|>assistant")


def test_max_tokens_is_the_requests_or_the_servers_or_what_the_context_leaves() -> None:
    with ScriptedEngine(lambda _: ANSWER, context_length=1000) as engine:
        for service, requested in (
            (Service(engine), None),
            (Service(engine, ModelSettings(max_tokens=50)), None),
        ):
            events_of(service.chat(ChatRequest(messages=[USER], max_tokens=requested)))
        events_of(
            Service(engine, ModelSettings(max_tokens=50)).chat(ChatRequest(messages=[USER], max_tokens=7))
        )
        events_of(Service(engine).chat(ChatRequest(messages=[USER], max_tokens=10**9)))
        length = len(engine.requests[0].request.prompt)
        assert [a.request.max_tokens for a in engine.requests] == [1000 - length, 50, 7, 1000 - length]


def test_a_completion_checks_its_token_ids() -> None:
    with ScriptedEngine([]) as engine:
        with pytest.raises(RequestError, match=r"prompt\[1\]: -1") as raised:
            Service(engine).complete(CompletionRequest(prompt=(5, -1)))
        assert raised.value.param == "prompt"


def test_a_control_token_that_the_limit_cut_is_shown_in_a_completion() -> None:
    with ScriptedEngine(lambda _: "ab<|end|>") as engine:
        service = Service(engine)
        for limit, shown in ((2, "ab<|end|>"), (None, "ab")):
            request = CompletionRequest(prompt="x", max_tokens=limit)
            assert text_of(events_of(service.complete(request)), ContentDelta) == shown


def test_a_model_without_a_template_can_only_complete() -> None:
    with ScriptedEngine(["on"], chat_template=None) as engine:
        with pytest.raises(RequestError, match="/v1/completions"):
            Service(engine).chat(ChatRequest(messages=[USER]))
        reply = Service(engine).complete(CompletionRequest(prompt="go "))
        assert text_of(events_of(reply), ContentDelta) == "on"


def test_the_interpreter_waits_for_grammars_that_a_daemon_thread_has_begun_to_prepare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # At the interpreter's end a daemon thread is ended in the middle of llguidance, which crashes the process.
    builders: SimpleQueue[threading.Thread] = SimpleQueue()
    monkeypatch.setattr(Vocabulary, "build", lambda _: builders.put(threading.current_thread()))
    with load_engine(str(MODEL_PATH)) as engine:
        loader = threading.Thread(target=Service(engine).prepare, daemon=True)
        loader.start()
        assert not builders.get(timeout=60).daemon
        loader.join()
