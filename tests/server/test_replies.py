"""What is accepted, and what comes back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from werkzeug.test import Client

from mlx_backend import __version__
from mlx_backend.chat.service import Service
from mlx_backend.conversation.effort import Effort
from mlx_backend.engine.scripted import ScriptedEngine
from mlx_backend.registry.base import SingleModelRegistry
from mlx_backend.server.app import App
from mlx_backend.settings import ReasoningField, ReasoningFormat, Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from werkzeug.test import TestResponse

ANSWER = (
    "<|channel|>analysis<|message|>Capital of France.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>The capital is Paris.<|return|>"
)
CALL = (
    "<|channel|>analysis<|message|>Look it up.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Oslo"}<|call|>'
)
USER = {"role": "user", "content": "hello"}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CHAT = "/v1/chat/completions"


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine(lambda prompt: CALL if "functions.weather" in prompt else ANSWER) as engine:
        yield engine


@pytest.fixture
def client(engine: ScriptedEngine) -> Client:
    return serving(engine)


def serving(engine: ScriptedEngine, **chosen: Any) -> Client:
    settings = Settings(**chosen)
    return Client(App(SingleModelRegistry(Service(engine, effort=settings.reasoning_effort)), settings))


def answered(client: Client, **fields: Any) -> TestResponse:
    response = client.post(CHAT, json={"messages": [USER], **fields})
    assert response.status_code == 200, response.get_data(as_text=True)
    return response


def message(client: Client, **fields: Any) -> dict[str, Any]:
    told: dict[str, Any] = answered(client, **fields).get_json()["choices"][0]["message"]
    return told


def streamed(client: Client, path: str = CHAT, **fields: Any) -> list[dict[str, Any]]:
    response = client.post(path, json={"messages": [USER], "stream": True, **fields})
    assert response.mimetype == "text/event-stream"
    events = response.get_data(as_text=True).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def test_an_answer_with_its_reasoning_apart(client: Client) -> None:
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


def test_usage_is_streamed_when_asked_for(client: Client) -> None:
    *_, last = streamed(client, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("tools", [[WEATHER], [{"type": "function", "name": "weather"}]])
def test_a_tool_call(client: Client, tools: list[Any]) -> None:
    told = message(client, tools=tools)
    (call,) = told["tool_calls"]
    assert told["content"] == "One moment."
    assert told["reasoning_content"] == "Look it up."
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert call["id"].startswith("call_")
    assert answered(client, tools=tools).get_json()["choices"][0]["finish_reason"] == "tool_calls"
    (delta,) = [
        delta
        for chunk in streamed(client, tools=tools)
        for delta in chunk["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert delta["index"] == 0
    assert delta["function"] == call["function"]
    assert delta["id"] != call["id"]


def test_tool_choice_none_takes_the_tools_away(engine: ScriptedEngine, client: Client) -> None:
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
        assert message(serving(engine, reasoning_format=ReasoningFormat(fmt))) == by_request
        assert message(
            serving(engine, reasoning_format=ReasoningFormat(fmt)), reasoning_format="separate"
        ) == message(client)


@pytest.mark.parametrize("fields", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}])
def test_other_ways_of_hiding_the_reasoning(client: Client, fields: dict[str, Any]) -> None:
    assert message(client, **fields).keys() == {"role", "content"}


def test_the_reasoning_field_is_a_setting(engine: ScriptedEngine) -> None:
    told = message(serving(engine, reasoning_field=ReasoningField.BOTH))
    assert told["reasoning"] == told["reasoning_content"] == "Capital of France."


@pytest.mark.parametrize(
    ("fields", "level"),
    [
        ({}, "medium"),
        ({"reasoning_effort": "high"}, "high"),
        ({"reasoning_effort": "LOW"}, "low"),
        ({"reasoning_effort": None}, "medium"),
        ({"reasoning": {"effort": "high"}}, "high"),
        ({"chat_template_kwargs": {"reasoning_effort": "high"}}, "high"),
        ({"think": "low"}, "low"),
        ({"messages": [{"role": "system", "content": "Reasoning: high"}, USER]}, "high"),
    ],
)
def test_effort_reaches_the_prompt_from_wherever_it_is_said(
    engine: ScriptedEngine, client: Client, fields: dict[str, Any], level: str
) -> None:
    answered(client, **fields)
    assert f"Reasoning: {level}<|end|>" in engine.requests[-1].prompt


def test_the_reply_says_which_effort_it_was_and_who_said_so(client: Client) -> None:
    response = answered(client, messages=[{"role": "system", "content": "Reasoning: high"}, USER])
    assert response.headers["x-mlx-backend-effort"] == "high (system prompt)"
    assert answered(client).headers["x-mlx-backend-effort"] == "medium (default)"


def test_the_servers_own_effort_is_the_last_word(engine: ScriptedEngine) -> None:
    client = serving(engine, reasoning_effort=Effort.HIGH)
    answered(client)
    answered(client, reasoning_effort="low")
    high, low = (asked.prompt for asked in engine.requests)
    assert "Reasoning: high" in high
    assert "Reasoning: low" in low


def test_what_clients_send_out_of_habit_is_accepted_and_named(
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
    assert response.headers["x-mlx-backend-ignored"] == "user, mirostat, use_mmap, bad??name"
    assert any("ignored=user, mirostat" in record.getMessage() for record in caplog.records)


def test_a_whole_number_may_be_written_with_a_point(engine: ScriptedEngine, client: Client) -> None:
    answered(client, max_tokens=5.0, top_k=3.0, seed=7.0, priority=1.0, thinking_budget=4.0)
    request = engine.requests[-1].request
    assert (request.max_tokens, request.sampling.top_k, request.sampling.seed) == (5, 3, 7)
    assert (request.priority, request.constraint is None) == (1, False)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_minus_one_is_no_limit(engine: ScriptedEngine, client: Client, field: str) -> None:
    answered(client)
    answered(client, **{field: -1})
    free, unlimited = (asked.request for asked in engine.requests[-2:])
    assert unlimited.max_tokens == free.max_tokens


def test_what_is_honoured_reaches_the_engine(engine: ScriptedEngine, client: Client) -> None:
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
    asked = engine.requests[-1].request
    assert asked.max_tokens == 100
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.2, 0.3)
    assert (sampling.repetition_penalty, sampling.seed) == (1.1, 7)
    assert sampling.logit_bias == ((5, -100.0),)


def test_stop_strings_cut_the_answer_and_not_the_reasoning(client: Client) -> None:
    told = answered(client, stop=["France", " Par"]).get_json()["choices"][0]
    assert told["message"]["reasoning_content"] == "Capital of France."
    assert told["message"]["content"] == "The capital is"
    assert told["finish_reason"] == "stop"
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


@pytest.mark.parametrize("path", ["/v1/models", "/models"])
def test_the_model_is_listed(client: Client, path: str) -> None:
    (model,) = client.get(path).get_json()["data"]
    assert model["id"] == "scripted"
    assert model["context_length"] == 131072
    assert client.get(f"{path}/scripted").get_json() == model
    assert client.get(f"{path}/other").status_code == 404
    assert client.head(path).status_code == 200


def test_health_and_home(client: Client) -> None:
    assert client.get("/health").get_json() == {
        "status": "ok",
        "server": "mlx-backend",
        "version": __version__,
        "models": [{"model": "scripted", "state": "ready", "running": 0, "waiting": 0}],
    }
    assert client.get("/").get_json()["name"] == "mlx-backend"


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer wrong-key"}, {"Authorization": "sesame"}, {"x-api-key": "wrong-key"}],
)
def test_a_wrong_key_is_a_401_that_repeats_no_key(engine: ScriptedEngine, headers: dict[str, str]) -> None:
    client = serving(engine, api_key="sésame")
    for response in (client.get("/v1/models", headers=headers), client.post(CHAT, headers=headers)):
        assert response.status_code == 401
        assert response.get_json()["error"]["code"] == "invalid_api_key"
        assert "wrong-key" not in response.get_data(as_text=True)
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize("header", ["Authorization", "x-api-key"])
def test_the_right_key_is_let_in(engine: ScriptedEngine, header: str) -> None:
    on_the_wire = "sésame".encode().decode("latin-1")
    value = f"Bearer {on_the_wire}" if header == "Authorization" else on_the_wire
    assert serving(engine, api_key="sésame").get("/v1/models", headers={header: value}).status_code == 200


def test_a_key_may_have_an_equals_sign_inside(engine: ScriptedEngine) -> None:
    client = serving(engine, api_key="sk-a=b==")
    assert client.get("/v1/models", headers={"Authorization": "Bearer sk-a=b=="}).status_code == 200


def test_the_key_is_not_in_what_a_log_would_show() -> None:
    assert "sesame" not in repr(Settings(api_key="sesame"))


PAGE = {"Origin": "http://page.test"}


def test_a_web_page_of_another_origin_is_kept_out(client: Client) -> None:
    response = client.post(CHAT, json={"messages": [USER]}, headers=PAGE)
    assert response.status_code == 403
    assert "--cors-origin" in response.get_json()["error"]["message"]
    assert "Access-Control-Allow-Origin" not in response.headers
    own = client.post(CHAT, json={"messages": [USER]}, headers={"Origin": "http://localhost"})
    assert own.status_code == 200


@pytest.mark.parametrize(("allowed", "told"), [("http://page.test", "http://page.test"), ("*", "*")])
def test_a_web_page_that_was_named_is_let_in(engine: ScriptedEngine, allowed: str, told: str) -> None:
    client = serving(engine, cors_origins=(allowed,))
    asked = {**PAGE, "Access-Control-Request-Headers": "authorization,x-stainless-os"}
    preflight = client.options(CHAT, headers=asked)
    assert preflight.status_code == 204
    assert preflight.headers["Access-Control-Allow-Origin"] == told
    assert preflight.headers["Access-Control-Allow-Headers"] == "authorization, x-stainless-os"
    assert "POST" in preflight.headers["Access-Control-Allow-Methods"]
    response = client.post(CHAT, json={"messages": [USER]}, headers=PAGE)
    assert response.status_code == 200
    assert response.headers["Access-Control-Allow-Origin"] == told
    assert "Access-Control-Allow-Origin" not in client.get("/health").headers


def test_the_log_line_says_what_a_request_was_and_cost(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    body = answered(client, reasoning_effort="high").get_json()
    (line,) = [r.getMessage() for r in caplog.records if body["id"] in r.getMessage()]
    usage = body["usage"]
    for part in (
        "model=scripted",
        "effort=high (reasoning_effort)",
        f"prompt={usage['prompt_tokens']} cached=0 completion={usage['completion_tokens']}",
        "tok/s",
        "finish=stop",
    ):
        assert part in line
