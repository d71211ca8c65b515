"""Every field that the own clients of the three APIs can send is honoured, refused by name, or named as ignored.

The fields are those of the clients' types. One that a newer client has and that stands in no table here fails the test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_type_hints

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from anthropic.types.output_config_param import OutputConfigParam
from anthropic.types.thinking_config_enabled_param import ThinkingConfigEnabledParam
from anthropic.types.tool_param import ToolParam
from ollama import _types as ollama_types
from openai.types import completion_create_params as text_create_params
from openai.types import embedding_create_params
from openai.types.chat import completion_create_params
from openai.types.chat.chat_completion_stream_options_param import ChatCompletionStreamOptionsParam
from openai.types.responses import input_token_count_params, response_create_params
from openai.types.responses.custom_tool_param import CustomToolParam
from openai.types.responses.function_tool_param import FunctionToolParam
from openai.types.responses.response_text_config_param import ResponseTextConfigParam
from openai.types.shared_params import FunctionDefinition
from openai.types.shared_params.reasoning import Reasoning
from pydantic import TypeAdapter
from scripted_engine import ScriptedEngine
from scripted_server import ANSWER, CHAT, USER, client_of

from mlx_backend.api.ollama.embed import EmbedBody
from mlx_backend.api.openai.embeddings import EmbeddingsBody
from mlx_backend.api.reply_fields import ALIASES
from mlx_backend.settings import SAMPLING as SAMPLING_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from werkzeug.test import Client

COMPLETIONS, RESPONSES, MESSAGES, OLLAMA_CHAT = (
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
)
CONVERSATION = {"messages": [USER]}

SAMPLING = {"temperature": 0.5, "top_p": 0.5}
PENALTIES = {"frequency_penalty": 0.5, "presence_penalty": 0.5, "logit_bias": {"5": 1}, "seed": 3}
CACHE = {"prompt_cache_options": {"mode": "explicit"}, "prompt_cache_retention": "24h"}
STREAM = {"stream": True}
OBFUSCATED = {"stream_options": {"include_obfuscation": True}}
FUNCTION = {"name": "f", "description": "Does.", "parameters": {"type": "object"}, "strict": False}
EVALUATED = {"async": True, "defer_loading": True, "allowed_callers": ["direct"]}


def of_function(name: str, value: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", name: value}}]}


def of_tool(kind: str, name: str, value: Any) -> dict[str, Any]:
    return {"tools": [{"type": kind, "name": "f", name: value}]}


def of_client_tool(name: str, value: Any) -> dict[str, Any]:
    return {"tools": [{"name": "f", "input_schema": {"type": "object"}, name: value}]}


class Table:
    """What becomes of the fields of a type: values with which they ask for something."""

    def __init__(
        self,
        path: str,
        sdk_type: Any,
        required: Mapping[str, Any],
        *,
        honoured: Mapping[str, Any],
        refused: Mapping[str, Any] = {},
        ignored: Mapping[str, Any] = {},
        inside: Any = lambda name, value: {name: value},
        prefix: str = "",
    ) -> None:
        """Fields of an object are put into a request by `inside`, and named with its `prefix`."""
        self.path, self.sdk_type, self.required = path, sdk_type, required
        self.honoured, self.refused, self.ignored = honoured, refused, ignored
        self.inside, self.prefix = inside, prefix

    def __str__(self) -> str:
        return f"{self.path} {self.prefix}"

    def body(self, name: str, value: Any) -> dict[str, Any]:
        return {**self.required, **self.inside(name, value)}


TABLES = [
    Table(
        CHAT,
        completion_create_params.CompletionCreateParamsStreaming,
        CONVERSATION,
        honoured={
            **SAMPLING,
            **PENALTIES,
            **STREAM,
            **CONVERSATION,
            "model": "default",
            "logprobs": True,
            "max_completion_tokens": 50,
            "max_tokens": 50,
            "n": 2,
            "parallel_tool_calls": False,
            "reasoning_effort": "low",
            "response_format": {"type": "text"},
            "stop": "x",
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": 0,
            "user": "ada",
        },
        refused={
            "audio": {"voice": "alloy"},
            "function_call": {"name": "f"},
            "functions": [{"name": "f"}],
            "modalities": ["text", "audio"],
            "moderation": {"model": "m"},
            "web_search_options": {},
        },
        ignored={
            **CACHE,
            **OBFUSCATED,
            "metadata": {"a": "b"},
            "prediction": {"type": "content", "content": "x"},
            "prompt_cache_key": "k",
            "safety_identifier": "s",
            "service_tier": "flex",
            "store": True,
            "verbosity": "low",
        },
    ),
    Table(
        CHAT,
        ChatCompletionStreamOptionsParam,
        {**CONVERSATION, **STREAM},
        honoured={"include_usage": True},
        ignored={"include_obfuscation": True},
        inside=lambda name, value: {"stream_options": {name: value}},
        prefix="stream_options.",
    ),
    Table(CHAT, FunctionDefinition, CONVERSATION, honoured=FUNCTION, inside=of_function, prefix="tools."),
    Table(
        COMPLETIONS,
        text_create_params.CompletionCreateParamsStreaming,
        {"prompt": "a"},
        honoured={
            **SAMPLING,
            **PENALTIES,
            **STREAM,
            "prompt": "a",
            "model": "default",
            "best_of": 1,
            "echo": True,
            "logprobs": 2,
            "max_tokens": 5,
            "n": 2,
            "stop": "x",
        },
        refused={"suffix": "x"},  # by models that cannot fill in text before it
        ignored={**OBFUSCATED, "user": "ada"},
    ),
    Table(
        RESPONSES,
        response_create_params.ResponseCreateParamsStreaming,
        {"input": "hello"},
        honoured={
            **SAMPLING,
            **STREAM,
            "input": "hello",
            "model": "default",
            "include": ["reasoning.encrypted_content"],
            "instructions": "Be brief.",
            "max_output_tokens": 50,
            "metadata": {"a": "b"},
            "parallel_tool_calls": False,
            "prompt_cache_key": "k",
            "reasoning": {"effort": "low"},
            "safety_identifier": "s",
            "store": False,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": 0,
            "user": "ada",
        },
        refused={
            "background": True,
            "context_management": [{"type": "compaction"}],
            "conversation": "conv_1",
            "moderation": {"model": "m"},
            "previous_response_id": "resp_1",  # one that is not stored
            "prompt": {"id": "p"},
        },
        ignored={
            **CACHE,
            **OBFUSCATED,
            "access_programs": {"a": True},
            "background_options": {"completion_window": "2h"},
            "image": {"detail": "low"},
            "max_tool_calls": 2,
            "service_tier": "flex",
            "truncation": "auto",
        },
    ),
    Table(
        RESPONSES,
        Reasoning,
        {"input": "hello"},
        honoured={"effort": "low", "summary": "auto", "generate_summary": "auto"},
        ignored={"context": "all_turns", "mode": "pro"},
        inside=lambda name, value: {"reasoning": {name: value}},
        prefix="reasoning.",
    ),
    Table(
        RESPONSES,
        ResponseTextConfigParam,
        {"input": "hello"},
        honoured={"format": {"type": "text"}},
        ignored={"verbosity": "low"},
        inside=lambda name, value: {"text": {name: value}},
        prefix="text.",
    ),
    Table(
        RESPONSES,
        FunctionToolParam,
        {"input": "hello"},
        honoured={**FUNCTION, "type": "function"},
        ignored={**EVALUATED, "output_schema": {"type": "object"}},
        inside=lambda name, value: of_tool("function", name, value),
        prefix="tools.",
    ),
    Table(
        RESPONSES,
        CustomToolParam,
        {"input": "hello"},
        honoured={"type": "custom", "name": "f", "description": "Does.", "format": {"type": "text"}},
        ignored=EVALUATED,
        inside=lambda name, value: of_tool("custom", name, value),
        prefix="tools.",
    ),
    Table(
        f"{RESPONSES}/input_tokens",
        input_token_count_params.InputTokenCountParams,
        {"input": "hello"},
        honoured={
            "input": "hello",
            "model": "default",
            "instructions": "Be brief.",
            "parallel_tool_calls": False,
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
        },
        refused={"conversation": "conv_1", "previous_response_id": "resp_1"},
        ignored={"personality": "friendly", "truncation": "auto"},
    ),
    *(
        Table(
            path,
            sdk_type,
            {**CONVERSATION, "max_tokens": 100},
            honoured={
                **STREAM,
                **CONVERSATION,
                "model": "default",
                "max_tokens": 100,
                "output_config": {"effort": "low"},
                "stop_sequences": ["x"],
                "system": "Be brief.",
                "thinking": {"type": "adaptive"},
                "tool_choice": {"type": "none"},
                "tools": [],
                "cache_control": {"type": "ephemeral"},  # what is read is cached in any case
                "betas": ["b"],  # in the body, as some clients send the header
                "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            },
            refused={
                "compaction": {"type": "enabled"},
                "container": "c",
                "mcp_servers": [{"name": "x"}],
                "thread": {"type": "create"},
            },
            ignored={
                "billing_policy": {"type": "billing_policy"},
                "diagnostics": {"previous_message_id": "m"},
                "fallback_credit_token": "t",
                "fallbacks": [{"model": "x"}],
                "inference_geo": "eu",
                "metadata": {"user_id": "u"},
                "service_tier": "auto",
                "speed": "fast",
            },
        )
        for path, sdk_type in (
            (MESSAGES, message_create_params.MessageCreateParamsStreaming),
            (f"{MESSAGES}?beta=true", beta_message_create_params.MessageCreateParamsStreaming),
            (f"{MESSAGES}/count_tokens", message_count_tokens_params.MessageCountTokensParams),
        )
    ),
    Table(
        MESSAGES,
        ToolParam,
        CONVERSATION,
        honoured={
            "name": "f",
            "description": "Does.",
            "input_schema": {"type": "object"},
            "strict": False,
            "type": "custom",
            "defer_loading": True,
            "cache_control": {"type": "ephemeral"},
            "eager_input_streaming": True,  # arguments always go out as they are written
        },
        ignored={"allowed_callers": ["direct"], "input_examples": [{"a": 1}]},
        inside=of_client_tool,
        prefix="tools.",
    ),
    Table(
        MESSAGES,
        OutputConfigParam,
        CONVERSATION,
        honoured={"effort": "low", "format": None},
        ignored={"task_budget": {"type": "tokens", "total": 20000}},
        inside=lambda name, value: {"output_config": {name: value}},
        prefix="output_config.",
    ),
    Table(
        MESSAGES,
        ThinkingConfigEnabledParam,
        CONVERSATION,
        honoured={"type": "enabled", "budget_tokens": 50, "display": "omitted"},
        inside=lambda name, value: {"thinking": {"type": "enabled", "budget_tokens": 1024, name: value}},
        prefix="thinking.",
    ),
]
ASKED = {
    "format": None,
    "keep_alive": "5m",
    "logprobs": True,
    "top_logprobs": 0,
    "think": "low",
    "model": "default",
}
NOT_STREAMED = {"stream": False}
KEPT = {"keep_alive": "5m"}  # this server's one model stays in memory
UNMEANT = (
    *("numa", "num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "tfs_z", "typical_p"),
    *("low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only"),
    *("repeat_last_n", "mirostat", "mirostat_tau", "mirostat_eta", "penalize_newline"),
)
TABLES += [
    Table(
        OLLAMA_CHAT,
        ollama_types.ChatRequest,
        CONVERSATION,
        honoured={**ASKED, **NOT_STREAMED, **CONVERSATION, "options": {"temperature": 0.5}, "tools": []},
        ignored=KEPT,
    ),
    Table(
        "/api/generate",
        ollama_types.GenerateRequest,
        {"prompt": "hello"},
        honoured={
            **ASKED,
            **NOT_STREAMED,
            "prompt": "hello",
            "options": {"temperature": 0.5},
            "raw": True,
            "system": "Be brief.",
            "images": [],
        },
        refused={"suffix": "x", "context": [1], "template": "{{ .Prompt }}"},
        ignored={**KEPT, "width": 5, "height": 5, "steps": 2},
    ),
    Table(
        OLLAMA_CHAT,
        ollama_types.Options,
        CONVERSATION,
        honoured={
            **SAMPLING,
            **PENALTIES,
            "num_predict": 50,
            "top_k": 5,
            "repeat_penalty": 1.1,
            "stop": ["x"],
        },
        ignored=dict.fromkeys(UNMEANT, 1),
        inside=lambda name, value: {"options": {name: value}},
        prefix="options.",
    ),
]
IN_HEADERS = {"user_profile_id", "workspace_id"}
"""What the clients' types have among the fields, but is sent as headers."""


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with ScriptedEngine(lambda _: ANSWER) as engine:
        yield client_of(engine)


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_no_field_of_the_clients_is_unaccounted_for(table: Table) -> None:
    known = table.honoured.keys() | table.refused.keys() | table.ignored.keys()
    assert fields_of(table.sdk_type) - IN_HEADERS <= known


