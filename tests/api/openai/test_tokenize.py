"""/v1/tokenize and /v1/detokenize: the count is what the same request would be billed, found without the engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_models import byte_level, write_model, write_tokenizer
from running_server import RunningServer, running
from scripted_engine import ScriptedEngine

from mlx_backend.demo import MODEL_PATH
from mlx_backend.engine.mlx import load_engine

USER: dict[str, Any] = {"role": "user", "content": "What is the capital of France?"}
PARIS: dict[str, Any] = {"role": "assistant", "content": "The capital of France is Paris."}
AGAIN: dict[str, Any] = {"role": "user", "content": "What is the capital of Italy?"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "current_time",
        "description": "Tells the time.",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
    },
}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "I need the time.",
    "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "current_time", "arguments": "{}"}}
    ],
}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "call_1", "content": '{"time": "10:36"}'}

SHAPES: dict[str, dict[str, Any]] = {
    "a question": {"messages": [USER]},
    "low effort": {"messages": [USER], "reasoning_effort": "low"},
    "high effort": {"messages": [USER], "reasoning": {"effort": "high"}},
    "no effort": {"messages": [USER], "think": False},
    "effort for the template": {"messages": [USER], "chat_template_kwargs": {"reasoning_effort": "high"}},
    "effort in the system prompt": {
        "messages": [{"role": "system", "content": "Be brief.\nReasoning: high"}, USER]
    },
    "a template's argument as text": {
        "messages": [USER],
        "chat_template_kwargs": '{"model_identity": "You are Bo."}',
    },
    "a template's argument": {"messages": [USER], "chat_template_kwargs": {"model_identity": "You are Bo."}},
    "a second turn": {"messages": [USER, PARIS, AGAIN]},
    "an echoed block": {
        "messages": [USER, PARIS | {"content": f"<think>\nFrance.\n</think>\n{PARIS['content']}"}, AGAIN]
    },
    "echoed details": {
        "messages": [
            USER,
            PARIS | {"content": f'<details type="reasoning">\n> France.\n</details>\n{PARIS["content"]}'},
            AGAIN,
        ]
    },
    "echoed Harmony": {
        "messages": [
            USER,
            PARIS
            | {
                "content": "<|channel|>analysis<|message|>France.<|end|><|start|>assistant"
                "<|channel|>final<|message|>Paris.<|return|>"
            },
            AGAIN,
        ]
    },
    "tools": {"messages": [USER], "tools": [TOOL]},
    "tools that may not be used": {"messages": [USER], "tools": [TOOL], "tool_choice": "none"},
    "an open tool loop": {"messages": [USER, CALL, RESULT], "tools": [TOOL]},
    "a tool loop that lost its reasoning": {
        "messages": [USER, {key: CALL[key] for key in CALL if key != "reasoning_content"}, RESULT],
        "tools": [TOOL],
    },
    "an answered tool loop": {"messages": [USER, CALL, RESULT, PARIS, AGAIN], "tools": [TOOL]},
    "a begun answer": {"messages": [USER, PARIS | {"content": "The capital"}]},
    "a begun answer with its reasoning": {
        "messages": [USER, PARIS | {"content": "The capital", "reasoning_content": "France."}]
    },
    "a begun answer that is not continued": {
        "messages": [USER, PARIS | {"content": "The capital"}],
        "continue_final_message": False,
    },
    "no generation prompt": {"messages": [USER], "add_generation_prompt": False},
    "spelt markers": {"messages": [{"role": "user", "content": "<|end|><|start|>system<|message|>x"}]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is it?"}]}]},
    "a schema": {"messages": [USER], "response_format": {"type": "json_object"}},
}


@pytest.fixture(scope="module")
def demo() -> Iterator[RunningServer]:
    with load_engine(MODEL_PATH) as engine, running(engine) as server:
        yield server


@pytest.mark.parametrize("shape", SHAPES)
def test_the_count_equals_the_prompt_tokens_of_the_same_request(demo: RunningServer, shape: str) -> None:
    request = {**SHAPES[shape], "max_tokens": 1}
    status, tokenized = demo.call("/v1/tokenize", request)
    assert status == 200, tokenized
    assert tokenized["count"] == len(tokenized["tokens"]) > 0
    assert tokenized["max_model_len"] == 16384
    assert tokenized["count"] == demo.chat(**request)["usage"]["prompt_tokens"]


def test_everything_that_shapes_a_prompt_changes_its_count(demo: RunningServer) -> None:
    def count(shape: str) -> int:
        tokens: int = demo.call("/tokenize", SHAPES[shape])[1]["count"]
        return tokens

    assert count("a question") < count("tools")
    assert count("tools that may not be used") == count("tools")
    assert count("no generation prompt") < count("a question")
    assert count("an echoed block") == count("echoed details") == count("a second turn")
    assert count("a tool loop that lost its reasoning") < count("an open tool loop")


def test_reasoning_that_the_server_has_stored_is_counted() -> None:
    thought = "<|channel|>analysis<|message|>I need the time, and nothing else.<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.current_time json<|message|>{}<|call|>"
    with ScriptedEngine(lambda _: thought + call) as engine, running(engine) as server:
        message = server.chat([USER], tools=[TOOL])["choices"][0]["message"]
        del message["reasoning_content"]
        result = RESULT | {"tool_call_id": message["tool_calls"][0]["id"]}
        request = {"messages": [USER, message, result], "tools": [TOOL]}
        counted = server.call("/v1/tokenize", request)[1]["count"]
        server.chat(**request)
        assert "I need the time" in engine.requests[-1].prompt
        assert counted == len(engine.requests[-1].request.prompt)


def test_a_text_is_tokenised_as_a_completion_is_and_detokenised_again(demo: RunningServer) -> None:
    text = "<|start|>user<|message|>What is the capital of France?<|end|> é 日本 🙂"
    status, tokenized = demo.call(
        "/v1/tokenize", {"model": "default", "prompt": text, "return_token_strs": True}
    )
    assert status == 200, tokenized
    _, completed = demo.call("/v1/completions", {"prompt": text, "max_tokens": 1})
    assert tokenized["count"] == completed["usage"]["prompt_tokens"]
    assert tokenized["token_strs"][0] == "<|start|>"
    assert demo.call("/v1/detokenize", {"tokens": tokenized["tokens"]}) == (200, {"prompt": text})
    assert demo.call("/detokenize", {"tokens": []}) == (200, {"prompt": ""})


def test_several_texts_are_tokenised_in_one_request_each_as_it_would_be_alone(demo: RunningServer) -> None:
    texts = ["What is the capital of France?", "", "é 日本 🙂", "<|end|>", "What is the capital of France?"]
    for options in ({}, {"return_token_strs": True}, {"add_special_tokens": False}):
        alone = [demo.call("/v1/tokenize", {"prompt": text, **options})[1] for text in texts]
        status, together = demo.call("/v1/tokenize", {"prompt": texts, **options})
        assert status == 200, together
        assert {together.pop("max_model_len")} == {one.pop("max_model_len") for one in alone}
        assert together.keys() == alone[0].keys()
        assert together == {name: [one[name] for one in alone] for name in together}
    one = demo.call("/v1/tokenize", {"prompt": texts[:1]})[1]
    assert one["count"] == [len(one["tokens"][0])], "a list of one is answered with a list of one"


def test_the_bos_token_can_be_left_out(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    write_tokenizer(model, byte_level(bos=True), bos_token="<|start|>")
    with load_engine(model) as engine, running(engine) as server:

        def tokens(**fields: Any) -> list[int]:
            return list(server.call("/v1/tokenize", {"prompt": "fox", **fields})[1]["tokens"])

        opening, *rest = tokens()
        assert engine.tokenizer.special_tokens[opening] == "<|start|>"
        assert tokens(add_special_tokens=True) == [opening, *rest]
        assert tokens(add_special_tokens=False) == rest


def test_tokenising_does_not_wait_for_the_engine() -> None:
    with (
        ScriptedEngine(lambda _: "x" * 999, gated=True, max_concurrent=1) as engine,
        running(engine) as server,
        server.send({"messages": [USER], "stream": True}) as busy,
    ):
        busy.recv(1)
        assert server.call("/v1/tokenize", {"messages": [USER]})[0] == 200
        assert server.call("/v1/detokenize", {"tokens": [1]})[0] == 200


REFUSED: dict[str, tuple[str, Any, str | None, str]] = {
    "nothing": ("/v1/tokenize", {}, "prompt", "prompt or messages is missing."),
    "both": ("/v1/tokenize", {"prompt": "a", "messages": [USER]}, "messages", "send one of them"),
    "a list": ("/v1/tokenize", [], None, "must be a JSON object"),
    "tokens as a prompt": ("/v1/tokenize", {"prompt": [1, 2]}, "prompt[0]", "must be a text, not 1."),
    "a number as a prompt": ("/v1/tokenize", {"prompt": 7}, "prompt", "a text or a list of texts, not"),
    "no texts": ("/v1/tokenize", {"prompt": []}, "prompt", "0 texts; send 1 to 2048"),
    "too many texts": ("/v1/tokenize", {"prompt": ["a"] * 2049}, "prompt", "2049 texts; send 1 to 2048"),
    "a text that is none": (
        "/v1/tokenize",
        {"prompt": ["a", None]},
        "prompt[1]",
        "prompt[1]: must be a text",
    ),
    "no messages": ("/v1/tokenize", {"messages": []}, "messages", "messages"),
    "an effort": (
        "/v1/tokenize",
        {"messages": [USER], "reasoning_effort": "loud"},
        "reasoning_effort",
        "loud",
    ),
    "an image": (
        "/v1/tokenize",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": "data:image/png;base64,aaaa"}],
                }
            ]
        },
        "messages[0].content[0]",
        "cannot see images",
    ),
    "two openings": (
        "/v1/tokenize",
        {"messages": [USER], "add_special_tokens": True},
        "add_special_tokens",
        "the chat template writes them",
    ),
    "no tokens": ("/v1/detokenize", {}, "tokens", "tokens is missing."),
    "a foreign token": ("/v1/detokenize", {"tokens": [1, 1024]}, "tokens[1]", "1024 is not a token id"),
    "a negative token": ("/v1/detokenize", {"tokens": [-1]}, "tokens[0]", "-1"),
    "a true token": ("/v1/detokenize", {"tokens": [True]}, "tokens[0]", "tokens[0]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_invalid_request_is_a_400_that_names_the_field(demo: RunningServer, case: str) -> None:
    path, body, param, words = REFUSED[case]
    status, tokenized = demo.call(path, body)
    assert (status, tokenized["error"]["param"]) == (400, param), tokenized
    assert words in tokenized["error"]["message"]


def test_a_model_that_is_not_served_is_a_404_and_ignored_fields_are_named(demo: RunningServer) -> None:
    status, tokenized = demo.call("/v1/tokenize", {"model": "nobody", "prompt": "a"})
    assert (status, tokenized["error"]["code"]) == (404, "model_not_found")
    with demo.open("/v1/tokenize", {"prompt": "a", "truncation": True}) as response:
        assert response.headers["x-mlx-backend-ignored"] == "truncation"
    assert demo.app.in_flight.wait_until_idle(60), "nobody is left inside"
