"""Which requests are recognised as a client's own, by the words of its prompts."""

from typing import Any

import pytest

from mlx_backend.conversation.background_requests import (
    MAX_CHARACTERS,
    MAX_PARTS,
    PROMPTS,
    BackgroundPrompt,
    answer_reserve,
    find_background_prompt,
)

TAGS = "### Task:\nGenerate 1-3 broad tags categorizing the main themes of the chat history.\n"
HISTORY = "### Chat History:\n<chat_history>\nUSER: What is the capital of France?\n</chat_history>"
ZED = "Generate a concise 3-7 word title for this conversation, omitting punctuation."


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def found(*messages: Any, stream: bool = False) -> str | None:
    prompt = find_background_prompt(messages, stream=stream)
    return None if prompt is None else str(prompt)


@pytest.mark.parametrize("prompt", PROMPTS, ids=str)
def test_every_prompt_is_recognised_by_each_of_its_words_and_by_no_other_clients(
    prompt: BackgroundPrompt,
) -> None:
    for words in prompt.words:
        assert find_background_prompt([user(f"Now: {words} …")], stream=False) is prompt


def test_the_words_stand_in_the_last_message_or_in_a_short_conversation() -> None:
    system = {"role": "system", "content": "Be brief."}
    title = {"role": "system", "content": "You are a title generator. You output ONLY a thread title."}
    turns = [user("hi"), {"role": "assistant", "content": "Hello."}] * 40
    assert found(system, user(TAGS + HISTORY)) == "Open WebUI, tags"
    assert (
        found(title, user("hi")) == found(title, user("Generate a title:\n"), user("hi")) == "opencode, title"
    )
    assert found(*turns, user(ZED)) == "Zed, title"
    assert found(user(ZED), *turns, user("hi")) is None
    assert found(title, *turns, user("hi")) is None


def test_a_tools_result_or_an_answer_may_quote_the_words() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": []}
    assert found(user("hi"), call, {"role": "tool", "tool_call_id": "1", "content": TAGS}) is None
    assert found(user("hi"), {"role": "assistant", "content": TAGS}) is None


def test_a_client_that_never_streams_a_prompt_is_not_recognised_in_a_stream() -> None:
    assert found(user(TAGS)) == "Open WebUI, tags"
    assert found(user(TAGS), stream=True) is None
    assert found(user(ZED), stream=True) == found(user(ZED)) == "Zed, title"


def test_the_words_may_stand_before_or_behind_a_long_history_but_not_in_its_midst() -> None:
    long = "Human: hello\n" * 100_000
    assert found(user(TAGS + long)) == found(user(long + TAGS)) == "Open WebUI, tags"
    assert found(user(long + TAGS + long)) is None
    assert found(user("x" * MAX_CHARACTERS + TAGS + "x" * MAX_CHARACTERS)) is None


def test_content_in_parts_is_looked_at_from_both_ends() -> None:
    parts = [{"type": "text", "text": "hello"}] * MAX_PARTS
    tags = [{"type": "text", "text": TAGS}]
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    for content in (tags, image + tags, tags + parts, parts + tags, tags + 1000 * parts, 1000 * parts + tags):
        assert found(user(content)) == "Open WebUI, tags"
    assert found(user(1000 * parts + tags + 1000 * parts)) is None


@pytest.mark.parametrize(
    "messages",
    [[], [None], ["hello"], [{}], [{"role": "user"}], [user(None)], [user(7)], [user([None, {"text": 7}])]],
)
def test_malformed_messages_are_left_to_those_who_refuse_them(messages: list[Any]) -> None:
    assert find_background_prompt(messages, stream=False) is None


def test_most_of_the_tokens_are_for_the_answer() -> None:
    assert [answer_reserve(tokens) for tokens in (1, 2, 16, 1000)] == [1, 1, 9, 600]
