"""POST /api/chat and /api/generate: what a body becomes, and what comes back, against Ollama's own client's types."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import ollama
import pytest
from scripted_engine import ScriptedEngine, Transcript
from scripted_server import ANSWER, CALL, WEATHER, client_of

from mlx_backend.api.errors import ApiError
from mlx_backend.api.ollama.addresses import start
from mlx_backend.api.ollama.body import GenerateBody, OllamaBody, OllamaChatBody
from mlx_backend.chat.request import AnswerFormat, ChatRequest, CompletionRequest
from mlx_backend.chat.service import Service
from mlx_backend.engine.base import ANYONE, Queued

if TYPE_CHECKING:
    from collections.abc import Iterator

    from werkzeug.test import Client, TestResponse


USER = {"role": "user", "content": "hello"}
CHAT, GENERATE = "/api/chat", "/api/generate"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.fixture
def prompts() -> list[str]:
    """What the engine was given."""
    return []


@pytest.fixture
def client(prompts: list[str]) -> Iterator[Client]:
    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return CALL if "functions.weather" in prompt or "namespace functions" in prompt else ANSWER

    with ScriptedEngine(reply) as engine:
        yield client_of(engine)


def posted(client: Client, path: str, **fields: Any) -> TestResponse:
    body = {"messages": [USER], **fields} if path == CHAT else {"prompt": "hello", **fields}
    response = client.post(path, json=body)
    assert response.status_code == 200, response.get_data(as_text=True)
    return response


def lines(client: Client, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The lines of a stream, each of which Ollama's client can read."""
    response = posted(client, path, **fields)
    assert response.mimetype == "application/x-ndjson"
    found = [json.loads(line) for line in response.get_data(as_text=True).splitlines()]
    for line in found:
        (ollama.ChatResponse if path == CHAT else ollama.GenerateResponse)(**line)
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    return found


