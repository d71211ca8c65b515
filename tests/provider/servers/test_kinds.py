"""One request of ours, adapted to each kind of server."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import dify_mlx_provider
from dify_mlx_provider.servers.discovery import OTHER, PROFILES
from dify_mlx_provider.servers.requests import adapt_request, parse_extra_body, refused_fields
from dify_mlx_provider.upstream.credentials import ServerKind

QUESTION = {"role": "user", "content": "hi"}
SCHEMA = {"name": "answer", "schema": {"type": "object", "properties": {"city": {"type": "string"}}}}


def adapted(kind: ServerKind, **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": [QUESTION], "stream": True, **fields}
    return adapt_request(body, PROFILES[kind])


def effort_part(kind: ServerKind, effort: str) -> dict[str, Any]:
    names = ("reasoning_effort", "enable_thinking", "chat_template_kwargs", "reasoning")
    return {name: value for name, value in adapted(kind, reasoning_effort=effort).items() if name in names}


def test_every_kind_has_a_profile_and_a_name() -> None:
    assert set(PROFILES) == set(ServerKind)
    assert len({profile.display_name for profile in PROFILES.values()}) == len(ServerKind)


def test_only_a_kinds_profile_names_it() -> None:
    folder = Path(dify_mlx_provider.__file__).parent
    named: dict[str, set[str]] = {}
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "ServerKind":
                named.setdefault(node.attr, set()).add(file.relative_to(folder).as_posix())
    assert named.pop("MLX_BACKEND") == {"servers/mlx_backend.py"}
    assert named.pop("OTHER")
    assert {file for files in named.values() for file in files} == {"servers/kinds.py"}


@pytest.mark.parametrize(
    ("kind", "effort", "sent"),
    [
        (ServerKind.MLX_BACKEND, "high", {"reasoning_effort": "high"}),
        (ServerKind.MLX_BACKEND, "none", {"reasoning_effort": "none"}),
        (
            ServerKind.MLX_LM,
            "high",
            {"chat_template_kwargs": {"reasoning_effort": "high", "enable_thinking": True}},
        ),
        # gpt-oss's template would print the word none; the least it knows is low.
        (
            ServerKind.MLX_LM,
            "none",
            {"chat_template_kwargs": {"reasoning_effort": "low", "enable_thinking": False}},
        ),
        (ServerKind.MLX_VLM, "high", {"reasoning_effort": "high", "enable_thinking": True}),
        (ServerKind.MLX_VLM, "none", {"reasoning_effort": "low", "enable_thinking": False}),
        (
            ServerKind.RAPID_MLX,
            "none",
            {"chat_template_kwargs": {"reasoning_effort": "low", "enable_thinking": False}},
        ),
        (
            ServerKind.LLAMA_CPP,
            "medium",
            {"chat_template_kwargs": {"reasoning_effort": "medium", "enable_thinking": True}},
        ),
        (ServerKind.LM_STUDIO, "low", {"reasoning_effort": "low", "reasoning": {"effort": "low"}}),
        (ServerKind.OLLAMA, "none", {"reasoning_effort": "none"}),
        (ServerKind.OLLAMA, "xhigh", {"reasoning_effort": "high"}),
        (
            ServerKind.VLLM,
            "high",
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": True}},
        ),
        (ServerKind.VLLM, "none", {"chat_template_kwargs": {"enable_thinking": False}}),
        (
            ServerKind.OTHER,
            "minimal",
            {
                "reasoning_effort": "low",
                "chat_template_kwargs": {"reasoning_effort": "low", "enable_thinking": True},
            },
        ),
    ],
)
def test_effort_is_sent_in_the_servers_fields(kind: ServerKind, effort: str, sent: dict[str, Any]) -> None:
    assert effort_part(kind, effort) == sent


@pytest.mark.parametrize("kind", ServerKind)
def test_without_an_effort_no_effort_field_is_sent(kind: ServerKind) -> None:
    body = adapted(kind)
    assert not {"reasoning_effort", "chat_template_kwargs", "reasoning"} & body.keys()


@pytest.mark.parametrize("kind", [kind for kind in ServerKind if kind is not ServerKind.MLX_BACKEND])
def test_other_servers_do_not_get_mlx_backends_fields(kind: ServerKind) -> None:
    body = adapted(kind, answer_reserve=64, priority=1, reasoning_format="separate")
    assert not {"answer_reserve", "priority", "reasoning_format"} & body.keys()


def test_mlx_backend_gets_its_fields() -> None:
    body = adapted(ServerKind.MLX_BACKEND, answer_reserve=64, priority=1, thinking_budget=0)
    assert (body["answer_reserve"], body["priority"], body["thinking_budget"]) == (64, 1, 0)
    assert body["reasoning_format"] == "separate"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (ServerKind.LLAMA_CPP, "thinking_budget_tokens"),
        (ServerKind.VLLM, "thinking_token_budget"),
    ],
)
def test_a_thinking_budget_has_the_servers_name(kind: ServerKind, name: str) -> None:
    body = adapted(kind, thinking_budget=100)
    assert body[name] == 100
    assert "thinking_budget" not in body


@pytest.mark.parametrize(
    "kind",
    [
        ServerKind.MLX_LM,
        ServerKind.RAPID_MLX,
        ServerKind.OLLAMA,
        ServerKind.LM_STUDIO,
        ServerKind.OTHER,
    ],
)
def test_a_thinking_budget_that_a_server_would_ignore_is_refused(kind: ServerKind) -> None:
    with pytest.raises(ValueError, match="Switch the setting Thinking budget off"):
        adapted(kind, thinking_budget=100)


@pytest.mark.parametrize("kind", [ServerKind.LM_STUDIO, ServerKind.LLAMA_CPP])
def test_the_repetition_penalty_has_the_servers_name(kind: ServerKind) -> None:
    body = adapted(kind, repetition_penalty=1.1)
    assert body["repeat_penalty"] == 1.1
    assert "repetition_penalty" not in body


@pytest.mark.parametrize(
    "kind",
    [ServerKind.MLX_BACKEND, ServerKind.LLAMA_CPP, ServerKind.OLLAMA, ServerKind.VLLM, ServerKind.OTHER],
)
@pytest.mark.parametrize("wanted", [{"type": "json_object"}, {"type": "json_schema", "json_schema": SCHEMA}])
def test_a_response_format_is_sent_as_openai_defines_it(kind: ServerKind, wanted: dict[str, Any]) -> None:
    body = adapted(kind, response_format=wanted)
    assert body["response_format"] == wanted
    assert body["messages"] == [QUESTION]


def test_lm_studio_gets_schemas_only() -> None:
    body = adapted(ServerKind.LM_STUDIO, response_format={"type": "json_object"})
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}


def test_a_server_that_cannot_constrain_is_asked_in_the_prompt() -> None:
    wanted = {"type": "json_schema", "json_schema": SCHEMA}
    body = adapted(ServerKind.MLX_LM, response_format=wanted)
    assert "response_format" not in body
    system, question = body["messages"]
    assert '"city": {"type": "string"}' in system["content"]
    assert question == QUESTION
    system = {"role": "system", "content": "Be kind."}
    body = adapted(ServerKind.MLX_LM, response_format=wanted, messages=[system, QUESTION])
    assert body["messages"][0]["content"].startswith("Be kind.\n\nAnswer with one JSON object")
    assert len(body["messages"]) == 2
    assert system["content"] == "Be kind."


def test_reasoning_goes_back_in_the_servers_field() -> None:
    turn = {"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": []}
    for kind in ServerKind:
        (sent,) = adapted(kind, messages=[turn])["messages"]
        keys = {"reasoning_content", "reasoning", "thinking"} & sent.keys()
        assert keys == set(PROFILES[kind].reasoning_fields)
        assert {sent[key] for key in keys} == {"why"}


@pytest.mark.parametrize("kind", ServerKind)
def test_a_turn_that_calls_has_one_text_where_the_template_allows_no_more(kind: ServerKind) -> None:
    turn = {"role": "assistant", "content": "One moment.", "reasoning_content": "why", "tool_calls": [{}]}
    (sent,) = adapted(kind, messages=[turn])["messages"]
    said = (sent[PROFILES[kind].reasoning_fields[0]], sent["content"])
    hands_on = kind in (ServerKind.MLX_LM, ServerKind.MLX_VLM)
    assert said == (("why\n\nOne moment.", "") if hands_on else ("why", "One moment."))


@pytest.mark.parametrize("kind", ServerKind)
def test_stop_words_are_sent_only_where_they_end_an_answer_and_not_its_reasoning(kind: ServerKind) -> None:
    assert ("stop" in adapted(kind, stop=["x"])) == (kind is ServerKind.MLX_BACKEND)
    assert adapted(kind, stop=["x"], extra_body={"stop": ["y"]})["stop"] == ["y"]


def test_tokens_are_asked_for_where_a_call_may_be_missing_from_the_answer() -> None:
    assert adapted(ServerKind.MLX_VLM, tools=[{}])["logprobs"] is True
    assert "logprobs" not in adapted(ServerKind.MLX_VLM)
    assert "logprobs" not in adapted(ServerKind.MLX_LM, tools=[{}])


def test_a_server_that_draws_with_one_seed_gets_another_each_time() -> None:
    assert len({adapted(ServerKind.MLX_VLM)["seed"] for _ in range(5)}) > 1
    assert adapted(ServerKind.MLX_VLM, seed=3)["seed"] == 3
    assert "seed" not in adapted(ServerKind.RAPID_MLX)


def test_mlx_lm_server_gets_its_own_name_for_the_default_model() -> None:
    assert adapted(ServerKind.MLX_LM, model="default")["model"] == "default_model"


def test_the_extra_body_wins_and_objects_are_merged() -> None:
    extra = {"temperature": 0.1, "chat_template_kwargs": {"builtin_tools": []}, "mirostat": 2}
    body = adapted(ServerKind.LLAMA_CPP, temperature=0.9, reasoning_effort="low", extra_body=extra)
    assert body["temperature"] == 0.1
    assert body["mirostat"] == 2
    assert body["chat_template_kwargs"] == {
        "reasoning_effort": "low",
        "enable_thinking": True,
        "builtin_tools": [],
    }
    assert "extra_body" not in body


def test_template_arguments_may_be_text_in_the_extra_body() -> None:
    extra = parse_extra_body('{"chat_template_kwargs": "{\\"builtin_tools\\": []}"}')
    body = adapted(ServerKind.LLAMA_CPP, reasoning_effort="low", extra_body=extra)
    assert body["chat_template_kwargs"].keys() == {"reasoning_effort", "enable_thinking", "builtin_tools"}
    with pytest.raises(ValueError, match="chat_template_kwargs in the setting Extra body is not valid JSON"):
        parse_extra_body({"chat_template_kwargs": "enable_thinking=false"})


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("Unrecognized request argument supplied: chat_template_kwargs", {"chat_template_kwargs"}),
        ('"llama3.2" does not support thinking', {"reasoning_effort"}),
        ('think value "medium" is not supported for this model', {"reasoning_effort"}),
        ("body -> stream_options: Extra inputs are not permitted", {"stream_options"}),
        (
            "Extra inputs: reasoning_effort, chat_template_kwargs",
            {"reasoning_effort", "chat_template_kwargs"},
        ),
        ("temperature must be at most 2", set()),
        ("the answer's reasoning was too long", set()),
    ],
)
def test_a_refusal_is_searched_for_the_fields_that_we_added(words: str, fields: set[str]) -> None:
    body = {"reasoning_effort": "low", "chat_template_kwargs": {}, "reasoning": {}, "stream_options": {}}
    assert refused_fields(words, body) == fields
    assert refused_fields(words, {}) == frozenset()


def test_a_refused_field_is_omitted_unless_the_user_added_it() -> None:
    body = {"model": "m", "messages": [], "reasoning_effort": "low", "extra_body": {"reasoning_effort": "x"}}
    omitted = frozenset({"reasoning_effort"})
    assert adapt_request(body, OTHER, omit=omitted)["reasoning_effort"] == "x"
    del body["extra_body"]
    assert "reasoning_effort" not in adapt_request(body, OTHER, omit=omitted)


def test_the_given_request_is_not_changed() -> None:
    body = {
        "model": "default",
        "messages": [{"role": "assistant", "content": "", "reasoning_content": "why"}],
        "reasoning_effort": "high",
        "response_format": {"type": "json_object"},
    }
    before = repr(body)
    for kind in ServerKind:
        adapt_request(body, PROFILES[kind])
    assert repr(body) == before
