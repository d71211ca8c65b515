"""Titles, tags and the like: answered at the lowest effort, briefly, and after users' turns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from scripted_engine import HARMONY_TEMPLATE, ScriptedEngine

from mlx_backend.chat.model_settings import ModelSettings
from mlx_backend.chat.request import ChatRequest
from mlx_backend.chat.service import Service
from mlx_backend.conversation.effort import Effort
from mlx_backend.models.spec import ModelDefaults
from mlx_backend.settings import Settings

if TYPE_CHECKING:
    from mlx_backend.chat.reply import Reply
    from mlx_backend.engine.base import GenerationRequest

TITLE: dict[str, Any] = {
    "role": "user",
    "content": "### Task:\nGenerate a concise title summarizing the chat history.\nUSER: Hi",
}
SEARCH: dict[str, Any] = {
    "role": "user",
    "content": "### Task:\nAnalyze the chat history to determine the necessity of generating search queries.",
}
CODE: dict[str, Any] = {
    "role": "user",
    "content": "Generate code based on the following instructions: add two numbers",
}
HELLO: dict[str, Any] = {"role": "user", "content": "hello"}
ANSWER = "<|channel|>final<|message|>Greetings<|return|>"


def sent(
    *messages: dict[str, Any],
    server: dict[str, Any] | None = None,
    own: ModelDefaults | None = None,
    template: str = HARMONY_TEMPLATE,
    **request: Any,
) -> tuple[Reply, GenerationRequest]:
    """The reply to a request, and what the engine was asked for."""
    with ScriptedEngine([ANSWER], chat_template=template) as engine:
        service = Service(engine, ModelSettings.of(own, Settings(**(server or {}))))
        chat = service.chat(ChatRequest(messages=messages or [TITLE], **request))
        list(chat.events())
        return chat, engine.requests[-1].request


def effort_of(reply: Reply) -> tuple[Effort, str]:
    assert reply.effort is not None
    return reply.effort.effort, reply.effort.source


def test_a_title_is_answered_briefly_at_low_effort_and_after_users_turns() -> None:
    reply, request = sent(server={"reasoning_effort": Effort.HIGH})
    assert effort_of(reply) == (Effort.LOW, "background request: Open WebUI, title")
    assert (reply.priority, request.priority, request.max_tokens) == (1, 1, 1000)
    assert request.constraint is not None  # the tokens that are kept for the answer


def test_any_other_request_is_answered_as_before() -> None:
    reply, request = sent(HELLO, server={"reasoning_effort": Effort.HIGH})
    assert effort_of(reply) == (Effort.HIGH, "server default")
    assert (request.priority, request.constraint) == (0, None)
    assert request.max_tokens > 100_000


@pytest.mark.parametrize(
    ("switches", "lowest"),
    [
        ("", Effort.LOW),
        ("{% if enable_thinking is defined and not enable_thinking %}off{% endif %}", Effort.NONE),
    ],
)
def test_the_lowest_effort_is_none_only_for_a_model_that_was_made_for_it(
    switches: str, lowest: Effort
) -> None:
    reply, _ = sent(template=HARMONY_TEMPLATE + switches)
    assert effort_of(reply)[0] is lowest


@pytest.mark.parametrize(
    ("fields", "messages", "source"),
    [
        ({"reasoning_effort": "high"}, [], "reasoning_effort"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, [], "chat_template_kwargs.enable_thinking"),
        ({"think": True}, [], "server default"),
        ({}, [{"role": "system", "content": "Reasoning: high"}], "system prompt"),
    ],
)
def test_an_effort_that_the_request_states_is_kept(
    fields: dict[str, Any], messages: list[dict[str, Any]], source: str
) -> None:
    reply, request = sent(*messages, TITLE, server={"reasoning_effort": Effort.MEDIUM}, fields=fields)
    assert effort_of(reply)[1] == source
    assert request.priority == 1  # nothing was said about that


def test_a_priority_and_limits_that_the_request_sets_are_kept() -> None:
    assert sent(priority=0)[1].priority == 0
    assert sent(priority=-2)[1].priority == -2
    assert sent(max_tokens=7)[1].max_tokens == 7
    assert sent(max_tokens=5000)[1].max_tokens == 5000
    assert sent(max_tokens=50, thinking_budget=-1)[1].constraint is None


def test_a_lower_limit_of_the_server_or_the_model_holds() -> None:
    assert sent(server={"max_tokens": 500})[1].max_tokens == 500
    assert sent(server={"max_tokens": 5000})[1].max_tokens == 1000
    assert sent(own=ModelDefaults(max_tokens=20))[1].max_tokens == 20


def test_a_prompt_for_code_may_have_a_long_answer() -> None:
    reply, request = sent(CODE)
    assert effort_of(reply)[0] is Effort.LOW
    assert request.max_tokens > 100_000


def test_what_a_users_turn_awaits_does_not_wait_behind_other_turns() -> None:
    reply, request = sent(SEARCH)
    assert effort_of(reply) == (Effort.LOW, "background request: Open WebUI, search queries")
    assert (reply.priority, request.priority) == (0, 0)


def test_most_of_the_tokens_are_kept_for_the_answer() -> None:
    thought = "<|channel|>analysis<|message|>" + "Hm. " * 200 + "<|end|><|start|>assistant" + ANSWER
    with ScriptedEngine(lambda _: thought) as engine:
        reply = Service(engine).chat(ChatRequest(messages=[TITLE], max_tokens=100))
        list(reply.events())
    assert reply.finish == "stop"
    assert 20 < reply.usage.reasoning_tokens <= 40


@pytest.mark.parametrize(
    ("settings", "request_"),
    [
        ({"server": {"background_detection": False}}, {}),
        ({"own": ModelDefaults(background_detection=False)}, {}),
        ({}, {"background_detection": False}),
        ({"own": ModelDefaults(background_detection=True)}, {"background_detection": False}),
    ],
)
def test_the_server_a_model_or_a_request_can_turn_the_recognition_off(
    settings: dict[str, Any], request_: dict[str, Any]
) -> None:
    reply, request = sent(**settings, **request_)
    assert effort_of(reply) == (Effort.MEDIUM, "default")
    assert (request.priority, request.constraint) == (0, None)


def test_a_model_or_a_request_can_turn_it_on_where_the_server_has_it_off() -> None:
    off = {"background_detection": False}
    defaults = ModelDefaults(background_detection=True)
    assert effort_of(sent(server=off, own=defaults)[0])[0] is Effort.LOW
    assert effort_of(sent(server=off, background_detection=True)[0])[0] is Effort.LOW


def test_a_recognised_request_has_no_next_turn_to_prepare() -> None:
    with ScriptedEngine(lambda _: ANSWER) as engine:
        service = Service(engine)
        for request, plans in (
            (ChatRequest(messages=[TITLE], priority=0), 0),
            (ChatRequest(messages=[HELLO]), 1),
        ):
            list(service.chat(request).events())
            assert len(engine.warmups) == plans


def test_a_prompt_is_counted_with_the_effort_it_is_answered_with() -> None:
    with ScriptedEngine([ANSWER]) as engine:
        service = Service(engine, ModelSettings.of(server=Settings(reasoning_effort=Effort.MEDIUM)))
        counted = service.prompt(ChatRequest(messages=[TITLE])).tokens
        list(service.chat(ChatRequest(messages=[TITLE])).events())
        assert list(engine.requests[-1].request.prompt) == list(counted)
        assert "Reasoning: low" in engine.requests[-1].prompt
