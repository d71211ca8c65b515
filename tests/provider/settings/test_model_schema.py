"""The schema of a customizable model: from its form, from its server, and from neither."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from daemon import PluginError
from dify_view import user
from fake_servers import llama_cpp, lm_studio, mlx_backend, mlx_lm, ollama, vllm

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import PluginProcess
    from fake_servers import FakeServer

GPT_OSS = {
    "id": "gpt-oss",
    "type": "llm",
    "state": "ready",
    "context_length": 131_072,
    "max_output_tokens": 16_384,
    "capabilities": ["completion", "thinking", "tools", "structured_output"],
    "reasoning": {"efforts": ["low", "medium", "high"], "default": "medium"},
    "sampling_defaults": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": "much", "max_tokens": 7},
}
QWEN = {
    "id": "qwen",
    "capabilities": ["completion", "thinking"],
    "reasoning": {"efforts": ["none", "medium"], "default": "medium"},
}
R1 = {"id": "r1", "capabilities": ["thinking"], "reasoning": {"efforts": ["medium"], "default": "medium"}}
PLAIN = {"id": "plain", "context_length": 8_192, "capabilities": ["completion", "vision"]}
NOBODY = "http://127.0.0.1:9"


def schema(plugin: PluginProcess, server: FakeServer | str, model: str, **form: Any) -> dict[str, Any]:
    address = server if isinstance(server, str) else server.address
    (answer,) = plugin.request(
        "get_ai_model_schemas",
        provider="mlx",
        model_type="llm",
        model=model,
        credentials={"endpoint_url": address, **form},
    )
    described: dict[str, Any] = answer["model_schema"]
    return described


def rules(described: dict[str, Any]) -> dict[str, Any]:
    return {rule["name"]: rule for rule in described["parameter_rules"]}


def test_mlx_backend_says_what_its_model_can_do(plugin: PluginProcess) -> None:
    with mlx_backend(GPT_OSS) as server:
        described = schema(plugin, server, "gpt-oss")
    assert set(described["features"]) == {
        "agent-thought", "tool-call", "stream-tool-call", "structured-output"
    }  # fmt: skip
    assert described["model_properties"] == {"mode": "chat", "context_size": 131_072}
    assert described["label"]["en_US"] == "gpt-oss"
    offered = rules(described)
    assert offered["reasoning_effort"]["options"] == ["low", "medium", "high"]
    assert offered["reasoning_effort"]["required"] is True
    assert (offered["max_tokens"]["default"], offered["max_tokens"]["max"]) == (8_192, 16_384)
    assert offered["thinking_budget"]["required"] is False
    assert (offered["reasoning_format"]["default"], offered["reasoning_format"]["required"]) == ("show", True)
    assert "json_schema" in offered["response_format"]["options"]


def test_sampling_defaults_are_the_models_own_if_they_are_valid(plugin: PluginProcess) -> None:
    with mlx_backend(GPT_OSS) as server:
        offered = rules(schema(plugin, server, "gpt-oss"))
    assert (offered["temperature"]["default"], offered["top_p"]["default"]) == (0.7, 0.8)
    assert offered["top_k"]["default"] == 20
    assert offered["min_p"]["default"] == 0.0
    assert offered["max_tokens"]["default"] == 8_192


def test_a_model_with_a_switch_offers_none_and_one_level(plugin: PluginProcess) -> None:
    with mlx_backend(QWEN) as server:
        described = schema(plugin, server, "qwen")
    effort = rules(described)["reasoning_effort"]
    assert (effort["options"], effort["default"]) == (["none", "medium"], "medium")
    assert "tool-call" not in described["features"]
    assert "response_format" not in rules(described)


def test_a_model_that_always_reasons_has_a_block_and_no_choice(plugin: PluginProcess) -> None:
    with mlx_backend(R1) as server:
        described = schema(plugin, server, "r1")
    assert "agent-thought" in described["features"]
    assert "reasoning_effort" not in rules(described)
    assert {"reasoning_format", "thinking_budget"} <= rules(described).keys()


def test_a_model_that_does_not_reason_has_no_settings_for_it(plugin: PluginProcess) -> None:
    with mlx_backend(PLAIN) as server:
        described = schema(plugin, server, "plain")
    assert described["features"] == ["vision"]
    assert not {"reasoning_effort", "reasoning_format", "thinking_budget"} & rules(described).keys()
    assert rules(described)["max_tokens"]["max"] == 8_192
    assert rules(described)["max_tokens"]["default"] == 4_096


def test_the_form_overrides_the_server(plugin: PluginProcess) -> None:
    with mlx_backend(GPT_OSS) as server:
        described = schema(
            plugin,
            server,
            "gpt-oss",
            context_size="32k",
            tool_calling="unsupported",
            vision="supported",
            structured_output="unsupported",
            reasoning="none",
            display_name="うちの gpt-oss",
        )
    assert described["features"] == ["vision"]
    assert described["model_properties"]["context_size"] == 32_768
    assert described["label"]["en_US"] == "うちの gpt-oss"
    assert "reasoning_effort" not in rules(described)


@pytest.mark.parametrize(
    ("model", "wished", "default"),
    [
        ("gpt-oss", "high", "high"),
        ("gpt-oss", "none", "low"),  # gpt-oss always reasons: the least it knows
        ("qwen", "high", "medium"),
        ("qwen", "low", "medium"),
        ("qwen", "none", "none"),
    ],
)
def test_the_select_starts_with_the_forms_effort(
    plugin: PluginProcess, model: str, wished: str, default: str
) -> None:
    with mlx_backend(GPT_OSS, QWEN) as server:
        assert rules(schema(plugin, server, model, effort=wished))["reasoning_effort"]["default"] == default


def test_a_call_without_an_effort_gets_the_forms(plugin: PluginProcess) -> None:
    with mlx_backend(GPT_OSS) as server:
        form = {"endpoint_url": server.address, "effort": "high"}
        question = {"role": "user", "content": "hi"}
        list(plugin.invoke([question], credentials=form, model="gpt-oss"))
        list(
            plugin.invoke(
                [question], credentials=form, model="gpt-oss", parameters={"reasoning_effort": "low"}
            )
        )
        assert [body["reasoning_effort"] for body in server.bodies] == ["high", "low"]


def test_a_call_requests_the_list_of_models_once_however_often_dify_needs_the_schema(
    plugin: PluginProcess,
) -> None:
    with mlx_backend(GPT_OSS) as server:
        for _ in range(3):
            list(
                plugin.invoke(
                    [{"role": "user", "content": "hi"}],
                    credentials={"endpoint_url": server.address},
                    model="gpt-oss",
                )
            )
        assert server.paths.count("/v1/models") == 1


def test_without_a_server_the_form_counts_and_nothing_fails(plugin: PluginProcess) -> None:
    described = schema(plugin, NOBODY, "m")
    assert described["model_properties"]["context_size"] == 32_768
    assert rules(described)["reasoning_effort"]["options"] == ["low", "medium", "high"]
    # mlx-backend is assumed, which enforces schemas; images are not.
    assert {"tool-call", "structured-output"} <= set(described["features"])
    assert "thinking_budget" in rules(described)
    assert "vision" not in described["features"]
    described = schema(
        plugin, NOBODY, "m", context_size="65536", structured_output="unsupported", vision="supported"
    )
    assert described["model_properties"]["context_size"] == 65_536
    assert "vision" in described["features"]
    assert "structured-output" not in described["features"]


@pytest.mark.parametrize(
    ("kind", "structured", "budget"),
    [
        ("mlx-backend", True, True),
        ("vllm", True, True),
        ("mlx_lm.server", False, False),
        ("other", False, False),
    ],
)
def test_without_a_server_the_kind_in_the_form_says_what_it_can_do(
    plugin: PluginProcess, kind: str, structured: bool, budget: bool
) -> None:
    described = schema(plugin, NOBODY, "m", server_kind=kind)
    assert ("structured-output" in described["features"]) is structured
    assert ("thinking_budget" in rules(described)) is budget


@pytest.mark.parametrize(
    "wrong",
    [{"context_size": "x"}, {"endpoint_url": "my server"}, {"endpoint_url": None}, {"api_key": "a\nb"}],
)
def test_an_unusable_form_has_a_schema_and_its_calls_name_the_field(
    plugin: PluginProcess, wrong: dict[str, Any]
) -> None:
    described = schema(plugin, NOBODY, "m", **{"vision": "supported", **wrong})
    assert described["model_properties"]["context_size"] == 32_768
    assert "vision" in described["features"]
    for kind in ("text-embedding", "rerank"):
        (answer,) = plugin.request(
            "get_ai_model_schemas", provider="mlx", model_type=kind, model="m", credentials=wrong
        )
        assert answer["model_schema"]["model"] == "m"
    with pytest.raises(PluginError, match=r"\[MLX\] .*(Context size|address|key)") as caught:
        list(plugin.invoke([user("hi")], model="m", credentials={"endpoint_url": NOBODY, **wrong}))
    assert caught.value.kind == "InvokeBadRequestError"


@pytest.mark.parametrize(
    ("start", "model", "size", "structured", "efforts"),
    [
        (mlx_lm, "mlx-community/some-model", 32_768, False, ["low", "medium", "high"]),
        (vllm, "openai/gpt-oss-20b", 65_536, True, ["low", "medium", "high"]),
        (llama_cpp, "gpt-oss-20b.gguf", 8_192, True, ["low", "medium", "high"]),
        (lm_studio, "openai/gpt-oss-20b", 16_384, True, ["low", "medium", "high"]),
        (ollama, "gpt-oss:20b", 24_576, True, ["low", "medium", "high"]),
        (ollama, "qwen3:8b", 32_768, True, ["none", "medium"]),
        (ollama, "gemma3", 32_768, True, None),
    ],
)
def test_other_servers_descriptions_are_used(
    plugin: PluginProcess,
    start: Callable[[], FakeServer],
    model: str,
    size: int,
    structured: bool,
    efforts: list[str] | None,
) -> None:
    with start() as server:
        described = schema(plugin, server, model)
    assert described["model_properties"]["context_size"] == size
    assert ("structured-output" in described["features"]) is structured
    assert rules(described).get("reasoning_effort", {}).get("options") == efforts


def test_settings_that_a_server_ignores_are_not_offered(plugin: PluginProcess) -> None:
    with ollama() as server:
        offered = rules(schema(plugin, server, "gpt-oss:20b"))
    assert not {"top_k", "min_p", "repetition_penalty", "thinking_budget"} & offered.keys()
    assert {"temperature", "seed", "extra_body"} <= offered.keys()


def test_a_thinking_budget_is_offered_where_the_server_has_one(plugin: PluginProcess) -> None:
    for start, has in ((llama_cpp, True), (vllm, True), (mlx_lm, False), (lm_studio, False)):
        with start() as server:
            model = server.answers["/v1/models"]["data"][0]["id"]
            assert ("thinking_budget" in rules(schema(plugin, server, model))) is has


def test_every_text_of_a_setting_is_there_in_three_languages(plugin: PluginProcess) -> None:
    with mlx_backend(GPT_OSS) as server:
        for rule in rules(schema(plugin, server, "gpt-oss")).values():
            for text in (rule["label"], rule["help"]):
                assert text["en_US"]
                assert text["ja_JP"]
                assert text["zh_Hans"]


# -- predefined models -------------------------------------------------------------------------------

PREDEFINED = "mlx-community/gpt-oss-20b-MXFP4-Q8"


def test_a_model_added_under_a_predefined_name_is_what_its_form_says(plugin: PluginProcess) -> None:
    form = {"context_size": "1500", "max_output_tokens": "500", "effort": "low", "vision": "supported"}
    with mlx_backend({**GPT_OSS, "id": PREDEFINED}) as server:
        described = schema(plugin, server, PREDEFINED, **form)
        named = schema(plugin, server, PREDEFINED, **form, display_name="Ours")
    assert described["model_properties"]["context_size"] == 1_500
    assert rules(described)["max_tokens"]["max"] == 500
    for limit in ("max_tokens", "thinking_budget"):
        assert rules(described)[limit]["default"] == 250
    assert rules(described)["reasoning_effort"]["default"] == "low"
    assert "vision" in described["features"]
    assert described["label"]["en_US"] == "gpt-oss 20b (MXFP4, Q8)"
    assert named["label"]["en_US"] == "Ours"


@pytest.mark.parametrize("model", ["default", PREDEFINED])
def test_a_predefined_model_is_what_the_server_says(plugin: PluginProcess, model: str) -> None:
    served = {
        "id": PREDEFINED,
        "type": "llm",
        "context_length": 4_096,
        "capabilities": ["completion", "thinking", "vision"],
        "reasoning": {"efforts": ["none", "medium"], "default": "none"},
        "sampling_defaults": {"temperature": 0.3},
    }
    with mlx_backend(served) as server:
        described = schema(plugin, server, model)
    assert described["model_properties"] == {"mode": "chat", "context_size": 4_096}
    assert described["features"] == ["agent-thought", "vision"]
    offered = rules(described)
    assert (offered["reasoning_effort"]["options"], offered["reasoning_effort"]["default"]) == (
        ["none", "medium"],
        "none",
    )
    assert offered["max_tokens"]["max"] == 4_096
    assert offered["temperature"]["default"] == 0.3
    assert "response_format" not in offered


def test_a_call_of_a_predefined_model_is_checked_by_what_the_server_says(plugin: PluginProcess) -> None:
    served = {
        **GPT_OSS,
        "reasoning": {"efforts": ["none", "medium"], "default": "none"},
        "context_length": 900,
    }
    with mlx_backend(served) as server:
        form = {"endpoint_url": server.address}
        question = {"role": "user", "content": "hi"}
        list(plugin.invoke([question], credentials=form, model="default"))
        chosen = {"reasoning_effort": "high", "max_tokens": 5_000, "thinking_budget": 4_000}
        list(plugin.invoke([question], credentials=form, model="default", parameters=chosen))
        first, second = server.bodies
    assert first["reasoning_effort"] == "none"
    assert (second["reasoning_effort"], second["max_tokens"], second["thinking_budget"]) == (
        "medium",
        900,
        900,
    )


def test_what_the_server_leaves_open_is_as_declared(plugin: PluginProcess) -> None:
    with mlx_backend({"id": PREDEFINED}) as server:
        silent = schema(plugin, server, PREDEFINED)
    nobody = schema(plugin, NOBODY, PREDEFINED)
    for described in (silent, nobody):
        assert described["model_properties"]["context_size"] == 131_072
        assert rules(described)["reasoning_effort"]["options"] == ["low", "medium", "high"]
        assert {"tool-call", "structured-output"} <= set(described["features"])


def test_default_answers_in_json_on_a_server_that_has_to_be_asked_in_the_prompt(
    plugin: PluginProcess,
) -> None:
    with mlx_lm() as server:
        assert "response_format" in rules(schema(plugin, server, "default"))
        assert "response_format" not in rules(schema(plugin, server, "mlx-community/some-model"))


def test_a_model_that_is_still_being_downloaded_is_as_declared(plugin: PluginProcess) -> None:
    with mlx_backend({"id": PREDEFINED, "type": "llm", "state": "loading", "capabilities": []}) as server:
        described = schema(plugin, server, "default")
    assert "tool-call" in described["features"]
    assert "reasoning_effort" in rules(described)


def test_default_is_the_model_mlx_backend_lists_first_even_if_another_is_in_memory(
    plugin: PluginProcess,
) -> None:
    first = {**GPT_OSS, "id": "first", "state": "unloaded", "context_length": 1_111}
    with mlx_backend(first, {**GPT_OSS, "id": "second"}) as server:
        assert schema(plugin, server, "default")["model_properties"]["context_size"] == 1_111


@pytest.mark.parametrize("form", [{}, {"endpoint_url": ""}, {"endpoint_url": "my server"}])
def test_a_predefined_model_without_a_usable_form_is_as_declared(
    plugin: PluginProcess, form: dict[str, str]
) -> None:
    (answer,) = plugin.request(
        "get_ai_model_schemas", provider="mlx", model_type="llm", model="default", credentials=form
    )
    assert answer["model_schema"]["model_properties"]["context_size"] == 16_384
    assert answer["model_schema"]["label"]["zh_Hans"] == "默认"
