"""Requests that Dify makes by itself: run at low effort, answered without a thinking block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from dify_view import text_of, user
from invocations import GPT_OSS, TITLE, sent

if TYPE_CHECKING:
    from conftest import Stub
    from daemon import PluginProcess


QUESTIONS = (
    "Human: hi\nPlease help me predict the three most likely questions that human would ask …\nquestions:\n"
)


CODE = "You are an expert programmer. Generate code based on the following instructions:\n\nInstructions: add"


@pytest.mark.parametrize("prompt", [TITLE, QUESTIONS])
def test_background_requests_run_at_the_lowest_effort_and_are_answered_without_a_block(
    plugin: PluginProcess, stub: Stub, prompt: str
) -> None:
    stub.will_stream({"reasoning_content": "{}"}, {"content": '{"Your Output": "<think> tags"}'})
    settings = {"temperature": 1, "max_tokens": 500}
    chunks = list(
        plugin.invoke(
            [user(prompt)], credentials=stub.credentials, model=GPT_OSS, parameters=settings, stream=False
        )
    )
    assert text_of(chunks) == '{"Your Output": "<think> tags"}'
    body = stub.take_requests()[0]["body"]
    assert (body["reasoning_effort"], body["priority"], body["answer_reserve"]) == ("low", 1, 300)


def test_a_background_request_switches_reasoning_off_where_it_can(plugin: PluginProcess, stub: Stub) -> None:
    settings = {"max_tokens": 256}
    body = sent(plugin, stub, [user("hi")], model="default", parameters=settings, stream=False)
    assert body["reasoning_effort"] == "none"


def test_a_generator_without_a_token_limit_is_a_background_request_too(
    plugin: PluginProcess, stub: Stub
) -> None:
    stub.will_stream({"reasoning_content": "easy"}, {"content": "def main(): ..."})
    chunks = list(plugin.invoke([user(CODE)], credentials=stub.credentials, model=GPT_OSS, stream=False))
    assert text_of(chunks) == "def main(): ..."
    body = stub.take_requests()[0]["body"]
    assert (body["reasoning_effort"], body["priority"]) == ("low", 1)
    assert (body["max_tokens"], body["answer_reserve"]) == (32_768, 32_768 * 3 // 5)


def test_a_chosen_effort_is_kept(plugin: PluginProcess, stub: Stub) -> None:
    settings = {"reasoning_effort": "medium", "max_tokens": 500}
    body = sent(plugin, stub, [user(CODE)], model=GPT_OSS, parameters=settings, stream=False)
    assert body["reasoning_effort"] == "medium"
    assert "priority" not in body


def test_a_streamed_request_with_a_small_limit_is_no_background_request(
    plugin: PluginProcess, stub: Stub
) -> None:
    body = sent(plugin, stub, [user("hi")], model=GPT_OSS, parameters={"max_tokens": 500})
    assert (body["reasoning_effort"], body["answer_reserve"]) == ("medium", 250)
    assert "priority" not in body


def test_a_background_request_to_another_server_omits_mlx_backends_fields(
    plugin: PluginProcess, stub: Stub
) -> None:
    stub.will_stream({"content": "ok"})
    form = {**stub.credentials, "server_kind": "other"}
    settings = {"max_tokens": 500}
    list(plugin.invoke([user(TITLE)], credentials=form, model=GPT_OSS, parameters=settings, stream=False))
    body = stub.take_requests()[0]["body"]
    assert body["reasoning_effort"] == "low"
    assert not {"priority", "answer_reserve"} & body.keys()


def test_the_same_words_in_a_conversation_are_no_background_request(
    plugin: PluginProcess, stub: Stub
) -> None:
    assert sent(plugin, stub, [user(TITLE)])["reasoning_effort"] == "medium"
    assert sent(plugin, stub, [user("hi")], stream=False)["reasoning_effort"] == "medium"


def test_json_requested_in_the_prompt_comes_without_a_block_even_when_streamed(
    plugin: PluginProcess, stub: Stub
) -> None:
    stub.will_stream({"reasoning_content": '{"b": 0}'}, {"content": '{"a": 1}'})
    words = (
        "You’re a helpful AI assistant. You could answer questions and output in JSON format.\nconstraints:"
    )
    messages = [{"role": "system", "content": words}, user("My name is John.")]
    assert text_of(list(plugin.invoke(messages, credentials=stub.credentials))) == '{"a": 1}'
