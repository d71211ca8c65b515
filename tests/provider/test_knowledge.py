"""Embeddings and rerank for a knowledge base, as Dify asks the plugin for them, from the real server.

The models have random weights in real models' formats: the numbers mean nothing, but they are the server's.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from conftest import LOADED, ROOT, listening
from daemon import PluginError, PluginProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FOX, TOKYO = "the quick brown fox", "tokyo is in japan"
WRITE = """
import sys
from pathlib import Path
from embedding_models import write_bert, write_ranking_roberta
write_bert(Path(sys.argv[1]) / "multilingual-e5-small")
write_ranking_roberta(Path(sys.argv[1]) / "reranker")
"""


@pytest.fixture(scope="module")
def server_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`mlx-backend` with an embedding model and a rerank model next to the one that ships; its address."""
    folder: Path = tmp_path_factory.mktemp("models")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    # MLX in a process of its own: this one is patched by Dify's SDK.
    command = [sys.executable, "-c", WRITE, str(folder)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": paths}, capture_output=True)
    options = ["--models-dir", str(folder), "--model", "mlx_backend/demo/model", "--model-id", "demo"]
    command = [sys.executable, "-m", "mlx_backend", "--port", "0", *options]
    with listening(command, ready=LOADED) as address:
        yield address


@pytest.fixture
def form(server_address: str) -> dict[str, str]:
    return {"endpoint_url": server_address}


def embed(
    plugin: PluginProcess,
    form: dict[str, str],
    texts: list[str],
    model: str = "default",
    kind: str = "document",
) -> dict[str, Any]:
    (answer,) = plugin.request(
        "invoke_text_embedding",
        provider="mlx",
        model=model,
        model_type="text-embedding",
        credentials=form,
        texts=texts,
        input_type=kind,
    )
    return answer


def rank(
    plugin: PluginProcess, form: dict[str, str], docs: list[str], model: str = "default", **more: Any
) -> list[dict[str, Any]]:
    (answer,) = plugin.request(
        "invoke_rerank",
        provider="mlx",
        model=model,
        model_type="rerank",
        credentials=form,
        query=FOX,
        docs=docs,
        **{"score_threshold": None, "top_n": None, **more},
    )
    documents: list[dict[str, Any]] = answer["docs"]
    return documents


def validate(plugin: PluginProcess, form: dict[str, str], model: str, kind: str) -> None:
    list(
        plugin.request(
            "validate_model_credentials", provider="mlx", model=model, model_type=kind, credentials=form
        )
    )


def served(address: str, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def close(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and all(abs(a - b) < 1e-4 for a, b in zip(one, other, strict=True))


def test_passages_and_questions_become_the_servers_vectors(
    plugin: PluginProcess, form: dict[str, str], server_address: str
) -> None:
    for kind, prefix in [("document", "passage: "), ("query", "query: ")]:
        answer = embed(plugin, form, [FOX, TOKYO], "multilingual-e5-small", kind)
        texts = [prefix + FOX, prefix + TOKYO]
        expected = served(
            server_address, "/v1/embeddings", {"model": "multilingual-e5-small", "input": texts}
        )
        for vector, entry in zip(answer["embeddings"], expected["data"], strict=True):
            assert close(vector, entry["embedding"])
        assert answer["usage"]["total_tokens"] == expected["usage"]["total_tokens"]
    assert answer["model"] == "multilingual-e5-small"


def test_a_library_is_sent_in_batches_and_comes_back_in_order(
    plugin: PluginProcess, form: dict[str, str]
) -> None:
    texts = [f"{word} " * (at % 7 + 1) for at, word in enumerate(["fox", "dog", "tokyo", "one", "two"] * 9)]
    whole = embed(plugin, form, texts)["embeddings"]
    small = embed(plugin, {**form, "max_chunks": "4"}, texts)["embeddings"]
    assert len(whole) == 45
    assert all(close(one, other) for one, other in zip(whole, small, strict=True))
    alone = embed(plugin, form, [texts[38]])["embeddings"][0]
    assert close(whole[38], alone)


def test_a_long_text_is_truncated(plugin: PluginProcess, form: dict[str, str]) -> None:
    long = "fox " * 5000
    [one, other] = embed(plugin, form, [long, long + TOKYO])["embeddings"]
    assert close(one, other)
    [short] = embed(plugin, {**form, "context_size": "8"}, [long])["embeddings"]
    assert not close(one, short)


def test_a_prefix_in_the_form_replaces_the_servers(plugin: PluginProcess, form: dict[str, str]) -> None:
    [own] = embed(plugin, form, [FOX], kind="query")["embeddings"]
    [same] = embed(plugin, {**form, "query_prefix": "query:"}, [FOX], kind="query")["embeddings"]
    [other] = embed(plugin, {**form, "query_prefix": "find:"}, [FOX], kind="query")["embeddings"]
    assert close(own, same)
    assert not close(own, other)


def test_tokens_are_the_servers_own_count(
    plugin: PluginProcess, form: dict[str, str], server_address: str
) -> None:
    # Asked first: the first request for a model loads it, and the plugin estimates where that takes too long.
    expected = [
        served(server_address, "/v1/tokenize", {"model": "multilingual-e5-small", "prompt": text})["count"]
        for text in (FOX, "x", TOKYO * 3)
    ]
    for model in (
        "multilingual-e5-small",
        "default",
    ):  # the default is the first of its kind, not one that chats
        (answer,) = plugin.request(
            "get_text_embedding_num_tokens",
            provider="mlx",
            model=model,
            model_type="text-embedding",
            credentials=form,
            texts=[FOX, "x", TOKYO * 3],
        )
        assert answer["num_tokens"] == expected


def test_tokens_are_estimated_without_a_server(plugin: PluginProcess) -> None:
    (answer,) = plugin.request(
        "get_text_embedding_num_tokens",
        provider="mlx",
        model="m",
        model_type="text-embedding",
        credentials={"endpoint_url": "http://127.0.0.1:9"},
        texts=["abcdefgh", "東京"],
    )
    assert answer["num_tokens"] == [2, 2]


def test_documents_are_ranked_by_the_servers_scores(
    plugin: PluginProcess, form: dict[str, str], server_address: str
) -> None:
    docs = [TOKYO, "a fox", "the lazy dog", "one two three"]
    expected = served(server_address, "/v1/rerank", {"model": "reranker", "query": FOX, "documents": docs})[
        "results"
    ]
    answer = rank(plugin, form, docs, "reranker")
    assert [doc["index"] for doc in answer] == [entry["index"] for entry in expected]
    assert all(doc["text"] == docs[doc["index"]] for doc in answer)
    for doc, entry in zip(answer, expected, strict=True):
        assert math.isclose(doc["score"], entry["relevance_score"], abs_tol=1e-5)
    assert [doc["index"] for doc in rank(plugin, form, docs, top_n=2)] == [doc["index"] for doc in answer[:2]]
    threshold = (answer[1]["score"] + answer[2]["score"]) / 2
    assert len(rank(plugin, form, docs, score_threshold=threshold)) == 2
    assert rank(plugin, form, []) == []


def test_the_form_is_validated_by_using_it(plugin: PluginProcess, form: dict[str, str]) -> None:
    for model in ("multilingual-e5-small", "default"):
        validate(plugin, form, model, "text-embedding")
    for model in ("reranker", "default"):
        validate(plugin, form, model, "rerank")


@pytest.mark.parametrize(
    ("model", "kind", "words"),
    [
        ("demo", "text-embedding", ["'demo' is a language model", "'multilingual-e5-small'"]),
        ("multilingual-e5-small", "rerank", ["is an embedding model", "'reranker'"]),
        ("nothing", "text-embedding", ["'nothing'. It has: multilingual-e5-small."]),
    ],
)
def test_a_model_of_another_kind_is_reported_with_those_that_fit(
    plugin: PluginProcess, form: dict[str, str], model: str, kind: str, words: list[str]
) -> None:
    with pytest.raises(PluginError) as caught:
        validate(plugin, form, model, kind)
    assert caught.value.kind == "CredentialsValidateFailedError"
    assert all(word in caught.value.message for word in words), caught.value.message


def test_a_wrong_path_is_reported_with_the_right_one(plugin: PluginProcess, server_address: str) -> None:
    for kind in ("text-embedding", "rerank"):
        with pytest.raises(PluginError, match=f"Enter {server_address}/v1"):
            validate(plugin, {"endpoint_url": f"{server_address}/models/v2"}, "default", kind)


def test_a_missing_server_is_reported(plugin: PluginProcess) -> None:
    form = {"endpoint_url": "http://127.0.0.1:9"}
    with pytest.raises(PluginError) as caught:
        embed(plugin, form, [FOX])
    assert caught.value.kind == "InvokeConnectionError"
    assert "no server at http://127.0.0.1:9/v1" in caught.value.message
    with pytest.raises(PluginError, match="no server at"):
        rank(plugin, form, [FOX])


def test_sizes_are_the_servers_unless_the_form_sets_them(plugin: PluginProcess, form: dict[str, str]) -> None:
    def schema(kind: str, model: str, **more: str) -> dict[str, Any]:
        (answer,) = plugin.request(
            "get_ai_model_schemas", provider="mlx", model_type=kind, model=model, credentials={**form, **more}
        )
        described: dict[str, Any] = answer["model_schema"]
        return described

    own = schema("text-embedding", "multilingual-e5-small")
    assert own["model_type"] == "text-embedding"
    assert own["model_properties"] == {"context_size": 64, "max_chunks": 32}
    in_form = schema("text-embedding", "x", context_size="2k", max_chunks="5", display_name="My model")
    assert in_form["model_properties"] == {"context_size": 2048, "max_chunks": 5}
    assert in_form["label"]["en_US"] == "My model"
    assert schema("rerank", "reranker")["model_properties"] == {"context_size": 64}
