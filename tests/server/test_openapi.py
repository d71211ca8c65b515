"""/openapi.json says of every address what it takes and answers, and that is so."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import pytest
from openapi_checks import SCHEMAS, check, validate
from scripted_engine import ScriptedEngine
from scripted_server import ANSWER, CALL, USER, WEATHER, client_of
from served_models import app_of_every_type
from werkzeug.test import Client

from mlx_backend.api.addresses import WEBSOCKET
from mlx_backend.server.app import all_routes

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with app_of_every_type(tmp_path_factory.mktemp("models")) as app:
        yield Client(app)


@pytest.fixture(scope="module")
def document(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/openapi.json").get_json()
    return found


def test_every_route_is_in_it(document: dict[str, Any]) -> None:
    described = {
        (method.upper(), re.sub(r"{(\w+)}", r"<\1>", path.replace("{name}", "<path:name>")))
        for path, operations in document["paths"].items()
        for method in operations
    }
    for route in all_routes():
        method = "GET" if route.method == WEBSOCKET else route.method
        assert {(method, route.path), (method, "/v1" + route.path)} & described, route
    assert len(described) == sum(not route.path.startswith("/v1") for route in all_routes())


def test_every_schema_in_it_is_one_and_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema_rs.meta.validate(schema)
    validate(document, {"anyOf": [{}, *({"$ref": SCHEMAS + name} for name in schemas)]}, None)
    operations = [each for path in document["paths"].values() for each in path.values()]
    names = [each["operationId"] for each in operations]
    assert len(set(names)) == len(names)


def test_settings_are_described_with_their_limits_and_their_help(document: dict[str, Any]) -> None:
    properties = document["components"]["schemas"]["ChatBody"]["properties"]
    assert properties["temperature"]["description"].startswith("randomness of sampling")
    assert {"type": "number", "minimum": 0, "maximum": 2} in properties["temperature"]["anyOf"]
    assert {"$ref": SCHEMAS + "Effort"} in properties["reasoning_effort"]["anyOf"]
    assert properties["grammar"]["enum"] == [None, False, "", [], {}]
    assert "response_format" in properties["grammar"]["description"]


REQUESTS: list[tuple[str, str, Any]] = [
    ("GET", "/", None),
    ("GET", "/health", None),
    ("GET", "/ready", None),
    ("GET", "/metrics", None),
    ("GET", "/activity", None),
    ("GET", "/docs", None),
    ("GET", "/page/clients.json", None),
    ("GET", "/page/{name}", None),
    ("GET", "/openapi.json", None),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/{name}", None),
    ("POST", "/v1/models/{name}/load", None),
    ("POST", "/v1/models/{name}/unload", None),
    ("POST", "/v1/chat/completions", {"messages": [USER], "reasoning_effort": "low"}),
    (
        "POST",
        "/v1/chat/completions",
        {"messages": [USER], "stream": True, "logprobs": True, "top_logprobs": 2},
    ),
    ("POST", "/v1/chat/completions", {"messages": [USER], "logprobs": True, "reasoning_format": "details"}),
    ("POST", "/v1/chat/completions", {"messages": []}),
    ("POST", "/v1/responses", {"input": "hello", "reasoning": {"effort": "low"}}),
    ("POST", "/v1/responses", {"input": "hello", "stream": True, "reasoning": {"summary": "auto"}}),
    ("POST", "/v1/responses", {"input": [USER], "tools": [{"type": "function", "name": "f"}]}),
    ("POST", "/v1/responses/input_tokens", {"input": "hello"}),
    ("GET", "/v1/responses", None),
    ("POST", "/v1/responses/compact", {"model": "scripted", "input": "hello"}),
    ("GET", "/v1/responses/{response_id}", None),
    ("DELETE", "/v1/responses/{response_id}", None),
    ("POST", "/v1/responses/{response_id}/cancel", None),
    ("GET", "/v1/responses/{response_id}/input_items", None),
    ("POST", "/v1/messages", {"messages": [USER], "output_config": {"effort": "low"}}),
    (
        "POST",
        "/v1/messages",
        {"messages": [USER], "stream": True, "thinking": {"type": "adaptive", "display": "omitted"}},
    ),
    ("POST", "/v1/messages/count_tokens", {"messages": [USER]}),
    ("POST", "/v1/completions", {"prompt": "Once", "logprobs": 1}),
    (
        "POST",
        "/v1/completions",
        {"prompt": "Once", "stream": True, "stream_options": {"include_usage": True}},
    ),
    ("POST", "/v1/embeddings", {"input": ["one", "two"]}),
    ("POST", "/v1/embeddings", {"input": "one", "encoding_format": "base64"}),
    ("POST", "/v1/rerank", {"query": "one", "documents": ["two", {"text": "3"}], "return_documents": True}),
    ("POST", "/v1/tokenize", {"prompt": ["one", "two"], "return_token_strs": True}),
    ("POST", "/v1/tokenize", {"messages": [USER]}),
    ("POST", "/v1/detokenize", {"tokens": [1, 2, 3]}),
    ("POST", "/api/chat", {"messages": [USER], "think": "low", "logprobs": True, "top_logprobs": 2}),
    ("POST", "/api/chat", {"messages": [USER], "stream": False, "keep_alive": "5m"}),
    ("POST", "/api/chat", {"keep_alive": 0}),
    ("POST", "/api/generate", {"prompt": "hello", "options": {"num_predict": 20}}),
    ("POST", "/api/generate", {"prompt": "Once", "raw": True, "stream": False}),
    ("POST", "/api/embed", {"model": "embedder", "input": ["one", "two"]}),
    ("POST", "/api/embeddings", {"model": "embedder", "prompt": "one"}),
    ("GET", "/api/tags", None),
    ("POST", "/api/show", {"model": "chat"}),
    ("GET", "/api/ps", None),
    ("GET", "/api/version", None),
    ("POST", "/api/pull", {"model": "chat"}),
    ("POST", "/api/push", None),
    ("POST", "/api/create", None),
    ("POST", "/api/copy", None),
    ("DELETE", "/api/delete", None),
    ("POST", "/api/blobs/{digest}", None),
    ("GET", "/api/hello", None),
    ("GET", "/api/v0/models", None),
    ("GET", "/api/v0/models/{name}", None),
]


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
def test_a_request_as_it_is_described_is_answered_as_it_is_described(
    client: Client, document: dict[str, Any], method: str, path: str, body: Any
) -> None:
    if body is not None:
        schema = document["paths"][path][method.lower()]["requestBody"]["content"]["application/json"][
            "schema"
        ]
        if body != {"messages": []}:
            validate(document, schema, body)
    address = re.sub(r"{\w+}", "resp_1", path.replace("{name}", "other"))
    check(document, path, client.open(address, method=method, json=body))


def test_every_address_is_requested_above(document: dict[str, Any]) -> None:
    described = {(method.upper(), path) for path, each in document["paths"].items() for method in each}
    assert {(method, path) for method, path, _ in REQUESTS} == described


CUSTOM = {"type": "custom", "custom": {"name": "weather", "format": {"type": "text"}}}
ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "auto", "tools": [{"type": "custom", "custom": {"name": "weather"}}]},
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tool", [WEATHER, CUSTOM], ids=["function", "custom"])
def test_calls_are_described(document: dict[str, Any], tool: dict[str, Any], stream: bool) -> None:
    with ScriptedEngine(lambda _: CALL) as engine:
        path = "/v1/chat/completions"
        body = {"messages": [USER], "tools": [tool], "stream": stream}
        response = client_of(engine).post(path, json=body)
        assert "tool_calls" in response.get_data(as_text=True)
        check(document, path, response)
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        calls = [] if stream else [response.get_json()["choices"][0]["message"]]
        validate(document, schema, {**body, "messages": [USER, *calls], "tool_choice": ALLOWED})


def test_it_needs_the_key_where_there_is_one() -> None:
    with ScriptedEngine(lambda _: ANSWER) as engine:
        client = client_of(engine, api_key="sesame")
        assert client.get("/openapi.json").status_code == 401
        assert client.get("/openapi.json", headers={"x-api-key": "sesame"}).status_code == 200
