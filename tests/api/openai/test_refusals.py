"""What is refused, and how: OpenAI's error object, the field, the value, before a byte is streamed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from scripted_engine import ScriptedEngine
from single_model import SingleModelRegistry
from werkzeug.test import Client

from mlx_backend.chat.service import Service
from mlx_backend.errors import EngineError
from mlx_backend.server.app import App
from mlx_backend.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

ANSWER = "<|channel|>final<|message|>Paris.<|return|>"
USER = {"role": "user", "content": "hello"}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with ScriptedEngine(lambda _: ANSWER, model_id="someone/scripted", context_length=4096) as engine:
        yield Client(
            App(SingleModelRegistry(Service(engine)), Settings(max_body_bytes=100_000, max_images_bytes=0))
        )


def refused(client: Client, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    # Closed, so that it is no longer in flight: one application answers all of these.
    response = client.post(
        path, buffered=True, **({"data": body} if isinstance(body, bytes) else {"json": body})
    )
    assert response.status_code == status, response.get_data(as_text=True)
    answer = response.get_json()
    assert answer.keys() == {"error"}
    error: dict[str, Any] = answer["error"]
    numbers = {key: value for key, value in error.items() if key not in {"message", "type", "param", "code"}}
    assert error.keys() - numbers.keys() == {"message", "type", "param", "code"}
    # For programs, and only where the text has it too.
    assert all(type(value) is int and str(value) in error["message"] for value in numbers.values())
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    return error


def part(kind: str) -> dict[str, Any]:
    sent = {"type": kind, "image_url": {"url": "data:image/png;base64,aaaa"}}
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "?"}, sent]}]}


# the fields beside messages | the field to blame | what the message must mention
FIELDS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"n": 0}, "n", "greater than or equal to 1; got 0"),
    ({"n": 129}, "n", "which is 128 (--max-choices)"),
    ({"n": 2, "best_of": 3}, "best_of", "best_of = 3"),
    ({"prompt_logprobs": 1}, "prompt_logprobs", "send echo and logprobs to /v1/completions"),
    ({"echo": True}, "echo", "only /v1/completions"),
    ({"add_special_tokens": True}, "add_special_tokens", "the chat template writes them"),
    (
        {"add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message",
        "send one of them",
    ),
    ({"truncate_prompt_tokens": 100}, "truncate_prompt_tokens", "never cut"),
    ({"allowed_token_ids": [1]}, "allowed_token_ids", "logit_bias"),
    ({"include_stop_str_in_output": True}, "include_stop_str_in_output", "before its stop string"),
    ({"documents": [{"text": "Paris"}]}, "documents", "into a message"),
    ({"lora_path": "poet"}, "lora_path", "adapters"),
    ({"return_token_ids": True}, "return_token_ids", "/v1/tokenize"),
    ({"user": 5}, "user", "valid string"),
    ({"output_config": "low"}, "output_config", '"low"'),
    ({"n_predict": 0}, "n_predict", "greater than 0"),
    ({"messages": [{"role": "user", "content": 123}]}, "messages[0].content", "list of parts; got 123"),
    ({"messages": [USER, {"role": "system", "content": True}]}, "messages[1].content", "got true"),
    ({"messages": [{"role": "assistant", "content": {"a": 1}}]}, "messages[0].content", 'got {"a": 1}'),
    ({"messages": [{"role": "user", "content": ["a", 123]}]}, "messages[0].content[1]", "got 123"),
    ({"messages": [{"role": "user", "content": [["a"]]}]}, "messages[0].content[0]", "with a text"),
    (
        {"messages": [USER, {"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "messages[1].content[0]",
        '{"type": "text", "text": "…"}',
    ),
    ({"messages": [{"role": "user", "content": [{"type": "input_text"}]}]}, "messages[0].content[0]", "text"),
    ({"suffix": "b"}, "suffix", "only /v1/completions"),
    ({"n": "two"}, "n", '"two"'),
    ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
    ({"response_format": "json"}, "response_format", "json_object"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "banana"}}}},
        "response_format",
        "banana",
    ),
    ({"guided_json": "not json"}, "guided_json", "is not JSON"),
    ({"json_schema": "not json"}, "json_schema", "is not JSON"),
    ({"regex": "("}, "regex", "unclosed group"),
    ({"ebnf": "root ::= 'a'"}, "ebnf", "send response_format"),
    ({"structural_tag": {"structures": []}}, "structural_tag", "send response_format"),
    ({"structured_outputs": {"grammar": "root ::= 'a'"}}, "structured_outputs", "grammar is not supported"),
    ({"structured_outputs": {"json": {"type": "banana"}}}, "structured_outputs.json", "banana"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
    (
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        "structured_outputs.choice",
        "can be held to one of them",
    ),
    ({"extra_body": {"guided_regex": "("}}, "guided_regex", "unclosed group"),
    (
        {"extra_body": {"response_format": {"type": "json_object"}}, "response_format": {"type": "text"}},
        "extra_body.response_format",
        "say different things",
    ),
    ({"guided_regex": "("}, "guided_regex", "unclosed group"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "can be held to one of them"),
    ({"tool_choice": "required"}, "tool_choice", "the request has no tools"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "no function tool"),
    ({"tool_choice": "banana"}, "tool_choice", "required"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "required"),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "some", "tools": []}}},
        "tool_choice.allowed_tools.mode",
        '"some": send auto or required',
    ),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": 5}]}}},
        "tool_choice.allowed_tools.tools[0]",
        "by its type and name",
    ),
    ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice", "no custom tool"),
    ({"functions": [{"name": "f"}]}, "functions", "tools"),
    ({"bad_words": ["Paris"]}, "bad_words", "logit_bias"),
    ({"min_tokens": 5}, "min_tokens", "where the model ends it"),
    ({"ignore_eos": True}, "ignore_eos", "where the model ends it"),
    ({"chat_template": "{{ messages }}"}, "chat_template", "--chat-template"),
    ({"logprobs": 3}, "logprobs", "valid boolean"),
    ({"top_logprobs": 3}, "top_logprobs", "without logprobs = true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20; got 21"),
    ({"adapters": "pirate"}, "adapters", "There is no adapter 'pirate'"),
    ({"xtc_probability": 2}, "xtc_probability", "less than or equal to 1; got 2"),
    ({"modalities": ["text", "audio"]}, "modalities", "text only"),
    ({"audio": {"voice": "alloy"}}, "audio", "text only"),
    ({"web_search_options": {}}, "web_search_options", "search"),
    ({"temperature": 3}, "temperature", "less than or equal to 2"),
    ({"temperature": -1}, "temperature", "-1"),
    ({"temperature": "0.7"}, "temperature", '"0.7"'),
    ({"temperature": True}, "temperature", "true"),
    ({"top_p": 1.5}, "top_p", "1.5"),
    ({"top_k": 1.5}, "top_k", "1.5"),
    ({"priority": "high"}, "priority", "high"),
    ({"thinking_budget": -2}, "thinking_budget", "greater than or equal to -1"),
    ({"thinking_token_budget": "many"}, "thinking_token_budget", "many"),
    ({"thinking_budget": 1.5}, "thinking_budget", "1.5"),
    ({"answer_reserve": -1}, "answer_reserve", "greater than or equal to 0"),
    ({"reasoning": {"effort": "low", "max_tokens": -5}}, "reasoning.max_tokens", "-5"),
    ({"thinking": {"budget_tokens": True}}, "thinking.budget_tokens", "true"),
    (
        {"thinking_budget": 5, "reasoning": {"max_tokens": 6}},
        "reasoning.max_tokens",
        "is 5 and reasoning.max_tokens is 6",
    ),
    ({"priority": 2**31}, "priority", "less than"),
    ({"max_tokens": 0}, "max_tokens", "greater than 0"),
    ({"max_tokens": -5}, "max_tokens", "-5"),
    ({"max_tokens": 1.5}, "max_tokens", "1.5"),
    ({"max_tokens": "10"}, "max_tokens", '"10"'),
    ({"max_tokens": -1.5}, "max_tokens", "-1.5"),
    ({"max_tokens": True}, "max_tokens", "true"),
    ({"max_tokens": 1e300}, "max_tokens", "valid integer"),
    ({"seed": 2.5}, "seed", "2.5"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "greater than 0"),
    ({"seed": "x"}, "seed", '"x"'),
    ({"stop": 5}, "stop", "list of strings"),
    ({"stop": ["a", 5]}, "stop", "list of strings"),
    ({"stream": "yes"}, "stream", '"yes"'),
    ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage", '"yes"'),
    ({"logit_bias": {"x": 1}}, "logit_bias", "'x'"),
    ({"logit_bias": {"1": 1000}}, "logit_bias", "100"),
    ({"logit_bias": {"999999999": 1}}, "logit_bias", "999999999"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type", '"retrieval"'),
    ({"tools": [{"type": "namespace", "name": "n", "tools": []}]}, "tools[0].type", '"namespace"'),
    ({"tools": [{}]}, "tools[0].type", "null"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom.name", "missing"),
    (
        {"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "grammar"}}}]},
        "tools[0].custom.format",
        "needs syntax",
    ),
    (
        {
            "tools": [
                {
                    "type": "custom",
                    "custom": {
                        "name": "f",
                        "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "("}},
                    },
                }
            ]
        },
        "tools[0].custom.format",
        "unclosed group",
    ),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "missing"),
    ({"tools": "f"}, "tools", '"f"'),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name", "at least 1"),
    ({"tools": [{"type": "function", "function": {"name": 5}}]}, "tools[0].function.name", "got 5"),
    (
        {"tools": [{"name": "f"}, {"name": "f", "description": "Another."}]},
        "tools[1].name",
        'another tool called "f"',
    ),
    ({"tools": [{"name": "f"}] * 100}, "tools[1].name", 'another tool called "f"'),
    (
        {"tools": [{"name": "f", "parameters": "a schema"}]},
        "tools[0].parameters",
        '"a schema"',
    ),
    (
        {"tools": [{"name": "g"}, {"name": "f", "strict": True, "parameters": {"type": "banana"}}]},
        "tools[1].parameters",
        "tools[1] (f): its parameters",
    ),
    ({"reasoning_effort": "banana"}, "reasoning_effort", "medium"),
    ({"reasoning_format": "banana"}, "reasoning_format", "separate"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "self"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs", "5"),
    ({"chat_template_kwargs": '{"enable_thinking": tru'}, "chat_template_kwargs", "is not JSON"),
    ({"chat_template_kwargs": "[1]"}, "chat_template_kwargs", "[1]"),
    ({"chat_template_kwargs": '{"messages": []}'}, "chat_template_kwargs", "messages"),
    ({"messages": []}, "messages", ""),
    ({"messages": None}, "messages", "null"),
    ({"messages": "hello"}, "messages", '"hello"'),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role", "wizard"),
    (part("image_url"), "messages[0].content[1]", "This model cannot see images. Remove the image,"),
    (part("image"), "messages[0].content[1]", 'Write it as {"type": "image_url"'),
    (part("input_audio"), "messages[0].content[1]", "This model cannot hear audio. Remove the audio,"),
    (part("video_url"), "messages[0].content[1]", "This model cannot watch videos. Remove the video,"),
    (part("file"), "messages[0].content[1]", "This model cannot open files. Remove the file,"),
    (part("hologram"), "messages[0].content[1]", 'cannot have a part of type "hologram"'),
]


@pytest.mark.parametrize(("fields", "param", "mention"), FIELDS, ids=[str(row[0])[:60] for row in FIELDS])
@pytest.mark.parametrize("stream", [False, True])
def test_an_invalid_field_is_named(
    client: Client, fields: dict[str, Any], param: str, mention: str, stream: bool
) -> None:
    error = refused(client, CHAT, {"messages": [USER], "stream": stream, **fields})
    assert error["param"] == param
    assert mention in error["message"]


def test_messages_may_not_be_missing(client: Client) -> None:
    assert refused(client, CHAT, {}) == {
        "message": "messages is missing.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": None,
    }


@pytest.mark.parametrize(
    ("body", "mention"),
    [
        (b"", "line 1, column 1"),
        (b'{"messages": [}', "line 1, column 15"),
        (b"[1, 2]", "a list"),
        (b'"text"', "a string"),
        (b"null", "null"),
        (b'{"temperature": NaN}', "NaN"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"\xff\xfe{", "byte 0"),
        (b"[" * 50_000, "nested"),
    ],
)
def test_a_body_that_is_not_a_json_object_is_refused(client: Client, body: bytes, mention: str) -> None:
    assert mention in refused(client, CHAT, body)["message"]


def test_a_body_over_the_limit_is_413(client: Client) -> None:
    assert "100000 bytes" in refused(client, CHAT, b" " * 100_001, 413)["message"]


@pytest.mark.parametrize("name", ["gpt-4o", "scripted/", "x" * 10_000])
def test_an_unknown_model_is_404_and_the_error_names_the_one_that_is_served(
    client: Client, name: str
) -> None:
    error = refused(client, CHAT, {"messages": [USER], "model": name}, 404)
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert "someone/scripted" in error["message"]
    assert len(error["message"]) < 500


@pytest.mark.parametrize("name", ["someone/scripted", "scripted", "default", "", None])
def test_the_model_has_several_names(client: Client, name: str | None) -> None:
    response = client.post(CHAT, json={"messages": [USER], "model": name})
    assert response.status_code == 200
    assert response.get_json()["model"] == "someone/scripted"


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(client: Client) -> None:
    error = refused(client, CHAT, {"messages": [{"role": "user", "content": "word " * 4096}]})
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"
    assert "4096" in error["message"]
    assert error["max_model_len"] == 4096
    assert f"{error['prompt_tokens']} tokens" in error["message"]
    assert error["prompt_tokens"] > 4096


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "word " * 4096}]}),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 400_000}]}),
        (CHAT, {"messages": [USER] * 5000}),
        ("/v1/completions", {"prompt": "word " * 4096}),
        ("/v1/completions", {"prompt": ["a", [5] * 4096]}),
    ],
    ids=["tokens", "characters", "messages", "a text", "token ids"],
)
def test_agents_find_the_words_by_which_they_know_that_a_prompt_is_too_long(
    path: str, body: dict[str, Any]
) -> None:
    with ScriptedEngine([], context_length=4096) as engine:
        error = refused(Client(App(SingleModelRegistry(Service(engine)), Settings())), path, body)
    assert error["code"] == "context_length_exceeded"
    for words in (
        "This model's maximum context length is 4096 tokens. However, ",
        "Please reduce the length of the ",
        f"{error['prompt_tokens']} tokens",
    ):
        assert words in error["message"]


def test_an_unknown_adapter_is_reported_under_the_requests_own_field(client: Client) -> None:
    error = refused(client, CHAT, {"messages": [USER], "adapters": "poet"})
    assert (error["param"], error["message"]) == (
        "adapters",
        "There is no adapter 'poet' here; there are: none.",
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [[1], [True]]}, "prompt[1]"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "n"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "n": 2, "best_of": 1}, "best_of"),
        ({"prompt": "a", "echo": "yes"}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "suffix": "b", "echo": True}, "echo"),
        ({"prompt": "a", "max_tokens": -2}, "max_tokens"),
        ({"prompt": "a", "prompt_embeds": "QUJD"}, "prompt_embeds"),
        ({"prompt": [[5] * 1000] * 4, "n": 30, "echo": True, "logprobs": 20}, "logprobs"),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt": "a", "extra_body": {"guided_choice": ["b"]}}, "guided_choice"),
        ({"prompt": "a", "structured_outputs": {"regex": "b"}}, "structured_outputs"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "word " * 4096}, "prompt"),
    ],
    ids=str,
)
def test_completions_refuse_by_name_too(client: Client, fields: dict[str, Any], param: str) -> None:
    assert refused(client, "/v1/completions", fields)["param"] == param


def test_unknown_addresses_and_methods_have_the_same_shape(client: Client) -> None:
    assert "GET / lists" in refused(client, "/v1/nothing", {}, 404)["message"]
    response = client.get(CHAT)
    assert response.status_code == 405
    assert response.headers["Allow"] == "POST"
    assert response.get_json()["error"]["type"] == "invalid_request_error"


def test_an_engine_that_fails_one_request_is_a_500_without_a_traceback() -> None:
    def broken(prompt: str) -> str:
        raise EngineError("out of memory")

    with ScriptedEngine(broken) as engine:
        client = Client(App(SingleModelRegistry(Service(engine)), Settings()))
        assert refused(client, CHAT, {"messages": [USER]}, 500)["message"] == "out of memory"
        streamed = client.post(CHAT, json={"messages": [USER], "stream": True})
        last = streamed.get_data(as_text=True).split("\n\n")[-2]
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == "out of memory"


def test_a_dead_engine_is_a_503(client: Client) -> None:
    engine = ScriptedEngine([])
    engine.stop()
    dead = Client(App(SingleModelRegistry(Service(engine)), Settings()))
    assert refused(dead, CHAT, {"messages": [USER]}, 503)["code"] == "engine_stopped"
    assert dead.get("/health").status_code == 503


def test_an_unexpected_exception_is_a_500_with_a_number_that_is_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Surprising(ScriptedEngine):
        def generate(self, *_: object) -> Any:
            raise ZeroDivisionError("secret detail")

    with Surprising([]) as engine:
        error = refused(
            Client(App(SingleModelRegistry(Service(engine)), Settings())), CHAT, {"messages": [USER]}, 500
        )
    assert "secret" not in error["message"]
    assert error["code"] == "internal"
    number = error["message"].split(":")[0].removeprefix("Internal error ")
    assert any(number in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": "DEEP"}}]},
        {"metadata": "DEEP"},
    ],
)
def test_json_nested_too_deeply_is_refused_before_anything_walks_it(
    client: Client, fields: dict[str, Any]
) -> None:
    body = json.dumps({"messages": [USER], **fields}).replace('"DEEP"', '{"a":' * 300 + "1" + "}" * 300)
    response = client.post(CHAT, data=body, content_type="application/json")
    assert response.status_code == 400
    assert "nested too deeply" in response.get_json()["error"]["message"]


def test_call_arguments_nested_too_deeply_are_kept_as_text(client: Client) -> None:
    deep = '{"a":' * 900 + "1" + "}" * 900
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": deep}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "1"}]
    response = client.post(CHAT, json={"messages": messages})
    assert response.status_code == 200, response.text