def whole(client: Client, path: str, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = posted(client, path, stream=False, **fields).get_json()
    return body


def timeless(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if "duration" not in key and key != "created_at"}


def test_a_reply_is_streamed_unless_the_request_says_otherwise(client: Client) -> None:
    first, *_, last = lines(client, CHAT, model="scripted")
    assert first["message"]["thinking"]
    assert first["message"]["content"] == ""
    assert timeless(last) == {
        "model": "scripted",
        "message": {"role": "assistant", "content": ""},
        "done": True,
        "done_reason": "stop",
        "prompt_eval_count": last["prompt_eval_count"],
        "eval_count": last["eval_count"],
    }
    assert last["prompt_eval_count"] > 0
    assert last["eval_count"] > 0
    assert last["total_duration"] >= last["load_duration"] + last["eval_duration"]


@pytest.mark.parametrize("path", [CHAT, GENERATE])
@pytest.mark.parametrize("fields", [{}, {"think": "low"}, {"options": {"stop": ["Par"]}}])
def test_a_whole_reply_is_the_fold_of_its_stream(client: Client, path: str, fields: dict[str, Any]) -> None:
    streamed = lines(client, path, **fields)
    held = [line["message"] if path == CHAT else line for line in streamed]
    said = "content" if path == CHAT else "response"
    expected = {"thinking": "".join(part.get("thinking", "") for part in held)}
    expected[said] = "".join(part[said] for part in held)
    reply = whole(client, path, **fields)
    answer = reply["message"] if path == CHAT else reply
    assert {name: answer[name] for name in expected} == expected
    assert expected["thinking"] == "Capital of France."
    assert timeless(streamed[-1]).keys() <= timeless(reply).keys()


def test_a_line_has_no_character_that_ends_one_for_some_clients() -> None:
    said = "one\u2028two\u2029three\x85four\x0bfive ü"
    with ScriptedEngine([f"<|channel|>final<|message|>{said}<|return|>"]) as engine:
        parts = lines(client_of(engine), CHAT)  # which are told apart as Python's clients do
    assert "".join(part["message"]["content"] for part in parts) == said


def test_a_call_has_its_arguments_as_an_object_and_is_sent_whole(client: Client) -> None:
    streamed = lines(client, CHAT, tools=[WEATHER])
    [call] = [call for line in streamed for call in line["message"].get("tool_calls", ())]
    assert call["function"] == {"index": 0, "name": "weather", "arguments": {"city": "Oslo"}}
    assert streamed[-1]["done_reason"] == "stop"
    [folded] = whole(client, CHAT, tools=[WEATHER])["message"]["tool_calls"]
    assert folded["function"] == call["function"]


@pytest.mark.parametrize("named", ["tool_name", "name", "tool_call_id", None])
def test_results_find_their_calls_by_id_by_name_or_by_their_order(
    client: Client, prompts: list[str], named: str | None
) -> None:
    def called(name: str) -> dict[str, Any]:
        return {"id": f"id-{name}", "function": {"name": name, "arguments": {"of": name}}}

    def result(name: str) -> dict[str, Any]:
        by = {"tool_call_id": f"id-{name}"} if named == "tool_call_id" else {named: name} if named else {}
        return {"role": "tool", "content": f"result of {name}", **by}

    asked = {
        "role": "assistant",
        "content": "",
        "thinking": "Both.",
        "tool_calls": [called("a"), called("b")],
    }
    order = ["a", "b"] if named is None else ["b", "a"]
    lines(client, CHAT, messages=[USER, asked, *map(result, order)])
    by_name = prompts.pop()
    lines(client, CHAT, messages=[USER, asked, result("a"), result("b")])
    assert by_name.count("result of") == 2
    for name in "ab":
        assert f"functions.{name} to=assistant" in by_name
        assert by_name.index(f"functions.{name} to=assistant") < by_name.index(f"result of {name}")


@pytest.mark.parametrize(
    ("think", "told"),
    [(True, "medium"), (False, "none"), ("low", "low"), ("High", "high"), ("max", "max")],
)
def test_think_is_the_effort(client: Client, think: Any, told: str) -> None:
    assert posted(client, CHAT, think=think).headers["x-mlx-backend-effort"].startswith(f"{told} (think)")


def test_a_word_that_is_no_effort_is_refused(client: Client) -> None:
    response = client.post(CHAT, json={"messages": [USER], "think": "hard"})
    assert response.status_code == 400
    assert "think" in response.get_json()["error"]


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (0, 0),
        ("0", 0),
        (30, 30),
        (1.5, 1.5),
        ("5m", 300),
        ("1h30m", 5400),
        ("90s", 90),
        ("1.5h", 5400),
        ("250ms", 0.25),
        (-1, math.inf),
        ("-1", math.inf),
        ("-1m", math.inf),
        (10**400, math.inf),
        ("", None),
        (None, None),
    ],
)
def test_keep_alive_is_seconds_or_a_time_and_negative_for_ever(written: Any, seconds: float | None) -> None:
    assert OllamaChatBody.parse({"keep_alive": written}).keep_alive == seconds


@pytest.mark.parametrize("written", ["soon", "5 minutes", "5m5", "m", "1d", True, [5], "nan", "--1"])
def test_a_time_that_is_none_is_refused(written: Any) -> None:
    with pytest.raises(ApiError, match="keep_alive: must be a number of seconds"):
        OllamaChatBody.parse({"keep_alive": written})


OPTIONS = {
    "num_predict": 7,
    "temperature": 0.5,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.1,
    "seed": 3,
    "stop": ["x", ""],
    "repeat_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.2,
}


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        (OllamaChatBody, {"messages": [USER]}),
        (GenerateBody, {"prompt": "hello"}),
        (GenerateBody, {"prompt": "hello", "raw": True}),
    ],
)
def test_options_are_the_settings_of_the_reply(body: type[OllamaBody], prompt: dict[str, Any]) -> None:
    written = {**prompt, "options": OPTIONS, "logprobs": True, "logit_bias": {"5": 1}}
    request = body.parse(written).request()
    assert request.sampling == {
        "temperature": 0.5,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 3,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "logit_bias": ((5, 1.0),),
    }
    assert (request.max_tokens, request.stop, request.logprobs) == (7, ("x",), 0)


