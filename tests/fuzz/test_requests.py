"""Requests drawn from /openapi.json, and damaged ones: each is answered as the document says, and none is a 500."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest
import schemathesis
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from openapi_checks import check
from schemathesis import GenerationMode
from served_models import app_of_every_type
from werkzeug.test import Client

from mlx_backend.server.app import all_routes
from mlx_backend.server.openapi import document

if TYPE_CHECKING:
    from collections.abc import Iterator

    from werkzeug.test import TestResponse

DOCUMENT = document(all_routes())
OPERATIONS = {
    operation.ok().path: operation.ok()
    for operation in schemathesis.openapi.from_dict(DOCUMENT).get_all_operations()
    if operation.ok().body
}
MODELS = ("chat", "other", "embedder", "ranker", "nobody", "", None, 7)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with app_of_every_type(tmp_path_factory.mktemp("models"), max_tokens=50) as app:
        yield Client(app)


def answered(client: Client, path: str, body: Any) -> TestResponse:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = client.post(path, data=data, buffered=True)  # and closed, as a server closes it
    assert response.status_code < 500, response.get_data(as_text=True)
    check(DOCUMENT, path, response)
    return response


@pytest.mark.parametrize(
    "mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["like it", "unlike it"]
)
@pytest.mark.parametrize("path", OPERATIONS)
@examples(0.15)
@given(data=st.data())
def test_a_request_like_the_document_or_unlike_it_is_answered_or_refused_as_it_says(
    client: Client, path: str, mode: GenerationMode, data: st.DataObject
) -> None:
    body = data.draw(OPERATIONS[path].as_strategy(generation_mode=mode)).body
    if mode is GenerationMode.POSITIVE:
        body = {**body, "model": data.draw(st.sampled_from(MODELS))}
    answered(client, path, body)


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
            "required": ["city"],
        },
    },
}
OLLAMA_CALL = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
CHAT: dict[str, Any] = {
    "model": "chat",
    "messages": [
        {"role": "system", "content": "Be brief.\nReasoning: high"},
        {"role": "user", "content": [{"type": "text", "text": "What is the weather?"}]},
        {"role": "assistant", "content": None, "reasoning_content": "Look it up.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c2", "type": "custom", "custom": {"name": "note", "input": "It rains."}}],
        },
        {"role": "tool", "tool_call_id": "c2", "content": "done"},
        {"role": "assistant", "content": "<think>\nSo rain.\n</think>\n\nIt rains."},
        {"role": "user", "content": "Thanks"},
    ],
    "tools": [
        TOOL,
        {
            "type": "custom",
            "custom": {
                "name": "note",
                "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a*"}},
            },
        },
    ],
    "tool_choice": {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "weather"}}]},
    },
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 20,
    "temperature": 0.5,
    "stop": ["\n\n\n"],
    "logit_bias": {"5": -1},
    "logprobs": True,
    "top_logprobs": 2,
    "seed": 7,
    "reasoning": {"effort": "low", "max_tokens": 10},
    "chat_template_kwargs": {"custom": 1},
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
}
FUNCTION = TOOL["function"]
RESPONSE: dict[str, Any] = {
    "model": "chat",
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "What is the weather?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Look it up."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "namespace": None, "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "Rain"}]},
        {"type": "custom_tool_call", "call_id": "c2", "name": "note", "input": "It rains."},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
    ],
    "tools": [
        {"type": "function", **FUNCTION},
        {
            "type": "custom",
            "name": "note",
            "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'},
        },
        {
            "type": "namespace",
            "name": "more",
            "description": "More",
            "tools": [{"type": "function", **FUNCTION}],
        },
        {"type": "web_search"},
    ],
    "tool_choice": {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "weather"}],
    },
    "stream": True,
    "max_output_tokens": 20,
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
    "top_logprobs": 2,
    "metadata": {"a": "b"},
    "text": {"format": {"type": "json_schema", "name": "any", "schema": {"type": "object"}}},
}
MESSAGES: dict[str, Any] = {
    "model": "chat",
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "What is the weather?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look it up.", "signature": ""},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "is_error": True,
                    "content": [
                        {"type": "text", "text": "Rain"},
                        {"type": "tool_reference", "tool_name": "later"},
                        {"type": "document", "source": {"type": "text", "data": "x"}, "title": "y"},
                    ],
                }
            ],
        },
    ],
    "tools": [
        {"name": "weather", "input_schema": FUNCTION["parameters"], "strict": True},
        {"name": "later", "input_schema": {"type": "object"}, "defer_loading": True},
        {"type": "web_search_20250305", "name": "web_search"},
    ],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "stream": True,
    "max_tokens": 20,
    "stop_sequences": ["\n\n\n"],
    "thinking": {"type": "enabled", "budget_tokens": 10, "display": "omitted"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    "metadata": {"user_id": "u"},
}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    ("/v1/completions", {"prompt": "Once", "stream": True, "logprobs": 2, "max_tokens": 5, "stop": "x"}),
    (
        "/v1/completions",
        {"prompt": ["Once", [1, 2]], "n": 2, "echo": True, "logprobs": 1, "max_tokens": 2, "best_of": 2},
    ),
    ("/v1/responses", RESPONSE),
    ("/v1/responses/compact", {**RESPONSE, "stream": False}),
    ("/v1/responses/input_tokens", RESPONSE),
    ("/v1/messages", MESSAGES),
    ("/v1/messages/count_tokens", MESSAGES),
    (
        "/v1/embeddings",
        {"model": "embedder", "input": ["a", "b"], "encoding_format": "base64", "dimensions": 8},
    ),
    ("/v1/rerank", {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": True}),
    ("/v1/tokenize", {"messages": CHAT["messages"], "tools": [TOOL], "return_token_strs": True}),
    ("/v1/tokenize", {"prompt": ["a", "b"], "add_special_tokens": False}),
    ("/v1/detokenize", {"tokens": [1, 2, 3]}),
    (
        "/api/chat",
        {
            "model": "chat:latest",
            "messages": [
                {"role": "user", "content": "What is the weather?"},
                {"role": "assistant", "thinking": "Look.", "content": "", "tool_calls": [OLLAMA_CALL]},
                {"role": "tool", "tool_name": "weather", "content": "Rain"},
                {"role": "user", "content": "And this?", "images": ["iVBORw0KGgo="]},
            ],
            "tools": [TOOL],
            "think": "low",
            "format": {"type": "object"},
            "keep_alive": "1m",
            "options": {"num_predict": 5, "num_ctx": 4096, "temperature": 0.5, "stop": ["x"], "seed": 1},
            "logprobs": True,
            "top_logprobs": 2,
        },
    ),
    ("/api/generate", {"prompt": "hello", "system": "Be brief.", "format": "json", "stream": False}),
    ("/api/generate", {"prompt": "Once", "raw": True, "keep_alive": -1, "options": {"num_predict": 3}}),
    ("/api/embed", {"model": "embedder", "input": ["a", "b"], "truncate": True, "dimensions": 8}),
    ("/api/embeddings", {"model": "embedder", "prompt": "a", "keep_alive": 0}),
    ("/api/show", {"name": "chat", "verbose": True}),
    ("/api/pull", {"model": "chat", "stream": False}),
]
HELLO = {"role": "user", "content": "hello"}
FELL_ONCE: list[tuple[str, Any]] = [
    # A variable that the template's own function has; a text that uses up what marks control tokens; an endless number.
    ("/v1/chat/completions", {"messages": [HELLO], "chat_template_kwargs": {"self": 1}}),
    (
        "/v1/chat/completions",
        {"messages": [{**HELLO, "content": "".join(map(chr, range(0xE000, 0xF900))) + "<|channel|>"}]},
    ),
    ("/v1/chat/completions", b'{"messages": [], "seed": ' + b"1" * 5000 + b"}"),
    ("/v1/chat/completions", {"messages": [{**HELLO, "content": "half \ud83d"}], "stop": ["\ud83d"]}),
    ("/v1/chat/completions", b"[" * 100_000),
    ("/v1/completions", {"prompt": "Once", "seed": 10**400}),
    ("/v1/tokenize", {"prompt": "\ud800", "return_token_strs": True}),
    ("/v1/detokenize", {"tokens": [10**400]}),
    ("/api/chat", {"messages": [HELLO], "keep_alive": 10**400}),
    ("/api/show", {"model": "chat" + ":latest" * 10_000}),
]
"""Requests that the server has once answered with a 500, or that one could expect it to."""


@pytest.mark.parametrize("at", range(len(FELL_ONCE)))
def test_a_request_that_fell_once_is_answered_or_refused(client: Client, at: int) -> None:
    path, body = FELL_ONCE[at]
    answered(client, path, body)


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(
        ["", "auto", "none", "required", "<think>", "<|channel|>", "\ud800", "\0", "system", "\ufeff"]
    ),
    st.text(max_size=20),
    st.integers(),
    st.sampled_from([-1, 0, 2**31, 2**63, 10**400, 1e308, -0.0, 0.5]),
    st.sampled_from([[], {}, [[]], [None], {"type": 5}, {"text": None}, [{}], {"self": 1}, ["a", 1]]),
)
KEYS = st.sampled_from(
    [
        *(
            "content",
            "role",
            "type",
            "text",
            "name",
            "function",
            "arguments",
            "tool_calls",
            "tool_call_id",
            "id",
        ),
        *(
            "reasoning",
            "reasoning_content",
            "reasoning_details",
            "thinking",
            "refusal",
            "function_call",
            "audio",
        ),
        *(
            "effort",
            "schema",
            "json_schema",
            "strict",
            "properties",
            "$ref",
            "allOf",
            "enum",
            "pattern",
            "items",
        ),
        *(
            "reasoning_effort",
            "think",
            "enable_thinking",
            "guided_regex",
            "guided_json",
            "guided_choice",
            "n",
        ),
        *("continue_final_message", "add_generation_prompt", "extra_body", "thinking_budget", "role_mapping"),
        *(
            "adapters",
            "priority",
            "structured_outputs",
            "output_config",
            "reasoning_format",
            "answer_reserve",
            "max_repeated_tokens",
            "reasoning_budget",
            "thinking_budget_message",
        ),
    ]
)


BYTES = st.one_of(st.binary(max_size=6), st.sampled_from([b"\\ud800", b"{", b"]", b"1e999", b"null"]))


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every object and list in a body, with each of its keys."""
    found: list[tuple[Any, Any]] = []
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        found += [(value, key), *places(each)]
    return found


