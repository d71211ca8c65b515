"""Dify's remote debugging: the plugin runs on a developer's machine and connects to Dify's debug port."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from debug_daemon import KEY, DebugDaemon
from dify_view import split_reasoning, text_of, user

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def dify(plugin_root: Path) -> Iterator[DebugDaemon]:
    with DebugDaemon(plugin_root) as daemon:
        yield daemon


def test_the_plugin_sends_its_key_first_and_then_its_declarations(dify: DebugDaemon) -> None:
    assert dify.key == KEY
    assert dify.order == [
        "handshake",
        "manifest_declaration",
        "model_declaration",
        "asset_chunk",
        "end",
    ]


def test_the_manifest_arrives_as_it_was_written(dify: DebugDaemon) -> None:
    assert (dify.manifest["author"], dify.manifest["name"]) == ("mlx-backend", "dify_mlx_provider")
    assert dify.manifest["meta"]["runner"]["entrypoint"] == "dify_mlx_provider"
    assert dify.manifest["label"]["ja_JP"] == "MLX"


def test_the_declarations_keep_within_what_the_debug_port_checks(dify: DebugDaemon) -> None:
    (provider,) = dify.models
    for form in ("provider_credential_schema", "model_credential_schema"):
        fields = provider[form]["credential_form_schemas"]
        assert 0 < len(fields) <= 32
        assert all(len(field["options"] or []) <= 128 for field in fields)
    assert provider["models"]
    for model in provider["models"]:
        assert len(model["parameter_rules"]) <= 128
        assert len(model["model"]) < 256


def test_every_asset_arrives_byte_for_byte(dify: DebugDaemon, plugin_root: Path) -> None:
    there = {path.name: path.read_bytes() for path in (plugin_root / "_assets").iterdir()}
    assert there
    assert dify.assets == there


def test_an_answer_is_streamed_over_the_debug_port(dify: DebugDaemon, credentials: dict[str, str]) -> None:
    chunks = dify.request(
        "invoke_llm",
        model="default",
        model_type="llm",
        credentials=credentials,
        model_parameters={"reasoning_effort": "low"},
        prompt_messages=[user("What is the capital of France?")],
        tools=[],
        stop=[],
        stream=True,
    )
    answer, thinking = split_reasoning(text_of(chunks))
    assert answer == "The capital of France is Paris."
    assert thinking
    assert chunks[-1]["delta"]["usage"]["completion_tokens"] > 0
