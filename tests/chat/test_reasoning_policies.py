"""Reasoning over several turns of an agent whose client may lose it: each policy, the store, warm-ups, the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from chat_templates import QWEN_XML_MARKERS, qwen_xml
from engine_models import write_qwen
from scripted_engine import ScriptedEngine

from mlx_backend.chat.request import AnswerFormat, ChatRequest, ToolChoice
from mlx_backend.chat.service import Service
from mlx_backend.conversation.events import Event
from mlx_backend.conversation.parser import fold
from mlx_backend.engine.base import Finished, GenerationRequest
from mlx_backend.engine.mlx import load_engine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mlx_backend.chat.reply import Reply
    from mlx_backend.engine.base import PromptStart
    from mlx_backend.engine.threaded import Engine

CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Looks.", "parameters": CITY}}
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"

IN_LOOP = "loop.index0 > last.user"
POLICIES = {
    "kept always": "true",
    "kept after the last user message": IN_LOOP,
    "kept with tools": f"tools or {IN_LOOP}",
    "by the template's switch": f"(preserve_thinking is defined and preserve_thinking) or {IN_LOOP}",
}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def finished(reply: Reply, *, loses_reasoning: bool) -> dict[str, Any]:
    """What a client stores of a reply."""
    message = fold([event for event in reply.events() if isinstance(event, Event.__value__)])
    stored: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning and not loses_reasoning:
        stored["reasoning_content"] = message.reasoning
    if message.tool_calls:
        stored["tool_calls"] = [
            {"id": reply.call_id(at), "function": {"name": call.name, "arguments": call.arguments}}
            for at, call in enumerate(message.tool_calls)
        ]
    return stored


# -- which reasoning a model sees -----------------------------------------------------------------


def agent(keeps: str, *, tools: bool = True, loses_reasoning: bool = True, **kwargs: Any) -> list[list[str]]:
    """Hold two turns of three rounds, six without tools; return the reasoning in each prompt, "R1" for reply 1."""
    scripts = [f"R{at}\n</think>\n\n{CALL if at % 3 else f'Answer {at}.'}<|im_end|>" for at in range(1, 7)]
    with ScriptedEngine(scripts, chat_template=qwen_xml(keeps), markers=QWEN_XML_MARKERS) as engine:
        service = Service(engine)
        messages: list[dict[str, Any]] = []
        for at in range(6):
            if at % 3 == 0 or not tools:
                messages.append(user(f"Question {at}"))
            request = ChatRequest(
                messages=list(messages), tools=[WEATHER] if tools else [], template_kwargs=kwargs
            )
            stored = finished(service.chat(request), loses_reasoning=loses_reasoning)
            messages.append(stored)
            for call in stored.get("tool_calls", ()):
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"T{at}"})
        return [
            [word for word in ("R1", "R2", "R3", "R4", "R5") if f"\n{word}\n" in started.prompt]
            for started in engine.requests
        ]


LOOP = [[], ["R1"], ["R1", "R2"]]
ALL = [["R1", "R2", "R3"], ["R1", "R2", "R3", "R4"], ["R1", "R2", "R3", "R4", "R5"]]


@pytest.mark.parametrize(
    ("policy", "second_turn"),
    [
        ("kept always", ALL),
        ("kept after the last user message", [[], ["R4"], ["R4", "R5"]]),
        ("kept with tools", ALL),
        ("by the template's switch", ALL),
    ],
)
def test_what_a_client_loses_comes_back_as_long_as_the_policy_wants_it(
    policy: str, second_turn: list[list[str]]
) -> None:
    assert agent(POLICIES[policy]) == [*LOOP, *second_turn]


def test_a_client_that_returns_reasoning_has_that_of_the_answers_too() -> None:
    assert agent(POLICIES["kept always"], loses_reasoning=False)[3:] == ALL
    assert agent(POLICIES["kept after the last user message"], loses_reasoning=False)[3] == []


def test_the_switch_is_set_with_tools_alone_and_a_users_own_setting_wins() -> None:
    switch = POLICIES["by the template's switch"]
    assert agent(switch, preserve_thinking=False)[3] == []
    assert agent(switch, tools=False, preserve_thinking=False, loses_reasoning=False)[3] == []
    assert agent(switch, tools=False, preserve_thinking=True, loses_reasoning=False)[3] == ["R1", "R2", "R3"]


# -- the cache ------------------------------------------------------------------------------------


def warm_at_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have warm-ups done when they are asked for, and not when the engine finds the time."""

    def prewarm(make_start: Callable[[], PromptStart], adapter: str | None = None) -> None:
        warmed = engine.generate(GenerationRequest(prompt=tuple(make_start().tokens), max_tokens=1))
        while not isinstance(warmed.next(), Finished):
            pass

    monkeypatch.setattr(engine, "prewarm", prewarm)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A qwen3 with random weights; what it writes is held by grammars, what it thinks is not."""
    return write_qwen(tmp_path_factory.mktemp("qwen") / "model", max_position_embeddings=8192)


@pytest.mark.parametrize("loses_reasoning", [True, False], ids=["lost", "returned"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_next_turn_finds_all_that_came_before_in_the_cache(
    model: Path, policy: str, loses_reasoning: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load_engine(model, chat_template=qwen_xml(POLICIES[policy])) as engine:
        warm_at_once(engine, monkeypatch)
        service = Service(engine)
        messages: list[dict[str, Any]] = []
        fresh: list[int] = []
        limits: list[int] = []

        def ask(said: dict[str, Any], text: str, **fields: Any) -> None:
            messages.append(said)
            request = ChatRequest(
                messages=list(messages),
                tools=[WEATHER],
                thinking_budget=6,
                max_tokens=200,
                parallel_tool_calls=False,
                sampling={"temperature": 0},
                **fields,
            )
            reply = service.chat(request)
            messages.append(finished(reply, loses_reasoning=loses_reasoning))
            fresh.append(reply.usage.prompt_tokens - reply.usage.cached_tokens)
            limits.append(len(engine.tokenizer.encode(text + BEHIND, control_tokens=True)))

        for turn in ("One?", "Two?", "Three?")[: 3 if loses_reasoning and policy in KEEPING else 2]:
            ask(user(turn), turn, tool_choice=ToolChoice(required=True))
            [call] = messages[-1]["tool_calls"]
            result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
            answer = AnswerFormat(kind="choice", value=["Sunny."])
            ask(result, "sunny\n</tool_response>", answer_format=answer)
            assert messages[-1]["content"] == "Sunny."
    # The last token of what is cached is read again, for its logits.
    first_answer = 2  # until then nothing tells whether a client returns the reasoning of answers
    for at, (count, limit) in enumerate(zip(fresh, limits, strict=True)):
        if at and not (at == first_answer and loses_reasoning and policy in KEEPING):
            assert count <= limit + 2, f"request {at}: {count} tokens were read again, {limit} were new"


BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n"
KEEPING = ("kept always", "kept with tools", "by the template's switch")
