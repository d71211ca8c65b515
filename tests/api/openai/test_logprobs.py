"""Log probabilities as OpenAI writes them, for the answer's tokens and no others."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
from running_server import RunningServer, running

from mlx_backend.demo import MODEL_PATH
from mlx_backend.engine.mlx import load_engine

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with load_engine(MODEL_PATH) as engine, running(engine) as server:
        yield server


def choice(reply: Any) -> Any:
    [only] = reply["choices"]
    return only


def test_the_tokens_of_the_answer_are_reported_and_spell_it(server: RunningServer) -> None:
    told = choice(server.chat(FRANCE, logprobs=True, top_logprobs=3))
    content = told["logprobs"]["content"]
    assert told["logprobs"]["refusal"] is None
    assert "".join(entry["token"] for entry in content) == told["message"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == told["message"]["content"]
    for entry in content:
        assert entry.keys() == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == 3
        best, *others = entry["top_logprobs"]
        assert best == {key: entry[key] for key in ("token", "logprob", "bytes")}, (
            "greedy takes the likeliest"
        )
        assert all(other["logprob"] <= best["logprob"] <= 0 for other in others)


def test_streamed_they_come_with_their_deltas_and_add_up_to_the_same(server: RunningServer) -> None:
    whole = choice(server.chat(FRANCE, logprobs=True, top_logprobs=2))["logprobs"]["content"]
    chunks = [choice(chunk) for chunk in server.chunks(FRANCE, logprobs=True, top_logprobs=2)]
    streamed = []
    for chunk in chunks:
        if logprobs := chunk.get("logprobs"):
            assert "".join(entry["token"] for entry in logprobs["content"]) == chunk["delta"]["content"]
            streamed += logprobs["content"]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in whole]
    for one, other in zip(streamed, whole, strict=True):
        assert math.isclose(one["logprob"], other["logprob"], abs_tol=1e-4)


def test_without_top_logprobs_the_lists_are_there_and_empty(server: RunningServer) -> None:
    content = choice(server.chat(FRANCE, logprobs=True))["logprobs"]["content"]
    assert content
    assert all(entry["top_logprobs"] == [] for entry in content)


def test_nobody_gets_them_unasked(server: RunningServer) -> None:
    assert "logprobs" not in choice(server.chat(FRANCE))
    assert "logprobs" not in choice(server.chat(FRANCE, logprobs=False))


def test_what_a_stop_string_takes_away_is_not_reported(server: RunningServer) -> None:
    told = choice(server.chat(FRANCE, logprobs=True, stop=[" is"]))
    assert told["message"]["content"] == "The capital of France"
    said = "".join(entry["token"] for entry in told["logprobs"]["content"])
    assert said == "The capital of France"


def test_text_completions_have_columns(server: RunningServer) -> None:
    prompt = "<|start|>user<|message|>Say hello.<|end|><|start|>assistant<|channel|>final<|message|>"
    body = {"prompt": prompt, "logprobs": 2, "max_tokens": 20}
    status, reply = server.call("/v1/completions", body)
    assert status == 200
    told = choice(reply)
    columns = told["logprobs"]
    assert columns.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert "".join(columns["tokens"]) == told["text"]
    assert columns["text_offset"][0] == 0
    for offset, token in zip(columns["text_offset"], columns["tokens"], strict=True):
        assert told["text"][offset:].startswith(token)
    for token, value, top in zip(
        columns["tokens"], columns["token_logprobs"], columns["top_logprobs"], strict=True
    ):
        assert top[token] == value
        assert len(top) == 2
