"""A reply says how much of its prompt was sent before, and what of the request ended that."""

from __future__ import annotations

from typing import Any

import pytest
from chat_templates import QWEN_XML_MARKERS, qwen_xml
from scripted_engine import ScriptedEngine

from mlx_backend.byte_cache import CacheBudget
from mlx_backend.chat import recent_prompts
from mlx_backend.chat.recent_prompts import PromptMatch, RecentPrompts, SentPrompt
from mlx_backend.chat.request import ChatRequest
from mlx_backend.chat.service import Service
from mlx_backend.engine.base import QueueClient

Message = dict[str, Any]

SYSTEM: Message = {"role": "system", "content": "Be brief."}
CALL: Message = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "Why not.",
    "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
    ],
}
RESULT: Message = {"role": "tool", "tool_call_id": "call_1", "content": "found"}
LOOK: Message = {"type": "function", "function": {"name": "look"}}
FIND: Message = {"type": "function", "function": {"name": "find"}}
REPLY = "Hm.\n</think>\n\nIt is there.<|im_end|>"
ANSWER: Message = {"role": "assistant", "content": "It is there.", "reasoning_content": "Hm."}
HISTORY = [SYSTEM, {"role": "user", "content": "one"}, CALL, RESULT]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def replaced(messages: list[Message], at: int, message: Message) -> list[Message]:
    return [*messages[:at], message, *messages[at + 1 :]]


def match(
    first: list[Message],
    second: list[Message],
    *,
    keeps: str = "true",
    owners: tuple[str, str] = ("", ""),
    tools: tuple[list[Message], list[Message]] = ([LOOK], [LOOK]),
) -> tuple[PromptMatch, int]:
    """Send two conversations. Return the second one's match, and how many tokens the first had with its reply."""
    with ScriptedEngine(lambda _: REPLY, markers=QWEN_XML_MARKERS, chat_template=qwen_xml(keeps)) as engine:
        service = Service(engine)
        for messages, owner, offered in zip((first, second), owners, tools, strict=True):
            reply = service.chat(ChatRequest(messages=messages, tools=offered), QueueClient(owner))
            list(reply.events())
        assert reply.usage.match is not None
        had = len(engine.requests[0].request.prompt) + len(
            engine.tokenizer.encode(REPLY, control_tokens=True)
        )
        return reply.usage.match, had


def test_a_conversation_that_goes_on_matches_whole() -> None:
    matched, had = match(HISTORY, [*HISTORY, ANSWER, user("two")])
    assert matched == PromptMatch(had, "")


GONE_ON = [*HISTORY, ANSWER, user("two")]


@pytest.mark.parametrize(
    ("second", "broken_by"),
    [
        (replaced(GONE_ON, 0, {**SYSTEM, "content": "It is noon."}), "the system message"),
        (replaced(GONE_ON, 1, user("other")), "message 2 of 6 (user)"),
        (replaced(GONE_ON, 3, {**RESULT, "content": "lost"}), "message 4 of 6 (tool)"),
        (
            replaced(GONE_ON, 2, {**CALL, "reasoning_content": "Other."}),
            "message 3 of 6 (assistant), whose reasoning is gone or another",
        ),
        (
            replaced(GONE_ON, 4, {**ANSWER, "content": "It is not."}),
            "message 5 of 6 (assistant), which is not as it was generated",
        ),
    ],
)
def test_the_message_that_broke_a_prefix_is_named(second: list[Message], broken_by: str) -> None:
    matched, had = match(HISTORY, second)
    assert matched.broken_by == broken_by
    assert matched.tokens < had - 1


def test_other_tools_are_named() -> None:
    assert match(HISTORY, GONE_ON, tools=([LOOK], [LOOK, FIND]))[0].broken_by == "the tools"


def test_a_template_that_writes_earlier_turns_otherwise_is_named() -> None:
    matched, _ = match(HISTORY, GONE_ON, keeps="loop.index0 > last.user")
    assert matched.broken_by == "the chat template, which writes earlier messages otherwise now"


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(HISTORY, id="asked again"),
        pytest.param([SYSTEM, user("another conversation")], id="another conversation"),
        pytest.param(replaced(HISTORY, 3, {**RESULT, "content": "other"}), id="another last message"),
    ],
)
def test_nothing_is_broken_where_nothing_goes_on(second: list[Message]) -> None:
    matched, _ = match(HISTORY, second)
    assert matched.broken_by == ""
    assert matched.tokens > 0


def test_prompts_of_another_client_are_not_compared() -> None:
    assert match(HISTORY, GONE_ON, owners=("key a", "key b"))[0] == PromptMatch()


def test_a_conversation_is_remembered_once_and_all_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_prompts, "MAX_PROMPTS", 3)
    recent = RecentPrompts(CacheBudget(100_000))
    messages = [user("one")]
    for count in range(5):
        recent.match(SentPrompt.of("a", messages, [], {}, range(10 * count + 10)))
        messages = [*messages, user(str(count))]
    assert len(recent._prompts) == 1
    for count in range(5):
        recent.match(SentPrompt.of("a", [user(f"other {count}")], [], {}, range(10)))
    assert len(recent._prompts) == 3
    recent.match(SentPrompt.of("a", [user("long")], [], {}, range(100_000)))
    assert len(recent._prompts) == 3, "more than there is room for"