@pytest.mark.parametrize("limit", [-1, -2, 0])
def test_num_predict_has_words_for_no_limit(limit: int) -> None:
    written = {"messages": [USER], "options": {"num_predict": limit}}
    assert OllamaChatBody.parse(written).request().max_tokens is None


def test_a_penalty_of_zero_is_none() -> None:
    written = {"messages": [USER], "options": {"repeat_penalty": 0}}
    assert OllamaChatBody.parse(written).request().sampling == {"repetition_penalty": 1.0}


def test_what_means_nothing_here_is_named(client: Client) -> None:
    ignored = posted(client, CHAT, options={"num_ctx": 4096, "mirostat": 1, "stop": None}, shift=True).headers
    assert ignored["x-mlx-backend-ignored"] == "shift, options.num_ctx, options.mirostat"
    raw = posted(client, GENERATE, raw=True, think="high", thinking_budget=5, top_logprobs=1).headers
    assert raw["x-mlx-backend-ignored"] == "top_logprobs, think, thinking_budget"


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (CHAT, {"options": {"temperature": "hot"}}, "options.temperature: "),
        (CHAT, {"options": {"num_predict": -3}}, "options.num_predict: "),
        (CHAT, {"messages": "hello"}, "messages: "),
        (
            CHAT,
            {"messages": [{**USER, "content": [{"type": "text"}]}]},
            "messages[0].content: must be a text",
        ),
        (CHAT, {"messages": [{**USER, "images": "x"}]}, "messages[0].images: must be a list"),
        (CHAT, {"messages": [USER, {**USER, "images": [7]}]}, "messages[1].images[0]: must be a file"),
        (CHAT, {"messages": [{**USER, "role": "robot"}]}, "messages[0].role"),
        (CHAT, {"format": "xml"}, 'format: must be "json" or a JSON schema'),
        (CHAT, {"tools": [{"type": "function"}]}, "tools[0].name is missing"),
        (GENERATE, {"template": "{{ .Prompt }}"}, "template = "),
        (GENERATE, {"context": [1, 2]}, "send the conversation to /api/chat"),
        (GENERATE, {"raw": True, "format": "json"}, "format: a prompt with raw goes to the model as it is"),
        (GENERATE, {"suffix": "x", "system": "s"}, "system: a prompt with suffix"),
        (GENERATE, {"suffix": "x"}, "Send the request without 'suffix'"),
        (GENERATE, {"images": ["!"]}, "image"),
    ],
)
def test_bad_input_is_a_sentence_that_names_the_field(
    client: Client, path: str, fields: dict[str, Any], words: str
) -> None:
    body = {"messages": [USER], **fields} if path == CHAT else {"prompt": "hello", **fields}
    response = client.post(path, json=body)
    assert response.status_code == 400
    assert response.get_json().keys() == {"error"}
    assert words in response.get_json()["error"]


@pytest.mark.parametrize("prefix", ["", "data:image/png;base64,"])
def test_images_stand_before_the_text_of_their_message(prefix: str) -> None:
    seen = {"role": "user", "content": "What is this?", "images": [f"{prefix}aaaa", "bbbb"]}
    written = {"messages": [USER, seen]}
    request = OllamaChatBody.parse(written).request()
    parts = [{"type": "image", "image": 0}, {"type": "image", "image": 1}]
    assert request.messages[1]["content"] == [*parts, {"type": "text", "text": "What is this?"}]
    assert [(image.url, image.where) for image in request.images] == [
        ("data:image/png;base64,aaaa", "messages[1].images[0]"),
        ("data:image/png;base64,bbbb", "messages[1].images[1]"),
    ]
    alone = {"prompt": "What is this?", "system": "Look.", "images": ["aaaa"]}
    generated = GenerateBody.parse(alone).request()
    assert isinstance(generated, ChatRequest)
    assert [image.where for image in generated.images] == ["images[0]"]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("", None),
        ("json", AnswerFormat(kind="json_object", field="format")),
        ({}, AnswerFormat(kind="json_object", field="format")),
        (SCHEMA, AnswerFormat(kind="json_schema", value=SCHEMA, strict=True, field="format")),
    ],
)
def test_a_format_holds_the_answer(written: Any, expected: AnswerFormat | None) -> None:
    assert OllamaChatBody.parse({"format": written}).format == expected