@pytest.mark.parametrize("at", range(len(BODIES)), ids=[path for path, _ in BODIES])
@examples(2)
@given(data=st.data())
def test_a_usual_request_with_something_odd_in_it_is_answered_or_refused(
    client: Client, at: int, data: st.DataObject
) -> None:
    path, usual = BODIES[at]
    body = copy.deepcopy(usual)
    for _ in range(data.draw(st.integers(1, 4))):
        if not (found := places(body)):
            break
        holder, key = found[data.draw(st.integers(0, len(found) - 1))]
        change = data.draw(st.sampled_from(["replace", "add", "remove", "twice"]))
        if change == "remove":
            del holder[key]
        elif change == "replace" or not isinstance(holder, dict | list):
            holder[key] = copy.deepcopy(data.draw(ODD))
        elif isinstance(holder, list):
            holder.insert(
                key, copy.deepcopy(holder[key]) if change == "twice" else copy.deepcopy(data.draw(ODD))
            )
        else:
            holder[data.draw(KEYS)] = (
                copy.deepcopy(holder[key]) if change == "twice" else copy.deepcopy(data.draw(ODD))
            )
    answered(client, path, body)


@pytest.mark.parametrize("path", OPERATIONS)
@examples(1)
@given(data=st.data())
def test_bytes_that_are_hardly_json_are_answered_or_refused(
    client: Client, path: str, data: st.DataObject
) -> None:
    body = bytearray(json.dumps(next(usual for each, usual in BODIES if each == path)).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(body)))
        end = data.draw(st.integers(start, min(len(body), start + 8)))
        body[start:end] = data.draw(BYTES)
    answered(client, path, bytes(body))
