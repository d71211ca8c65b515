"""After an answer the engine prefills the history as the next turn will have it."""

import threading
from typing import Any

import pytest
from scripted_engine import ScriptedEngine

from mlx_backend.chat.model_settings import ModelSettings
from mlx_backend.chat.reply import Reply
from mlx_backend.chat.request import ChatRequest
from mlx_backend.chat.service import Service
from mlx_backend.conversation.events import Event, StreamEnd
from mlx_backend.demo import MODEL_PATH
from mlx_backend.engine.mlx import load_engine
from mlx_backend.engine.threaded import Engine

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
TURNS = ["My name is Ada.", "What is the capital of France?", "What is my name?"]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answered(reply: Reply) -> dict[str, Any]:
    from mlx_backend.conversation.parser import fold

    events = [event for event in reply.events() if isinstance(event, Event.__value__)]
    assert isinstance(events[-1], StreamEnd)
    message = fold(events)
    answer: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.tool_calls:
        answer["tool_calls"] = [
            {
                "id": reply.call_id(index),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(message.tool_calls)
        ]
    return answer


def wait_until_idle(engine: Engine) -> None:
    """Warm-ups run one after another: when another one is made, those before it are done."""
    done = threading.Event()
    engine.prewarm(done.set)
    assert done.wait(60)


def chat(service: Service, turns: list[str], **fields: Any) -> list[int]:
    """Hold a conversation; for every turn, how many tokens had to be prefilled."""
    messages: list[dict[str, Any]] = []
    read = []
    for turn in turns:
        messages.append(user(turn))
        reply = service.chat(ChatRequest(messages=list(messages), sampling={"temperature": 0}, **fields))
        messages.append(answered(reply))
        read.append(reply.usage.prompt_tokens - reply.usage.cached_tokens)
        wait_until_idle(service.engine)
    return read


@pytest.mark.parametrize("sampling", [{}, {"seed": 7, "temperature": 1}])
def test_the_next_turn_prefills_only_its_message_and_the_generation_prompt(
    sampling: dict[str, Any],
) -> None:
    with load_engine(MODEL_PATH) as engine, load_engine(MODEL_PATH) as cold_engine:
        warm, cold = Service(engine), Service(cold_engine, ModelSettings(prewarm=False))
        encode = engine.tokenizer.encode
        read = chat(warm, TURNS)
        assert engine.status().prewarmed_tokens > 0
        for turn, count in zip(TURNS[1:], read[1:], strict=True):
            glue = encode("<|end|><|start|>assistant", control_tokens=True)
            assert count == len(encode(turn, control_tokens=False)) + len(glue)
        assert all(a < b for a, b in zip(read[1:], chat(cold, TURNS)[1:], strict=True))


@pytest.mark.parametrize("prewarm", [True, False], ids=["prewarmed", "as generated"])
def test_a_tool_result_finds_the_call_and_its_reasoning_in_the_cache(prewarm: bool) -> None:
    with load_engine(MODEL_PATH) as engine:
        service = Service(engine, ModelSettings(prewarm=prewarm))
        messages = [user("What is the weather in Oslo?")]
        request = ChatRequest(messages=messages, tools=[WEATHER], sampling={"temperature": 0})
        answer = answered(service.chat(request))
        assert answer["tool_calls"]
        wait_until_idle(engine)
        # The client writes the call anew, with a default more.
        answer["tool_calls"][0]["function"]["arguments"] = '{"unit":null,"city":"Oslo"}'
        result = {
            "role": "tool",
            "tool_call_id": answer["tool_calls"][0]["id"],
            "content": '{"sky": "sunny"}',
        }
        following = ChatRequest(
            messages=[*messages, answer, result], tools=[WEATHER], sampling={"temperature": 0}
        )
        reply = service.chat(following)
        assert "sunny" in answered(reply)["content"]
        read = reply.usage.prompt_tokens - reply.usage.cached_tokens
        around = 6 if prewarm else 13  # the end of the call and the header of its result
        assert read <= len(engine.tokenizer.encode('{"sky": "sunny"}', control_tokens=False)) + around


def test_prewarming_can_be_turned_off() -> None:
    with ScriptedEngine(lambda _: "<|channel|>final<|message|>Hi.<|return|>") as engine:
        answered(Service(engine, ModelSettings(prewarm=False)).chat(ChatRequest(messages=[user("hello")])))
        assert not engine.warmups
        answered(Service(engine).chat(ChatRequest(messages=[user("hello")])))
        [plan] = engine.warmups
        start = plan()
        assert start is not None
        expected = (
            "<|start|>user<|message|>hello<|end|><|start|>assistant<|channel|>final<|message|>Hi.<|end|>"
        )
        assert engine.tokenizer.decode(start.tokens).endswith(expected + "<|start|>user<|message|>")


def test_a_conversation_that_has_gone_on_is_not_prewarmed_as_it_was() -> None:
    with ScriptedEngine(lambda _: "<|channel|>final<|message|>Hi.<|return|>") as engine:
        service = Service(engine)
        messages = [user("hello")]
        answer = answered(service.chat(ChatRequest(messages=messages)))
        answered(service.chat(ChatRequest(messages=[user("another's")])))
        answered(service.chat(ChatRequest(messages=[*messages, answer, user("and now?")])))
        gone_on, *last = engine.warmups
        assert gone_on() is None
        assert all(make_start() is not None for make_start in last)


def test_background_requests_are_not_prewarmed() -> None:
    with ScriptedEngine(lambda _: "<|channel|>final<|message|>Paris.<|return|>") as engine:
        service = Service(engine)
        for priority, plans in ((1, 0), (0, 1), (5, 1), (-1, 2)):
            answered(service.chat(ChatRequest(messages=[user(TURNS[1])], priority=priority)))
            assert len(engine.warmups) == plans


def test_a_reply_that_was_cut_or_closed_is_not_prewarmed() -> None:
    with ScriptedEngine(lambda _: "<|channel|>final<|message|>A long answer.<|return|>") as engine:
        service = Service(engine)
        answered(service.chat(ChatRequest(messages=[user("hello")], max_tokens=4)))
        left = service.chat(ChatRequest(messages=[user("hello")]))
        next(iter(left.events()))
        left.close()
        assert not engine.warmups