@pytest.mark.parametrize("fields", [{"raw": True}, {"suffix": "after"}])
def test_a_raw_prompt_and_one_with_a_suffix_go_to_the_model_as_they_are(fields: dict[str, Any]) -> None:
    written = {"prompt": "<|start|>", "options": {"num_predict": 3}, **fields}
    request = GenerateBody.parse(written).request()
    assert isinstance(request, CompletionRequest)
    assert (request.prompt, request.suffix, request.max_tokens) == ("<|start|>", fields.get("suffix", ""), 3)


def test_an_error_in_mid_stream_is_the_last_line() -> None:
    broken = Transcript(text="<|channel|>final<|message|>Pa", failure=RuntimeError("the batch broke"))
    with ScriptedEngine([broken]) as engine:
        response = client_of(engine).post(CHAT, json={"messages": [USER]})
        *_, last = [json.loads(line) for line in response.get_data(as_text=True).splitlines()]
        assert last.keys() == {"error"}


def test_a_conversation_that_is_too_long_is_refused_in_the_apis_words() -> None:
    with ScriptedEngine([ANSWER], context_length=64) as engine:
        client = client_of(engine)
        response = client.post(CHAT, json={"messages": [{**USER, "content": "word " * 200}]})
        assert response.status_code == 400
        assert response.get_json()["error"].startswith("the input length exceeds the context length: ")


@pytest.mark.parametrize(
    ("fields", "reason", "ignored"), [({}, "load", None), ({"keep_alive": 0}, "unload", "keep_alive")]
)
@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_without_anything_to_answer_a_model_is_loaded_or_unloaded(
    client: Client, path: str, fields: dict[str, Any], reason: str, ignored: str | None
) -> None:
    response = client.post(path, json={"model": "scripted:latest", **fields})
    body = response.get_json()
    assert (body["done"], body["done_reason"]) == (True, reason)
    assert body["message"]["content"] == "" if path == CHAT else body["response"] == ""
    assert response.headers.get("x-mlx-backend-ignored") == ignored  # this one stays in memory


def test_a_model_that_is_not_here_is_a_404(client: Client) -> None:
    for body in (
        {"model": "nobody", "messages": [USER]},
        {"model": "nobody"},
        {"model": "nobody", "keep_alive": 0},
    ):
        response = client.post(CHAT, json=body)
        assert response.status_code == 404
        assert "'nobody'" in response.get_json()["error"]


@pytest.mark.parametrize(
    ("path", "said"),
    [(CHAT, {"message": {"role": "assistant", "content": ""}}), (GENERATE, {"response": "", "thinking": ""})],
)
def test_a_silence_is_filled_with_lines_that_add_nothing(path: str, said: dict[str, Any]) -> None:
    """An empty line would be no JSON, and litellm reads none without a response or a `thinking`."""
    with ScriptedEngine([ANSWER]) as engine:
        body = {"messages": [USER], "prompt": "hello"}
        kind = OllamaChatBody if path == CHAT else GenerateBody
        reply, writer = start(kind.parse(body), Service(engine), ANYONE)
        reply.close()
        line = json.loads(writer.keepalive())
        assert timeless(line) == {"model": engine.model_id, **said, "done": False}
        assert json.loads(writer.keepalive(Queued(3)))["queue_position"] == 3
