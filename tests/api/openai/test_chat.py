"""Chat completions over HTTP: which fields are accepted, and what comes back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from byte_tokenizer import ByteTokenizer
from scripted_engine import HARMONY_MARKERS, HARMONY_TEMPLATE, ScriptedEngine
from scripted_server import ANSWER, CALL, CHAT, USER, WEATHER, answered, client_of, message, streamed

from mlx_backend.conversation.effort import Effort
from mlx_backend.settings import ReasoningField, ReasoningFormat

if TYPE_CHECKING:
    from collections.abc import Iterator

    from werkzeug.test import Client


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine(lambda prompt: CALL if "functions.weather" in prompt else ANSWER) as engine:
        yield engine


@pytest.fixture
def client(engine: ScriptedEngine) -> Client:
    return client_of(engine)


def test_an_answer_with_separate_reasoning(client: Client) -> None:
    body = answered(client).get_json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "The capital is Paris.",
                "reasoning_content": "Capital of France.",
            },
            "finish_reason": "stop",
        }
    ]
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert body["timings"]["predicted_n"] == usage["completion_tokens"]


@pytest.mark.parametrize("path", [CHAT, "/chat/completions"])
def test_a_stream_is_the_same_answer_in_pieces(client: Client, path: str) -> None:
    chunks = streamed(client, path)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant"}
    assert all(len(delta) == 1 for delta in deltas[:-1])
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Capital of France."
    assert "".join(delta.get("content", "") for delta in deltas) == "The capital is Paris."
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:]] == [None, "stop"]
    assert chunks[-1]["timings"]["predicted_n"] > 0
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


def test_usage_is_streamed_on_request(client: Client) -> None:
    *_, last = streamed(client, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("tools", [[WEATHER], [{"type": "function", "name": "weather"}]])
def test_a_tool_call(client: Client, tools: list[Any]) -> None:
    answer = message(client, tools=tools)
    (call,) = answer["tool_calls"]
    assert answer["content"] == "One moment."
    assert answer["reasoning_content"] == "Look it up."
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert call["id"].startswith("call_")
    assert answered(client, tools=tools).get_json()["choices"][0]["finish_reason"] == "tool_calls"
    deltas = [
        delta
        for chunk in streamed(client, tools=tools)
        for delta in chunk["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert {delta["index"] for delta in deltas} == {0}
    assert deltas[0]["function"] == {"name": "weather", "arguments": ""}
    assert "".join(delta["function"]["arguments"] for delta in deltas) == call["function"]["arguments"]
    assert deltas[0]["id"] != call["id"]


PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Changes a file."}}
PATCH_CALL = (
    "<|channel|>commentary to=functions.patch <|constrain|>json<|message|>"
    '{"input": "*** Begin\\n\\"Oslo\\" \\ud83d\\ude00 é"}<|call|>'
)
PATCH_TEXT = '*** Begin\n"Oslo" 😀 é'


@pytest.mark.parametrize("tool", [PATCH, {"type": "custom", "name": "patch"}], ids=["nested", "flat"])
def test_a_call_of_a_custom_tool_has_its_text(tool: dict[str, Any]) -> None:
    with ScriptedEngine(lambda _: PATCH_CALL) as engine:
        client = client_of(engine)
        (call,) = message(client, tools=[tool])["tool_calls"]
        assert (call["type"], call["custom"]) == ("custom", {"name": "patch", "input": PATCH_TEXT})
        deltas = [
            delta
            for chunk in streamed(client, tools=[tool])
            for delta in chunk["choices"][0]["delta"].get("tool_calls", [])
        ]
        assert deltas[0].keys() == {"index", "id", "type", "custom"}
        assert deltas[0]["custom"] == {"name": "patch", "input": ""}
        assert "".join(delta["custom"]["input"] for delta in deltas) == PATCH_TEXT
        assert len(deltas) > 3
        result = {"role": "tool", "tool_call_id": call["id"], "content": "Done."}
        answered(client, messages=[USER, {"role": "assistant", "tool_calls": [call]}, result], tools=[tool])
        assert '{"input": "*** Begin' in engine.requests[-1].prompt
        assert "Done." in engine.requests[-1].prompt


def test_a_call_of_a_custom_tool_that_is_cut_is_no_call() -> None:
    with ScriptedEngine(lambda _: PATCH_CALL) as engine:
        client = client_of(engine)
        tokens = answered(client, tools=[PATCH]).get_json()["usage"]["completion_tokens"]
        assert "tool_calls" not in message(client, tools=[PATCH], max_tokens=tokens - 3)


@pytest.mark.parametrize(
    "choice",
    ["none", {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}],
    ids=["none", "none allowed"],
)
def test_tool_choice_none_leaves_the_tools_in_the_prompt_and_forbids_calls(choice: Any) -> None:
    tokenizer = ByteTokenizer(HARMONY_MARKERS, HARMONY_TEMPLATE)
    with ScriptedEngine(lambda _: CALL, tokenizer=tokenizer) as engine:
        client = client_of(engine)
        assert "tool_calls" in message(client, tools=[WEATHER])
        assert "tool_calls" not in message(client, tools=[WEATHER], tool_choice=choice, max_tokens=60)
        may_call, may_not = engine.requests
        assert may_not.request.prompt == may_call.request.prompt
        assert not {"<|call|>", "<|constrain|>"} & {
            engine.tokenizer.decode([token]) for token in may_not.written
        }


def test_where_calls_cannot_be_forbidden_tool_choice_none_removes_the_tools(
    engine: ScriptedEngine, client: Client
) -> None:
    assert "tool_calls" not in message(client, tools=[WEATHER], tool_choice="none")
    assert "weather" not in engine.requests[-1].prompt


@pytest.mark.parametrize(
    ("fmt", "content"),
    [
        ("think", "<think>\nCapital of France.\n</think>\n\nThe capital is Paris."),
        ("hidden", "The capital is Paris."),
        ("raw", ANSWER),
        ("none", ANSWER),
    ],
)
def test_the_reasoning_format_is_chosen_by_the_request_or_by_the_server(
    engine: ScriptedEngine, client: Client, fmt: str, content: str
) -> None:
    by_request = message(client, reasoning_format=fmt)
    assert by_request == {"role": "assistant", "content": content}
    if fmt != "none":
        assert message(client_of(engine, reasoning_format=ReasoningFormat(fmt))) == by_request
        assert message(
            client_of(engine, reasoning_format=ReasoningFormat(fmt)), reasoning_format="separate"
        ) == message(client)


@pytest.mark.parametrize("fields", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}])
def test_other_ways_of_hiding_the_reasoning(client: Client, fields: dict[str, Any]) -> None:
    assert message(client, **fields).keys() == {"role", "content"}


def test_the_reasoning_field_is_a_setting(engine: ScriptedEngine) -> None:
    answer = message(client_of(engine, reasoning_field=ReasoningField.BOTH))
    assert answer["reasoning"] == answer["reasoning_content"] == "Capital of France."


@pytest.mark.parametrize(
    ("fields", "level"),
    [
        ({}, "medium"),
        ({"reasoning_effort": "high"}, "high"),
        ({"reasoning_effort": "LOW"}, "low"),
        ({"reasoning_effort": None}, "medium"),
        ({"reasoning": {"effort": "high"}}, "high"),
        ({"chat_template_kwargs": {"reasoning_effort": "high"}}, "high"),
        ({"chat_template_kwargs": '{"reasoning_effort": "high"}'}, "high"),
        ({"chat_template_kwargs": ""}, "medium"),
        ({"think": "low"}, "low"),
        ({"messages": [{"role": "system", "content": "Reasoning: high"}, USER]}, "high"),
    ],
)
def test_effort_reaches_the_prompt_from_every_source(
    engine: ScriptedEngine, client: Client, fields: dict[str, Any], level: str
) -> None:
    answered(client, **fields)
    assert f"Reasoning: {level}<|end|>" in engine.requests[-1].prompt


def test_a_header_gives_the_effort_and_its_source(client: Client) -> None:
    response = answered(client, messages=[{"role": "system", "content": "Reasoning: high"}, USER])
    assert response.headers["x-mlx-backend-effort"] == "high (system prompt); level=high"
    assert answered(client).headers["x-mlx-backend-effort"] == "medium (default); level=medium"
    ultra = answered(client, reasoning_effort="ultra", thinking_budget=100)
    assert ultra.headers["x-mlx-backend-effort"] == "max (reasoning_effort); level=high; budget=100"


@pytest.mark.parametrize("stream", [False, True])
def test_the_reply_says_what_was_asked_and_what_the_model_was_told(client: Client, stream: bool) -> None:
    response = answered(client, reasoning_effort="ultra", stream=stream)
    last = response.text.split("data: ")[-2] if stream else response.text
    assert json.loads(last)["reasoning"] == {
        "effort": "max",
        "level": "high",
        "source": "reasoning_effort",
        "budget": None,
    }


def test_the_servers_own_effort_is_the_default(engine: ScriptedEngine) -> None:
    client = client_of(engine, reasoning_effort=Effort.HIGH)
    answered(client)
    answered(client, reasoning_effort="low")
    high, low = (received.prompt for received in engine.requests)
    assert "Reasoning: high" in high
    assert "Reasoning: low" in low


def test_what_clients_send_out_of_habit_is_accepted_and_named_as_ignored(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    habits: dict[str, Any] = {
        "tools": [],
        "tool_choice": None,
        "logit_bias": "",
        "stop": None,
        "n": 1,
        "response_format": {"type": "text"},
        "stream_options": None,
        "frequency_penalty": 1.1,
        "presence_penalty": 0,
        "repeat_penalty": 1.1,
        "top_k": 40,
        "min_p": 0,
        "seed": 0,
        "max_tokens": None,
        "user": "me",
        "mirostat": 0,
        "use_mmap": True,
        "num_ctx": None,
        "bad\r\nname": 1,
    }
    response = answered(client, **habits)
    assert response.headers["x-mlx-backend-ignored"] == "mirostat, use_mmap, bad??name"
    for fields, named in (
        ({"reasoning": {"effort": "low", "summary": "auto"}}, "reasoning.summary"),
        ({"thinking": {"type": "enabled", "display": "full"}}, "thinking.display"),
        ({"output_config": {"effort": "low", "format": {}}}, "output_config.format"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_tokens": 100, "max_completion_tokens": 200, "n_predict": 200}, "max_tokens"),
        ({"repetition_penalty": 1.1, "repeat_penalty": 1.2}, "repeat_penalty"),
        ({"return_progress": True, "verbosity": "low"}, "return_progress, verbosity"),
        ({"continue_final_message": True}, "continue_final_message"),
    ):
        assert answered(client, **fields).headers["x-mlx-backend-ignored"] == named
    begun = [USER, {"role": "assistant", "content": "It"}]
    continued = answered(client, messages=begun, continue_final_message=True)
    assert "x-mlx-backend-ignored" not in continued.headers
    used = {"reasoning_effort": "low", "enable_thinking": True}
    assert "x-mlx-backend-ignored" not in answered(client, chat_template_kwargs=used).headers
    unread = answered(client, chat_template_kwargs={**used, "custom": 1})
    assert unread.headers["x-mlx-backend-ignored"] == "chat_template_kwargs.custom"
    roles = answered(client, role_mapping={"user": "USER: "})
    assert roles.headers["x-mlx-backend-ignored"] == "role_mapping"
    with_options = {"messages": [USER], "stream": True, "stream_options": {"every": 5, "include_usage": True}}
    assert client.post(CHAT, json=with_options).headers["x-mlx-backend-ignored"] == "stream_options.every"
    assert any("ignored=mirostat" in record.getMessage() for record in caplog.records)


def test_a_whole_number_may_be_written_with_a_point(engine: ScriptedEngine, client: Client) -> None:
    answered(client, max_tokens=5.0, top_k=3.0, seed=7.0, priority=1.0, thinking_budget=4.0)
    request = engine.requests[-1].request
    assert (request.max_tokens, request.sampling.top_k, request.sampling.seed) == (5, 3, 7)
    assert (request.priority, request.constraint is None) == (1, False)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_minus_one_is_no_limit(engine: ScriptedEngine, client: Client, field: str) -> None:
    answered(client)
    answered(client, **{field: -1})
    free, unlimited = (received.request for received in engine.requests[-2:])
    assert unlimited.max_tokens == free.max_tokens


def test_sampling_settings_reach_the_engine(engine: ScriptedEngine, client: Client) -> None:
    answered(
        client,
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        seed=7,
        max_completion_tokens=100,
        max_tokens=5,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repeat_penalty=1.1,
        logit_bias={"5": -100},
    )
    received = engine.requests[-1].request
    assert received.max_tokens == 100
    sampling = received.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.2, 0.3)
    assert (sampling.repetition_penalty, sampling.seed) == (1.1, 7)
    assert sampling.logit_bias == ((5, -100.0),)


def test_stop_strings_cut_the_answer_and_not_the_reasoning(client: Client) -> None:
    choice = answered(client, stop=["France", " Par"]).get_json()["choices"][0]
    assert choice["message"]["reasoning_content"] == "Capital of France."
    assert choice["message"]["content"] == "The capital is"
    assert choice["finish_reason"] == "stop"
    chunks = streamed(client, stop=" Par")
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "The capital is"


def test_a_reply_cut_by_the_limit_says_so(client: Client) -> None:
    choice = answered(client, max_tokens=6).get_json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == ""


def test_half_a_surrogate_pair_does_no_harm(engine: ScriptedEngine, client: Client) -> None:
    body = b'{"messages": [{"role": "user", "content": "cut \\ud83d, whole \\ud83d\\ude00"}]}'
    assert client.post(CHAT, data=body).status_code == 200
    assert "cut \ufffd, whole \U0001f600" in engine.requests[-1].prompt
