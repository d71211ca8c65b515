"""Log probabilities as OpenAI writes them, for the answer's tokens and no others."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
from running_server import RunningServer, running
from scripted_engine import ScriptedEngine
from scripted_server import CALL, WEATHER, answered, client_of

from mlx_backend.demo import MODEL_PATH
from mlx_backend.engine.mlx import load_engine

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with load_engine(MODEL_PATH) as engine, running(engine) as server:
        yield server


def only_choice(reply: Any) -> Any:
    [only] = reply["choices"]
    return only


def test_the_tokens_of_the_answer_are_reported_and_spell_it(server: RunningServer) -> None:
    choice = only_choice(server.chat(FRANCE, logprobs=True, top_logprobs=3))
    content = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    assert (
        bytes(byte for entry in content for byte in entry["bytes"]).decode() == choice["message"]["content"]
    )
    for entry in content:
        assert entry.keys() == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == 3
        best, *others = entry["top_logprobs"]
        assert best == {key: entry[key] for key in ("token", "logprob", "bytes")}, (
            "greedy takes the likeliest"
        )
        assert all(other["logprob"] <= best["logprob"] <= 0 for other in others)


def test_streamed_logprobs_come_with_their_deltas_and_add_up_to_the_whole(server: RunningServer) -> None:
    whole = only_choice(server.chat(FRANCE, logprobs=True, top_logprobs=2))["logprobs"]["content"]
    chunks = [only_choice(chunk) for chunk in server.chunks(FRANCE, logprobs=True, top_logprobs=2)]
    streamed = []
    for chunk in chunks:
        if logprobs := chunk.get("logprobs"):
            assert "".join(entry["token"] for entry in logprobs["content"]) == chunk["delta"]["content"]
            streamed += logprobs["content"]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in whole]
    for one, other in zip(streamed, whole, strict=True):
        assert math.isclose(one["logprob"], other["logprob"], abs_tol=1e-4)


def test_without_top_logprobs_the_lists_are_there_and_empty(server: RunningServer) -> None:
    content = only_choice(server.chat(FRANCE, logprobs=True))["logprobs"]["content"]
    assert content
    assert all(entry["top_logprobs"] == [] for entry in content)


def test_logprobs_are_sent_only_on_request(server: RunningServer) -> None:
    assert "logprobs" not in only_choice(server.chat(FRANCE))
    assert "logprobs" not in only_choice(server.chat(FRANCE, logprobs=False))


def test_tokens_cut_by_a_stop_string_are_not_reported(server: RunningServer) -> None:
    choice = only_choice(server.chat(FRANCE, logprobs=True, stop=[" is"]))
    assert choice["message"]["content"] == "The capital of France"
    text = "".join(entry["token"] for entry in choice["logprobs"]["content"])
    assert text == "The capital of France"


def test_text_that_might_have_become_a_stop_string_keeps_its_tokens_where_a_call_comes_instead() -> None:
    answer = (
        "<|channel|>final<|message|>Let me look.<|end|><|start|>assistant"
        + CALL.rpartition("<|start|>assistant")[2]
    )
    with ScriptedEngine([answer]) as engine:
        reply = answered(client_of(engine), tools=[WEATHER], logprobs=True, stop=["look. No"])
    choice = only_choice(reply.get_json())
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me look."
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == "Let me look."


def test_text_completions_have_columns(server: RunningServer) -> None:
    prompt = "<|start|>user<|message|>Say hello.<|end|><|start|>assistant<|channel|>final<|message|>"
    body = {"prompt": prompt, "logprobs": 2, "max_tokens": 20}
    status, reply = server.call("/v1/completions", body)
    assert status == 200
    choice = only_choice(reply)
    columns = choice["logprobs"]
    assert columns.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert "".join(columns["tokens"]) == choice["text"] + "<|return|>"
    assert len(columns["tokens"]) == reply["usage"]["completion_tokens"]
    assert columns["text_offset"][0] == 0
    for offset, token in zip(columns["text_offset"], columns["tokens"], strict=True):
        assert (choice["text"] + "<|return|>")[offset:].startswith(token)
    for token, value, top in zip(
        columns["tokens"], columns["token_logprobs"], columns["top_logprobs"], strict=True
    ):
        assert top[token] == value
        assert len(top) == 2