def fields_of(sdk_type: Any) -> set[str]:
    """The names of the fields of a client's type, be it a TypedDict or a model."""
    return set(getattr(sdk_type, "model_fields", None) or get_type_hints(sdk_type))


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_a_field_is_honoured_refused_by_name_or_named_as_ignored(client: Client, table: Table) -> None:
    for name, value in (*table.honoured.items(), *table.ignored.items()):
        response = client.post(table.path, json=table.body(name, value))
        assert response.status_code == 200, (name, response.get_data(as_text=True))
        ignored = response.headers.get("x-mlx-backend-ignored", "").split(", ")
        named = [each for each in ignored if each.startswith(table.prefix + name)]
        assert bool(named) == (name in table.ignored), (name, ignored)
        response.close()
    for name, value in table.refused.items():
        response = client.post(table.path, json=table.body(name, value))
        assert response.status_code in (400, 404), name
        error = response.get_json()["error"]
        message = error if isinstance(error, str) else error["message"]
        param = None if isinstance(error, str) else error.get("param")
        assert name == param or name in message, error


@pytest.mark.parametrize("field", [*SAMPLING_NAMES, *ALIASES])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES, OLLAMA_CHAT, "/api/generate"])
def test_a_setting_of_no_value_that_it_could_have_is_refused_or_named_as_ignored(
    client: Client, path: str, field: str
) -> None:
    question: dict[str, Any] = {"input": "Hi"} if path == RESPONSES else {**CONVERSATION, "prompt": "Hi"}
    body = {**question, "max_tokens": 8, field: {"no": "number"}}
    response = client.post(path, json=body)
    if response.status_code == 400:
        assert field in response.get_data(as_text=True)
    else:
        assert response.status_code == 200
        assert field in response.headers["x-mlx-backend-ignored"].split(", ")


@pytest.mark.parametrize(
    ("body", "sdk_type"),
    [
        (EmbeddingsBody, embedding_create_params.EmbeddingCreateParams),
        (EmbedBody, ollama_types.EmbedRequest),
    ],
)
def test_a_request_for_embeddings_has_all_the_fields_of_the_clients(body: Any, sdk_type: Any) -> None:
    fields = fields_of(sdk_type)
    assert fields <= TypeAdapter(body).json_schema()["properties"].keys()
