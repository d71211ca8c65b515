"""The plugin with the real server on the model that ships: what a Dify user does, call by call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from daemon import PluginError, PluginProcess
from dify_view import assistant, calls_of, result, split_reasoning, text_of, user

QUESTION = "What is the capital of France?"
CURRENT_TIME = {
    "name": "current_time",
    "description": "A tool for getting the current time.",
    "parameters": {
        "type": "object",
        "properties": {
            "format": {"type": "string", "description": "Time format in strftime standard."},
            "timezone": {"type": "string", "description": "Timezone, such as Asia/Tokyo."},
        },
        "required": [],
    },
}


def ask(
    plugin: PluginProcess, credentials: dict[str, str], *messages: dict[str, Any], **more: Any
) -> list[dict[str, Any]]:
    return list(plugin.invoke(list(messages), credentials=credentials, **more))


def test_more_effort_is_more_thinking_and_the_same_answer(
    plugin: PluginProcess, credentials: dict[str, str]
) -> None:
    read = {
        effort: split_reasoning(
            text_of(ask(plugin, credentials, user(QUESTION), parameters={"reasoning_effort": effort}))
        )
        for effort in ("low", "medium", "high")
    }
    assert {answer for answer, _ in read.values()} == {"The capital of France is Paris."}
    assert len(read["low"][1]) < len(read["medium"][1]) < len(read["high"][1])


def test_the_second_turn_works_with_the_history_dify_sends_back(
    plugin: PluginProcess, credentials: dict[str, str]
) -> None:
    first = text_of(ask(plugin, credentials, user(QUESTION)))
    assert "<think>" in first
    second = ask(plugin, credentials, user(QUESTION), assistant(first), user("What is the capital of Italy?"))
    assert split_reasoning(text_of(second))[0] == "The capital of Italy is Rome."


def test_a_system_prompt_may_state_the_effort(plugin: PluginProcess, credentials: dict[str, str]) -> None:
    high = {"role": "system", "content": "You are a helpful assistant.\nReasoning: high"}
    plain = {"role": "system", "content": "You are a helpful assistant."}
    from_error_object = split_reasoning(text_of(ask(plugin, credentials, high, user(QUESTION))))[1]
    usual = split_reasoning(text_of(ask(plugin, credentials, plain, user(QUESTION))))[1]
    assert len(from_error_object) > len(usual)


def test_an_agent_calls_difys_own_tool_and_answers_with_its_result(
    plugin: PluginProcess, credentials: dict[str, str]
) -> None:
    request = user("Use current_time.")
    first = ask(plugin, credentials, request, tools=[CURRENT_TIME])
    (call,) = calls_of(first)
    assert call["function"]["name"] == "current_time"
    assert first[-1]["delta"]["finish_reason"] == "tool_calls"
    second = ask(
        plugin,
        credentials,
        request,
        assistant(text_of(first), [call]),
        result(call, "2026-11-21 10:00:00"),
        tools=[CURRENT_TIME],
    )
    answer, _ = split_reasoning(text_of(second))
    assert "2026-11-21 10:00:00" in answer
    renamed = {**call, "id": "0f5c6c9e-0000-4000-8000-000000000000"}
    third = ask(
        plugin,
        credentials,
        request,
        assistant(text_of(first), [renamed]),
        result(renamed, "2026-11-21 10:00:00"),
        assistant(text_of(second)),
        user(QUESTION),
        tools=[CURRENT_TIME],
    )
    assert split_reasoning(text_of(third))[0] == "The capital of France is Paris."


TITLE = "You are asked to generate a concise chat title … Return only JSON: What is the capital of France?"


@pytest.mark.parametrize("limit", [500, 24])
def test_the_title_request_is_answered_in_one_piece_within_its_limit(
    plugin: PluginProcess, credentials: dict[str, str], limit: int
) -> None:
    (whole,) = ask(
        plugin, credentials, user(TITLE), stream=False, parameters={"temperature": 1, "max_tokens": limit}
    )
    text = whole["delta"]["message"]["content"]
    assert text.strip()
    assert "think" not in text
    assert whole["delta"]["usage"]["completion_tokens"] <= limit


def test_a_background_request_thinks_less_than_the_same_question_of_a_user(
    plugin: PluginProcess, credentials: dict[str, str]
) -> None:
    settings = {"max_tokens": 40}
    (in_background,) = ask(plugin, credentials, user(QUESTION), stream=False, parameters=settings)
    chosen = {**settings, "reasoning_effort": "high"}
    (turn,) = ask(plugin, credentials, user(QUESTION), stream=False, parameters=chosen)
    texts = [split_reasoning(answer["delta"]["message"]["content"]) for answer in (in_background, turn)]
    assert [answer for answer, _ in texts] == ["The capital of France is Paris."] * 2
    assert len(texts[0][1]) < len(texts[1][1])


@pytest.mark.parametrize("settings", [{"max_tokens": 40}, {"max_tokens": 60, "answer_reserve": 20}])
def test_a_small_limit_at_high_effort_ends_in_an_answer(
    plugin: PluginProcess, credentials: dict[str, str], settings: dict[str, int]
) -> None:
    chunks = ask(plugin, credentials, user(QUESTION), parameters={**settings, "reasoning_effort": "high"})
    answer, thinking = split_reasoning(text_of(chunks))
    assert answer.startswith("The capital of France")
    assert thinking
    assert chunks[-1]["delta"]["usage"]["completion_tokens"] <= settings["max_tokens"]


def test_whoever_keeps_no_tokens_for_the_answer_is_told_why_there_is_none(
    plugin: PluginProcess, credentials: dict[str, str]
) -> None:
    settings = {"max_tokens": 12, "answer_reserve": 0, "reasoning_effort": "high"}
    with pytest.raises(PluginError, match=r"the limit of Max tokens \(12\) was reached"):
        ask(plugin, credentials, user(QUESTION), parameters=settings)


def test_json_that_does_not_fit_into_the_limit_is_an_error(
    plugin: PluginProcess, credentials: dict[str, str]
) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "string", "minLength": 400}}, "required": ["n"]}
    settings = {"max_tokens": 40, "json_schema": json.dumps(schema), "response_format": "json_schema"}
    with pytest.raises(PluginError, match=r"was to be JSON, .* Raise Max tokens"):
        ask(plugin, credentials, user(QUESTION), parameters=settings)


def test_several_conversations_at_once_do_not_mix(plugin: PluginProcess, credentials: dict[str, str]) -> None:
    capitals = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid"}
    running = {
        country: plugin.invoke([user(f"What is the capital of {country}?")], credentials=credentials)
        for country in capitals
    }
    for country, capital in capitals.items():
        assert capital in text_of(list(running[country]))


def test_a_customizable_model_sends_the_same_effort_as_a_predefined_one(
    plugin: PluginProcess, credentials: dict[str, str]
) -> None:
    predefined = text_of(ask(plugin, credentials, user(QUESTION), parameters={"reasoning_effort": "low"}))
    customizable = text_of(
        ask(plugin, credentials, user(QUESTION), model="mlx-demo", parameters={"reasoning_effort": "low"})
    )
    assert predefined == customizable


def test_a_wrong_option_is_refused_with_the_options(
    plugin: PluginProcess, credentials: dict[str, str]
) -> None:
    with pytest.raises(
        PluginError, match=r"reasoning_effort should be one of \['none', 'low', 'medium', 'high'\]"
    ):
        ask(plugin, credentials, user("hi"), parameters={"reasoning_effort": "banana"})


def test_a_wrong_key_is_an_authorization_error(plugin: PluginProcess, credentials: dict[str, str]) -> None:
    with pytest.raises(PluginError) as caught:
        ask(plugin, {**credentials, "api_key": "wrong"}, user("hi"))
    assert caught.value.kind == "InvokeAuthorizationError"


def test_a_model_that_is_not_served_is_reported_with_the_one_that_is(
    plugin: PluginProcess, credentials: dict[str, str]
) -> None:
    model = "mlx-community/gpt-oss-20b-MXFP4-Q8"
    with pytest.raises(PluginError) as caught:
        ask(plugin, credentials, user("hi"), model=model)
    assert caught.value.kind == "InvokeBadRequestError"
    assert caught.value.message == (
        f"[MLX] the server at {credentials['endpoint_url']}/v1 does not have the model {model!r}. It has: mlx-demo. "
        "Choose one of these, or Default, which always works, or start the server with the model you want."
    )


def test_a_prompt_that_is_too_long_is_reported_with_both_numbers(
    plugin: PluginProcess, credentials: dict[str, str]
) -> None:
    with pytest.raises(PluginError, match=r"has \d+ tokens; the context holds 16384") as caught:
        ask(plugin, credentials, user("word " * 20_000))
    assert caught.value.kind == "InvokeBadRequestError"


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        ({}, r"the model mlx-demo cannot see images\. Remove the image, or choose a model with vision\."),
        ({"vision": "supported"}, r"This model cannot see images\. Remove the image,"),  # the server's words
    ],
)
def test_an_image_is_refused_in_words_for_people(
    plugin: PluginProcess, credentials: dict[str, str], form: dict[str, str], sentence: str
) -> None:
    image = {"type": "image", "format": "png", "mime_type": "image/png", "base64_data": "aaaa"}
    message = {"role": "user", "content": [{"type": "text", "data": "look"}, image]}
    with pytest.raises(PluginError, match=sentence) as caught:
        ask(plugin, {**credentials, **form}, message)
    assert caught.value.kind == "InvokeBadRequestError"


def test_a_plain_text_document_reaches_the_model(plugin: PluginProcess, credentials: dict[str, str]) -> None:
    question = {"type": "document", "format": "txt", "mime_type": "text/plain", "base64_data": "V2hhdD8="}
    billed = [
        ask(plugin, credentials, {"role": "user", "content": parts})[-1]["delta"]["usage"]["prompt_tokens"]
        for parts in ([{"type": "text", "data": "Hi"}], [{"type": "text", "data": "Hi"}, question])
    ]
    assert billed[0] < billed[1]


# -- credential forms --------------------------------------------------------------------------------


def test_good_credentials_are_accepted(plugin: PluginProcess, credentials: dict[str, str]) -> None:
    provider = list(plugin.request("validate_provider_credentials", provider="mlx", credentials=credentials))
    model = list(
        plugin.request(
            "validate_model_credentials",
            provider="mlx",
            model_type="llm",
            model="mlx-demo",
            credentials=credentials,
        )
    )
    assert provider[0]["result"] is True
    assert model[0]["result"] is True


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"endpoint_url": "http://127.0.0.1:9"}, "No server at http://127.0.0.1:9/v1: start it with"),
        ({"endpoint_url": "not a host"}, "'not a host' is not a server address"),
        ({"endpoint_url": ""}, "address is missing"),
        ({"api_key": "wrong"}, "refused the API key"),
        ({"api_key": "鍵"}, "The API key holds characters that a key cannot have"),
        ({"timeout": "soon"}, "Timeout must be a positive number, not 'soon'"),
    ],
)
def test_bad_credentials_are_refused_with_advice(
    plugin: PluginProcess, credentials: dict[str, str], change: dict[str, str], words: str
) -> None:
    form = {**credentials, **change}
    with pytest.raises(PluginError) as caught:
        list(plugin.request("validate_provider_credentials", provider="mlx", credentials=form))
    assert caught.value.kind == "CredentialsValidateFailedError"
    assert words in caught.value.message


def test_a_customizable_model_must_be_served(plugin: PluginProcess, credentials: dict[str, str]) -> None:
    with pytest.raises(PluginError, match="It has: mlx-demo"):
        list(
            plugin.request(
                "validate_model_credentials",
                provider="mlx",
                model_type="llm",
                model="gpt-4o",
                credentials=credentials,
            )
        )


# -- schemas and tokens ------------------------------------------------------------------------------


def test_default_has_the_context_and_the_efforts_of_the_model_behind_it(
    plugin: PluginProcess, credentials: dict[str, str]
) -> None:
    (default,), (named,) = (
        plugin.request(
            "get_ai_model_schemas", provider="mlx", model_type="llm", credentials=credentials, model=model
        )
        for model in ("default", "mlx-demo")
    )
    assert default["model_schema"]["label"]["en_US"] == "Default"
    assert default["model_schema"]["model_properties"]["context_size"] < 131_072
    for key in ("features", "model_properties", "parameter_rules"):
        assert default["model_schema"][key] == named["model_schema"][key]


def schema(plugin: PluginProcess, **form: str) -> dict[str, Any]:
    (answer,) = plugin.request(
        "get_ai_model_schemas",
        provider="mlx",
        model_type="llm",
        model="my-model",
        credentials={"endpoint_url": "http://127.0.0.1:9", **form},
    )
    described: dict[str, Any] = answer["model_schema"]
    return described


def rules(described: dict[str, Any]) -> dict[str, Any]:
    return {rule["name"]: rule for rule in described["parameter_rules"]}


def test_a_customizable_model_has_an_effort_select_even_without_a_server(
    plugin: PluginProcess,
) -> None:
    effort = rules(schema(plugin))["reasoning_effort"]
    assert effort["options"] == ["low", "medium", "high"]
    assert effort["required"] is True
    assert effort["default"] == "medium"


def test_the_form_shapes_what_a_customizable_model_offers(plugin: PluginProcess) -> None:
    described = schema(
        plugin,
        reasoning="switch",
        context_size="4096",
        max_output_tokens="8192",
        tool_calling="unsupported",
        vision="supported",
        structured_output="supported",
    )
    offered = rules(described)
    assert offered["reasoning_effort"]["options"] == ["none", "medium"]
    assert offered["max_tokens"]["max"] == 4096
    assert offered["response_format"]["options"] == ["text", "json_object", "json_schema"]
    assert described["model_properties"]["context_size"] == 4096
    assert "tool-call" not in described["features"]
    assert {"vision", "structured-output"} <= set(described["features"])


def counted(
    plugin: PluginProcess, credentials: dict[str, str], *messages: dict[str, Any], **more: Any
) -> int:
    (answer,) = plugin.request(
        "get_llm_num_tokens",
        provider="mlx",
        model_type="llm",
        model="default",
        credentials=credentials,
        prompt_messages=list(messages),
        **{"tools": [], **more},
    )
    number: int = answer["num_tokens"]
    return number


def test_tokens_are_counted_as_the_servers_usage_states_them(
    plugin: PluginProcess, credentials: dict[str, str]
) -> None:
    conversation = [user(QUESTION), assistant("<think>\nFrance…\n</think>\n\nParis."), user("And of Italy?")]
    answer = ask(plugin, credentials, *conversation, tools=[CURRENT_TIME])
    billed = answer[-1]["delta"]["usage"]["prompt_tokens"]
    assert counted(plugin, credentials, *conversation, tools=[CURRENT_TIME]) == billed
    assert counted(plugin, credentials, *conversation) < billed


def test_tokens_are_estimated_without_any_download(plugin: PluginProcess) -> None:
    (counted,) = plugin.request(
        "get_llm_num_tokens",
        provider="mlx",
        model_type="llm",
        model="default",
        credentials={"endpoint_url": "http://127.0.0.1:9"},
        prompt_messages=[user("four letters make a token, 日本語は一字")],
        tools=[],
    )
    assert 8 <= counted["num_tokens"] <= 20
