"""Text completions over HTTP, and several choices in both kinds of reply."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
from engine_models import write_mamba
from engine_requests import engine_and_batch
from running_server import RunningServer, running
from scripted_engine import ScriptedEngine, ScriptedTokenizer, Transcript
from scripted_server import ANSWER, client_of

from mlx_backend.api.openai.completions import CompletionBody
from mlx_backend.chat.request import CompletionRequest
from mlx_backend.chat.service import Service
from mlx_backend.demo import MODEL_PATH
from mlx_backend.engine.mlx import load_engine
from mlx_backend.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from werkzeug.test import Client


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine(lambda _: ANSWER) as engine:
        yield engine


@pytest.fixture
def client(engine: ScriptedEngine) -> Client:
    return client_of(engine)


def test_a_plain_completion_is_the_models_own_text(engine: ScriptedEngine, client: Client) -> None:
    for prompt in ("<|start|>assistant", engine.tokenizer.encode("<|start|>assistant", control_tokens=True)):
        body = client.post("/v1/completions", json={"prompt": prompt}).get_json()
        assert body["object"] == "text_completion"
        assert body["choices"][0]["text"] == ANSWER.removesuffix("<|return|>")
        assert engine.requests[-1].prompt == "<|start|>assistant"
    response = client.post("/completions", json={"prompt": "x", "stream": True, "stop": "France"})
    events = response.get_data(as_text=True).split("\n\n")
    chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == ANSWER[: ANSWER.index("France")]


# -- several prompts, several choices, and the prompt's own tokens; with the demo model -------------------------------

HELLO = "<|start|>user<|message|>Say hello.<|end|><|start|>assistant<|channel|>final<|message|>"
FRANCE = "<|start|>user<|message|>What is the capital of France?<|end|><|start|>assistant"
CHAT = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with load_engine(MODEL_PATH) as engine, running(engine) as server:
        yield server


def completed(server: RunningServer, path: str = "/v1/completions", /, **fields: Any) -> Any:
    status, reply = server.call(path, fields)
    assert status == 200, reply
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(reply["choices"])))
    return reply


def events_of(server: RunningServer, path: str = "/v1/completions", /, **fields: Any) -> list[dict[str, Any]]:
    with server.open(path, {**fields, "stream": True}) as response:
        events = response.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event[6:]) for event in events[:-2] if event.startswith("data: {")]


def texts_of(reply: Any) -> list[str]:
    return [choice["text"] for choice in reply["choices"]]


def joined(chunks: list[dict[str, Any]], key: str = "text") -> dict[int, str]:
    found: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            piece = choice["text"] if key == "text" else choice["delta"].get(key, "")
            found[choice["index"]] = found.get(choice["index"], "") + piece
    return found


def tokens_of(server: RunningServer, text: str) -> list[int]:
    _, counted = server.call("/v1/tokenize", {"prompt": text})
    tokens: list[int] = counted["tokens"]
    return tokens


def test_several_prompts_are_answered_in_their_order_each_as_if_alone(server: RunningServer) -> None:
    prompts = [HELLO, FRANCE, "Count"]
    alone = [completed(server, prompt=each, max_tokens=12) for each in prompts]
    ids = [tokens_of(server, each) for each in prompts]
    for written in (prompts, ids, [prompts[0], ids[1], prompts[2]]):
        together = completed(server, prompt=written, max_tokens=12)
        assert texts_of(together) == [text for each in alone for text in texts_of(each)]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert together["usage"][name] == sum(each["usage"][name] for each in alone)
    assert joined(events_of(server, prompt=prompts, max_tokens=12)) == dict(enumerate(texts_of(together)))


def test_far_too_many_prompts_are_refused_without_a_request_for_each(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled: list[CompletionBody] = []

    def sampling(body: CompletionBody) -> dict[str, Any]:
        sampled.append(body)
        return {}

    monkeypatch.setattr(CompletionBody, "sampling", sampling)
    response = client.post("/v1/completions", json={"prompt": ["x"] * 90_000})
    assert response.status_code == 400
    assert "90000 prompts" in response.get_json()["error"]["message"]
    assert len(sampled) == 1


def test_each_of_n_choices_has_the_seed_that_follows_and_a_prompt_counts_once(server: RunningServer) -> None:
    sampled = {"temperature": 1.2, "max_tokens": 12}
    prompts = [FRANCE, "Count"]
    reply = completed(server, prompt=prompts, n=3, best_of=3, seed=7, **sampled)
    single = [completed(server, prompt=prompt, seed=7 + i, **sampled) for prompt in prompts for i in range(3)]
    assert texts_of(reply) == [text for each in single for text in texts_of(each)]
    assert len(set(texts_of(reply)[3:])) > 1
    usage = reply["usage"]
    assert usage["completion_tokens"] == sum(each["usage"]["completion_tokens"] for each in single)
    assert usage["prompt_tokens"] == sum(len(tokens_of(server, prompt)) for prompt in prompts)
    streamed = events_of(
        server, prompt=prompts, n=3, seed=7, stream_options={"include_usage": True}, **sampled
    )
    assert joined(streamed) == dict(enumerate(texts_of(reply)))
    assert streamed[-1]["usage"]["total_tokens"] == usage["total_tokens"]


def test_a_conversation_gets_n_replies_each_with_its_reasoning_and_its_end(server: RunningServer) -> None:
    asked = {"messages": QUESTION, "n": 3, "seed": 3, "temperature": 1.0}
    reply = completed(server, CHAT, **asked)
    messages = [choice["message"] for choice in reply["choices"]]
    assert all(message["reasoning_content"] for message in messages)
    chunks = events_of(server, CHAT, **asked)
    assert joined(chunks, "content") == {at: each["content"] for at, each in enumerate(messages)}
    assert joined(chunks, "reasoning_content") == {
        at: each["reasoning_content"] for at, each in enumerate(messages)
    }
    roles = [chunk["choices"][0] for chunk in chunks if "role" in chunk["choices"][0]["delta"]]
    assert sorted(choice["index"] for choice in roles) == [0, 1, 2]
    ends = [choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]
    assert [("timings" in chunk) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.parametrize("model", ["demo", "hybrid"])
def test_the_prompt_of_n_choices_is_prefilled_once(model: str, tmp_path: Path) -> None:
    path = MODEL_PATH if model == "demo" else write_mamba(tmp_path)
    with engine_and_batch(path) as (engine, _):
        prompt = tuple(at % 250 for at in range(300))
        request = CompletionRequest(prompt=prompt, max_tokens=4, sampling={"temperature": 1.0})
        group = Service(engine).complete_replies(request, [prompt], 4)
        list(group.events())
        cached = [reply.usage.cached_tokens for reply in group.replies]
        assert cached == [0, 299, 299, 299]
        assert (group.usage.prompt_tokens, group.usage.cached_tokens) == (300, 0)
        assert group.usage.completion_tokens == 16


def test_a_client_that_leaves_ends_all_of_its_choices() -> None:
    all_started = threading.Event()

    def script(_prompt: str) -> str:
        if len(gated.requests) == 4:
            all_started.set()
        return "word " * 1000

    with ScriptedEngine(script, gated=True) as gated, running(gated) as server:
        connection = server.send({"prompt": ["a", "b"], "n": 2, "stream": True}, "/v1/completions")
        assert all_started.wait(60)
        connection.close()
        assert all(request.cancelled.wait(60) for request in gated.requests)


def test_a_choice_that_fails_ends_the_others_and_is_the_replys_error() -> None:
    failing = Transcript(text="some words", failure=EngineError("It broke."))

    def script(prompt: str) -> str | Transcript:
        if prompt == "a":
            return "word " * 1000
        gated.advance(20)  # not before both have started
        return failing

    with ScriptedEngine(script, gated=True) as gated:
        response = client_of(gated).post("/v1/completions", json={"prompt": ["a", "b"]})
        assert (response.status_code, response.get_json()["error"]["message"]) == (500, "It broke.")
        assert gated.requests[0].cancelled.wait(60)


def test_more_choices_than_run_at_a_time_wait_for_each_other() -> None:
    with ScriptedEngine(lambda _: "one two<|return|>", max_concurrent=2) as engine:
        client = client_of(engine, queue_seconds=0.001)
        reply = client.post("/v1/completions", json={"prompt": ["a", "b"], "n": 10}).get_json()
        assert texts_of(reply) == ["one two"] * 20


def test_an_echoed_prompt_comes_first_and_alone_if_nothing_is_to_be_generated(server: RunningServer) -> None:
    reply = completed(server, prompt=[HELLO, tokens_of(server, "Count é🙂")], echo=True, max_tokens=3)
    assert texts_of(reply)[0] == HELLO + "hello"
    assert texts_of(reply)[1].startswith("Count é🙂")
    chunks = events_of(server, prompt=[HELLO], echo=True, max_tokens=3, n=2)
    assert joined(chunks) == {0: HELLO + "hello", 1: HELLO + "hello"}
    for fields in ({}, {"logprobs": 1}):
        only = completed(server, prompt="Say hello.", echo=True, max_tokens=0, **fields)
        assert texts_of(only) == ["Say hello."]
        assert only["choices"][0]["finish_reason"] == "length"
        assert only["usage"]["completion_tokens"] == 0
        assert ("logprobs" in only["choices"][0]) is bool(fields)


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_a_harness_gets_the_log_probability_of_each_token_of_the_prompt(
    server: RunningServer, max_tokens: int
) -> None:
    text = HELLO + "hello, Zoë 🙂 again"
    tokens = tokens_of(server, text)
    asked = {"prompt": [tokens, text], "echo": True, "logprobs": 2, "max_tokens": max_tokens}
    reply = completed(server, **asked)
    for choice in reply["choices"]:
        columns, shown = choice["logprobs"], choice["text"]
        generated = reply["usage"]["completion_tokens"] // 2
        assert {len(column) for column in columns.values()} == {len(tokens) + generated}
        assert columns["token_logprobs"][0] is columns["top_logprobs"][0] is None
        for at, (token, value, top, offset) in enumerate(
            zip(
                *(columns[key] for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")),
                strict=True,
            )
        ):
            if not token.startswith("bytes:") and token != "<|return|>":
                assert shown[offset:].startswith(token), (at, token)
            if at:
                assert value == top[token] <= max(top.values()) <= 0
                assert 2 <= len(top) <= 3
        # What the model itself writes after the same text is as likely there.
        greedy = completed(server, prompt=tokens[: len(tokens_of(server, HELLO))], logprobs=0, max_tokens=1)
        first = len(tokens_of(server, HELLO))
        assert columns["tokens"][first] == greedy["choices"][0]["text"]
        assert columns["token_logprobs"][first] == pytest.approx(
            greedy["choices"][0]["logprobs"]["token_logprobs"][0], abs=1e-3
        )
    chunks = events_of(server, **asked)
    for at, choice in enumerate(reply["choices"]):
        streamed = [
            entry
            for chunk in chunks
            for each in chunk["choices"]
            if each["index"] == at and each.get("logprobs")
            for entry in each["logprobs"]["tokens"]
        ]
        assert streamed == choice["logprobs"]["tokens"]


@pytest.mark.parametrize("stop", [None, [" fr"], ["zzz"]])
def test_there_are_as_many_log_probabilities_as_completion_tokens(
    server: RunningServer, stop: list[str] | None
) -> None:
    for prompt in (FRANCE, HELLO):
        for fields in ({"max_tokens": 7}, {"max_tokens": 40}):
            asked = {"prompt": prompt, "logprobs": 0, "stop": stop, **fields}
            reply = completed(server, **asked)
            columns = reply["choices"][0]["logprobs"]
            count = reply["usage"]["completion_tokens"]
            assert {len(column) for column in columns.values()} == {count}
            assert [*map(len, columns["top_logprobs"])] == [1] * count
            streamed = [
                token
                for chunk in events_of(server, **asked)
                for token in (chunk["choices"][0].get("logprobs") or {"tokens": []})["tokens"]
            ]
            assert streamed == columns["tokens"]


def test_a_stream_says_what_was_used_so_far_and_how_far_prefill_is_if_asked_for(
    server: RunningServer,
) -> None:
    for path, fields in (("/v1/completions", {"prompt": "Count to 3."}), (CHAT, {"messages": QUESTION})):
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = events_of(
            server, path, stream_options=options, max_tokens=6, n=2, return_progress=True, **fields
        )
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[0] == 0
        assert counts[-1] == 12
        assert chunks[-1]["choices"] == []
        progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
        assert progress
        for each in progress:
            assert each["total"] == each["processed"] >= each["cache"] >= 0
            assert each["time_ms"] >= 0
        plain = events_of(server, path, max_tokens=6, **fields)
        assert not any("usage" in chunk or "prompt_progress" in chunk for chunk in plain)


def test_what_has_no_meaning_for_a_bare_text_is_named(client: Client) -> None:
    asked = {"prompt": "a", "reasoning_effort": "low", "think": True, "tools": []}
    response = client.post("/v1/completions", json=asked)
    assert response.headers["x-mlx-backend-ignored"] == "reasoning_effort, think, tools"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_a_limit_has_several_names(engine: ScriptedEngine, client: Client, name: str) -> None:
    response = client.post("/v1/completions", json={"prompt": "a", name: 3})
    assert "x-mlx-backend-ignored" not in response.headers
    assert engine.requests[-1].request.max_tokens == 3


class WithBos(ScriptedTokenizer):
    """The vocabulary of a model whose prompts begin with a token of their own."""

    @property
    def bos_tokens(self) -> Sequence[int]:
        return self.encode("<|startoftext|>", control_tokens=True)


def test_a_text_begins_with_the_bos_token_once_unless_it_is_not_wanted() -> None:
    with ScriptedEngine(lambda _: "x", tokenizer=WithBos()) as engine:
        client = client_of(engine)
        for fields, prompt in (
            ({"prompt": "a"}, "<|startoftext|>a"),
            ({"prompt": "<|startoftext|>a"}, "<|startoftext|>a"),
            ({"prompt": "a", "add_special_tokens": False}, "a"),
        ):
            echoed = {"echo": True, "max_tokens": 0, **fields}
            text = client.post("/v1/completions", json=echoed).get_json()["choices"][0]["text"]
            assert (engine.requests[-1].prompt, text) == (prompt, fields["prompt"])
