"""What discovery learns from a server's answers, that it asks seldom, and that it never raises."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from fake_servers import (
    CannedServer,
    FakeServer,
    listed,
    llama_cpp,
    lm_studio,
    mlx_backend,
    mlx_lm,
    ollama,
    vllm,
)
from raw_server import JSON, RawServer, status

from dify_mlx_provider.servers import discovery
from dify_mlx_provider.servers.base import ServerInfo
from dify_mlx_provider.servers.probe import MAX_RESPONSE_BYTES, Probe
from dify_mlx_provider.upstream.credentials import Credentials, ServerKind

if TYPE_CHECKING:
    from collections.abc import Callable

GPT_OSS = {
    "id": "mlx-community/gpt-oss-20b-MXFP4-Q8",
    "type": "llm",
    "state": "ready",
    "context_length": 131_072,
    "max_output_tokens": 16_384,
    "capabilities": ["completion", "thinking", "tools"],
    "reasoning": {"efforts": ["low", "medium", "high"], "default": "high"},
    "sampling_defaults": {"temperature": 0.7},
}


pytestmark = pytest.mark.usefixtures("empty_cache")


def at(server: FakeServer | RawServer | CannedServer, **form: str) -> Credentials:
    return Credentials.from_form({"endpoint_url": server.address, **form})


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        (lambda: mlx_backend(GPT_OSS), ServerKind.MLX_BACKEND),
        (mlx_lm, ServerKind.MLX_LM),
        (vllm, ServerKind.VLLM),
        (llama_cpp, ServerKind.LLAMA_CPP),
        (lm_studio, ServerKind.LM_STUDIO),
        (ollama, ServerKind.OLLAMA),
        (lambda: FakeServer({"/v1/models": listed({"id": "m", "owned_by": "me"})}), ServerKind.OTHER),
        (lambda: FakeServer({"/v1/models": listed({"id": "m"})}), ServerKind.OTHER),
        # Others borrow LM Studio's word for the owner, but not its own list.
        (
            lambda: FakeServer({"/v1/models": listed({"id": "m", "owned_by": "organization_owner"})}),
            ServerKind.OTHER,
        ),
        # mlx_lm.server that never downloaded anything begins its answer and drops the connection.
        (lambda: FakeServer({"/v1/models": b"", "/health": {"status": "ok"}}), ServerKind.MLX_LM),
        # our own server behind a proxy that writes its own header
        (
            lambda: FakeServer({"/v1/models": listed({"id": "m", "owned_by": "mlx-backend"})}),
            ServerKind.MLX_BACKEND,
        ),
    ],
)
def test_a_kind_of_server_is_recognised_by_its_answers(
    start: Callable[[], FakeServer], kind: ServerKind
) -> None:
    with start() as server:
        assert discovery.find_server(at(server)).kind is kind


def test_a_kind_set_in_the_form_is_believed() -> None:
    with vllm() as server:
        found = discovery.find_server(at(server, server_kind="llama.cpp"))
    assert found.kind is ServerKind.LLAMA_CPP
    assert found.models[0].context_size == 65_536


def test_mlx_backend_describes_its_models_completely() -> None:
    with mlx_backend(GPT_OSS, version="0.3.1") as server:
        found = discovery.find_server(at(server))
        model = discovery.find_model("gpt-oss-20b-MXFP4-Q8", at(server))
    assert found.version == "0.3.1"
    assert model is not None
    assert (model.context_size, model.max_output_tokens) == (131_072, 16_384)
    assert model.capabilities == frozenset({"completion", "thinking", "tools"})
    assert (model.efforts, model.default_effort) == (("low", "medium", "high"), "high")
    assert model.sampling == {"temperature": 0.7}


def test_a_name_may_end_in_one_of_the_models_efforts() -> None:
    with mlx_backend(GPT_OSS, {**GPT_OSS, "id": "qwen3:8b"}) as server:
        found = [
            discovery.find_model(name, at(server))
            for name in (
                f"{GPT_OSS['id']}:low",
                "gpt-oss-20b-MXFP4-Q8:High",
                "qwen3:8b",
                "qwen3:8b:low",
                "qwen3:4b",
            )
        ]
    assert [each and (each.name.rpartition("/")[2], each.default_effort) for each in found] == [
        ("gpt-oss-20b-MXFP4-Q8:low", "low"),
        ("gpt-oss-20b-MXFP4-Q8:high", "high"),
        ("qwen3:8b", "high"),
        ("qwen3:8b:low", "low"),
        None,
    ]


def test_a_model_listed_without_reasoning_does_not_reason() -> None:
    with mlx_backend({"id": "plain", "capabilities": ["completion"]}) as server:
        model = discovery.find_model("plain", at(server))
    assert model is not None
    assert model.efforts == ()


def test_an_older_mlx_backend_leaves_open_what_it_does_not_say() -> None:
    with mlx_backend({"id": "plain"}) as server:
        model = discovery.find_model("plain", at(server))
    assert model is not None
    assert model.efforts is None
    assert model.capabilities is None


@pytest.mark.parametrize(
    ("start", "name", "size"),
    [
        (vllm, "openai/gpt-oss-20b", 65_536),
        (llama_cpp, "gpt-oss-20b.gguf", 8_192),  # what a slot has, not what the model was trained with
        (lm_studio, "openai/gpt-oss-20b", 16_384),  # what is loaded, not what could be
        (lm_studio, "qwen-vl", 32_768),
        (ollama, "gpt-oss:20b", 24_576),
        (ollama, "qwen3:8b", None),  # Ollama decides by its own settings, which it does not tell
        (mlx_lm, "mlx-community/some-model", None),
    ],
)
def test_a_context_size_is_used_only_where_it_is_certain(
    start: Callable[[], FakeServer], name: str, size: int | None
) -> None:
    with start() as server:
        model = discovery.find_model(name, at(server))
    assert model is not None
    assert model.context_size == size


def test_ollama_is_asked_what_a_model_can_do() -> None:
    with ollama() as server:
        levels, switch, plain = (
            discovery.find_model(name, at(server)) for name in ("gpt-oss:20b", "qwen3:8b", "gemma3")
        )
        paths = len(server.paths)
        discovery.find_model("gemma3", at(server))
        assert len(server.paths) == paths
    assert levels is not None
    assert switch is not None
    assert plain is not None
    assert levels.efforts == ("low", "medium", "high")
    assert switch.efforts == ("none", "medium")
    assert plain.efforts == ()
    assert plain.capabilities is not None
    assert "vision" in plain.capabilities
    assert "tools" not in plain.capabilities


def test_lm_studio_is_asked_what_a_model_can_do() -> None:
    with lm_studio() as server:
        seeing, calling = (
            discovery.find_model(name, at(server)) for name in ("qwen-vl", "openai/gpt-oss-20b")
        )
    assert seeing is not None
    assert calling is not None
    assert seeing.capabilities == frozenset({"completion", "structured_output", "vision"})
    assert calling.capabilities == frozenset({"completion", "structured_output", "tools"})
    assert calling.efforts is None


def test_default_is_the_first_loaded_chat_model() -> None:
    with lm_studio() as server:
        model = discovery.find_model("default", at(server))
    assert model is not None
    assert model.name == "openai/gpt-oss-20b"


def test_the_key_is_sent_to_the_server() -> None:
    with mlx_backend(GPT_OSS) as server:
        discovery.find_server(at(server, api_key="a key of my own"))
        assert server.keys == ["Bearer a key of my own"]


# -- caching ------------------------------------------------------------------------------------------


def test_concurrent_callers_share_one_request() -> None:
    with mlx_backend(GPT_OSS) as server:
        server.gate.clear()
        found: list[ServerInfo] = []
        callers = [
            threading.Thread(target=lambda: found.append(discovery.find_server(at(server)))) for _ in range(8)
        ]
        for caller in callers:
            caller.start()
        server.gate.set()
        for caller in callers:
            caller.join()
        assert server.paths == ["/v1/models"]
    assert {len(one.models) for one in found} == {1}


def test_the_absence_of_a_server_is_cached_too() -> None:
    with FakeServer() as server:
        pass
    credentials = at(server)
    assert discovery.find_server(credentials) == ServerInfo()
    with mlx_backend(GPT_OSS) as other:
        # another address must not share the cache entry
        assert discovery.find_server(at(other)).kind is ServerKind.MLX_BACKEND
    assert discovery.find_server(credentials) == ServerInfo()


@pytest.mark.parametrize(
    "instead", [401, 502, b"<html><title>Offline</title></html>", {"message": "the tunnel is closed"}, b""]
)
def test_a_server_is_described_as_it_was_while_something_else_answers_for_it(instead: Any) -> None:
    with FakeServer({"/v1/models": listed({**GPT_OSS, "owned_by": "mlx-backend"})}) as server:
        before = discovery.find_server(at(server))
        server.answers["/v1/models"] = instead
        discovery.forget_servers()
        after = discovery.find_server(at(server))
    assert before.answered
    assert after == replace(before, answered=False)


# -- never raising -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        status("200 OK", b"<html><title>Open WebUI</title></html>", "Content-Type: text/html"),
        status("302 Found", b"", "Location: http://127.0.0.1:9/"),
        status("401 Unauthorized", b'{"error": {"message": "no"}}'),
        status("503 Service Unavailable", b'{"error": {"message": "Loading model"}}'),
        JSON + b"[" * 100_000,
        JSON + b'{"data": null}',
        JSON + b'{"data": [null, 3, {"id": null}, {"object": "model"}]}',
        JSON + b'{"data": [{"id": "m", "capabilities": "all", "context_length": true, "reasoning": 3}]}',
        JSON + b'{"data": [{"id": "m", "owned_by": ["list"]}]}',
        JSON + b'\xff\xfe{"data": []}',
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nConnection: close\r\n\r\nno gzip",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"",
    ],
)
def test_no_answer_whatsoever_raises(answer: bytes) -> None:
    with CannedServer(answer) as server:
        found = discovery.find_server(at(server))
        assert found.kind is ServerKind.OTHER
        assert discovery.find_model("m", at(server)) in (None, *found.models)


@pytest.mark.parametrize(
    "body", [[], {"capabilities": ["thinking"], "details": ["gptoss"]}, {"parameters": 3}]
)
def test_no_answer_of_ollama_about_a_model_raises(body: Any) -> None:
    with ollama() as server:
        server.answers["/api/show"] = {"gpt-oss:20b": body}
        found = discovery.find_model("gpt-oss:20b", at(server))
    assert found is None or found.name == "gpt-oss:20b"


def test_an_endless_answer_is_abandoned() -> None:
    with RawServer([JSON + b'{"data": [' + b" " * (MAX_RESPONSE_BYTES + 1), None]) as server:
        found: Any = discovery.find_server(at(server, server_kind="vllm"))
    assert found.models == ()
    assert server.left.is_set()


def test_a_server_whose_answer_has_endless_trailers_is_asked_once() -> None:
    head = JSON.replace(b"Connection", b"Transfer-Encoding: chunked\r\nConnection")
    with CannedServer(head + b"0\r\n" + b"a: b\r\n" * 50_000) as server:
        probe = Probe(at(server))
        assert probe.get_models() is None
    with FakeServer({"/v1/models": listed(GPT_OSS)}) as other:
        probe._base = f"{other.address}/v1"
        assert probe.get_models() is None
    assert other.paths == []
