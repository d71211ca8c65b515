"""Every action Dify's daemon has for models, sent to the packaged plugin: it answers, or refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from daemon import PluginError
from dify_view import user
from fake_servers import mlx_backend

if TYPE_CHECKING:
    from collections.abc import Iterator

    from daemon import PluginProcess

CHAT = {"model": "m", "model_type": "llm", "prompt_messages": [user("hi")], "tools": []}
VECTORS = {"model": "e", "model_type": "text-embedding", "texts": ["a", "b"]}
RANKING = {"model": "r", "model_type": "rerank", "score_threshold": None, "top_n": None}
WORDS = {"content": "a", "content_type": "text"}

# action | what it is about | a key of the answer
SERVED: dict[str, tuple[dict[str, Any], str]] = {
    "validate_provider_credentials": ({}, "result"),
    "validate_model_credentials": ({"model": "m", "model_type": "llm"}, "result"),
    "get_ai_model_schemas": ({"model": "m", "model_type": "llm"}, "model_schema"),
    "invoke_llm": ({**CHAT, "model_parameters": {}, "stop": [], "stream": True}, "delta"),
    "get_llm_num_tokens": (CHAT, "num_tokens"),
    "invoke_text_embedding": ({**VECTORS, "input_type": "document"}, "embeddings"),
    "get_text_embedding_num_tokens": (VECTORS, "num_tokens"),
    "invoke_rerank": ({**RANKING, "query": "a", "docs": ["a", "b"]}, "docs"),
}
# What models without pictures, sound or a queue of their own do not do. Dify asks for none of it.
NOT_SERVED: dict[str, dict[str, Any]] = {
    "start_polling": {**CHAT, "model_parameters": {}, "stop": [], "stream": False},
    "check_polling": {"model": "m", "model_type": "llm", "plugin_state": {"job": 1}},
    "invoke_multimodal_embedding": {"model": "e", "model_type": "text-embedding", "documents": [WORDS]},
    "invoke_multimodal_rerank": {**RANKING, "query": WORDS, "docs": [WORDS]},
    "invoke_tts": {
        "model": "m",
        "model_type": "tts",
        "content_text": "a",
        "voice": "",
        "tenant_id": "t",
    },
    "get_tts_model_voices": {"model": "m", "model_type": "tts", "language": None},
    "invoke_speech2text": {"model": "m", "model_type": "speech2text", "file": "00"},
    "invoke_moderation": {"model": "m", "model_type": "moderation", "text": "a"},
}


def vectors(body: dict[str, Any]) -> tuple[int, Any]:
    data = [{"index": at, "embedding": [1.0, 0.0]} for at, _ in enumerate(body["input"])]
    return 200, {"data": data, "usage": {"total_tokens": 2}}


def ranking(body: dict[str, Any]) -> tuple[int, Any]:
    results = [{"index": at, "relevance_score": 0.5} for at, _ in enumerate(body["documents"])]
    return 200, {"results": results, "usage": {"total_tokens": 2}}


@pytest.fixture(scope="module")
def form() -> Iterator[dict[str, str]]:
    models = [{"id": "m", "type": "llm"}, {"id": "e", "type": "embedding"}, {"id": "r", "type": "rerank"}]
    with mlx_backend(*models, embeddings=vectors, rerank=ranking) as server:
        yield {"endpoint_url": server.address}


def test_every_action_of_the_sdk_is_known_to_these_tests() -> None:
    names = "import json; from dify_plugin.core.entities.plugin.request import ModelActions as them; "
    names += "print(json.dumps([action.value for action in them]))"
    printed = subprocess.run([sys.executable, "-c", names], check=True, capture_output=True, text=True).stdout
    assert {*SERVED, *NOT_SERVED} == set(json.loads(printed))


@pytest.mark.parametrize("action", SERVED)
def test_an_action_is_answered(plugin: PluginProcess, form: dict[str, str], action: str) -> None:
    about, key = SERVED[action]
    answers = list(plugin.request(action, provider="mlx", credentials=form, **about))
    assert answers
    assert all(key in answer for answer in answers)


@pytest.mark.parametrize("action", NOT_SERVED)
def test_an_action_of_other_kinds_of_models_is_refused_and_the_plugin_goes_on(
    plugin: PluginProcess, form: dict[str, str], action: str
) -> None:
    with pytest.raises(PluginError):
        list(plugin.request(action, provider="mlx", credentials=form, **NOT_SERVED[action]))
    test_an_action_is_answered(plugin, form, "invoke_llm")
