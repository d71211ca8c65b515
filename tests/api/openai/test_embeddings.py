"""Vectors and rankings over HTTP: OpenAI's and Jina's shapes, from models with random weights in the real formats."""

import base64
import math
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from embedding_models import wordpiece, write_bert, write_qwen_embedding, write_ranking_roberta, write_roberta
from engine_models import write_tokenizer
from openai import OpenAI
from running_server import RunningServer, served
from scripted_engine import ScriptedEngine
from scripted_network import SOON, ScriptedNetwork

from mlx_backend.device.threads import FairLock
from mlx_backend.embedding.embedding_config import EmbeddingOptions
from mlx_backend.embedding.mlx import load_worker
from mlx_backend.embedding.text_encoder import TextEncoder
from mlx_backend.embedding.worker import Worker
from mlx_backend.engine.threaded import Engine
from mlx_backend.models.engine_options import EngineOptions
from mlx_backend.models.files import ModelType
from mlx_backend.models.spec import ModelSpec
from mlx_backend.registry import config_file
from mlx_backend.registry.catalogue import Catalogue
from mlx_backend.registry.registry import MultiModelRegistry
from mlx_backend.settings import Settings

FOX, TOKYO = "the quick brown fox", "tokyo"
CONFIG = """
[models.chat]
model = "{folder}/chat"

[models.bge]
model = "{folder}/bge"

[models."multilingual-e5"]
model = "{folder}/multilingual-e5"

[models.matryoshka]
model = "{folder}/bge"
matryoshka = true

[models."qwen-embedding"]
model = "{folder}/qwen-embedding"
query_prefix = "find: "

[models.reranker]
model = "{folder}/reranker"
"""


def talk(spec: ModelSpec, _options: EngineOptions, _on_progress: Callable[[float], None]) -> Engine:
    return ScriptedEngine(lambda _: "<|channel|>final<|message|>Hello.<|return|>", model_id=spec.name)


def read(
    spec: ModelSpec, kind: ModelType, options: EmbeddingOptions, on_progress: Callable[[float], None]
) -> Worker:
    return load_worker(spec.source, kind, options, model_id=spec.name, on_progress=on_progress)


@contextmanager
def serving(folder: Path, config: str) -> Iterator[RunningServer]:
    found = config_file.parse(config.format(folder=folder), folder=folder)
    models = MultiModelRegistry(
        Catalogue(found.models, others=found.others),
        talk,
        EngineOptions(),
        Settings(),
        default_name=found.models[0].name,
        load_worker=read,
    )
    try:
        with served(models, Settings(port=0)) as server:
            yield server
    finally:
        models.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    write_roberta(folder / "bge")
    write_bert(folder / "multilingual-e5")
    write_qwen_embedding(folder / "qwen-embedding")
    write_ranking_roberta(folder / "reranker")
    (folder / "chat").mkdir()
    (folder / "chat" / "config.json").write_text('{"model_type": "gpt_oss"}')
    (folder / "chat" / "model.safetensors").write_bytes(b"")
    with serving(folder, CONFIG) as running:
        yield running


def embed(server: RunningServer, texts: Any, model: str = "bge", **fields: Any) -> list[list[float]]:
    status, answer = server.call("/v1/embeddings", {"model": model, "input": texts, **fields})
    assert status == 200, answer
    return [entry["embedding"] for entry in answer["data"]]


def refused(server: RunningServer, path: str, **body: Any) -> dict[str, Any]:
    status, answer = server.call(path, body)
    assert status == 400, answer
    error: dict[str, Any] = answer["error"]
    return error


def close(one: list[float], other: list[float], within: float = 1e-4) -> bool:
    return len(one) == len(other) and all(abs(a - b) < within for a, b in zip(one, other, strict=True))


# -- vectors ------------------------------------------------------------------------------------------------


def test_embeddings_have_openais_shape_and_the_order_of_the_texts(server: RunningServer) -> None:
    texts = [FOX, "a", TOKYO + " is in japan", "b c"]
    status, answer = server.call("/v1/embeddings", {"model": "bge", "input": texts})
    assert status == 200
    assert (answer["object"], answer["model"]) == ("list", "bge")
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2, 3]
    assert {entry["object"] for entry in answer["data"]} == {"embedding"}
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > len(texts)
    for text, entry in zip(texts, answer["data"], strict=True):
        assert close(embed(server, text)[0], entry["embedding"])


def test_vectors_are_normalised(server: RunningServer) -> None:
    for model in ("bge", "multilingual-e5", "qwen-embedding"):
        for vector in embed(server, [FOX, TOKYO], model):
            assert math.isclose(math.hypot(*vector), 1, abs_tol=1e-5)


def test_base64_holds_the_same_numbers(server: RunningServer) -> None:
    [plain] = embed(server, FOX)
    status, answer = server.call(
        "/v1/embeddings", {"model": "bge", "input": FOX, "encoding_format": "base64"}
    )
    assert status == 200
    packed = array("f")
    packed.frombytes(base64.b64decode(answer["data"][0]["embedding"]))
    assert packed.tolist() == plain


def test_openais_own_client_parses_them(server: RunningServer) -> None:
    with OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        answer = client.embeddings.create(model="bge", input=[FOX, TOKYO])
    assert [len(entry.embedding) for entry in answer.data] == [32, 32]
    assert close(answer.data[0].embedding, embed(server, FOX)[0])


def test_token_ids_are_accepted_in_place_of_texts(server: RunningServer) -> None:
    status, tokenized = server.call("/v1/tokenize", {"model": "bge", "prompt": FOX})
    assert status == 200
    assert tokenized["count"] == len(tokenized["tokens"])
    [as_text] = embed(server, FOX)
    [as_tokens] = embed(server, tokenized["tokens"])
    [in_a_list] = embed(server, [tokenized["tokens"]])
    assert close(as_text, as_tokens)
    assert close(as_text, in_a_list)


def test_a_query_and_a_passage_get_their_familys_prefixes(server: RunningServer) -> None:
    for role, prefix in [("query", "query: "), ("document", "passage: "), ("search_query", "query: ")]:
        [vector] = embed(server, FOX, "multilingual-e5", input_type=role)
        [spelt] = embed(server, prefix + FOX, "multilingual-e5")
        [again] = embed(server, prefix + FOX, "multilingual-e5", input_type=role)
        assert close(vector, spelt)
        assert close(again, spelt), "a prefix that is there already is not doubled"
    [without] = embed(server, FOX, "multilingual-e5")
    assert not close(without, embed(server, FOX, "multilingual-e5", input_type="query")[0])


def test_the_models_file_wins_over_the_models_own_prefix(server: RunningServer) -> None:
    [vector] = embed(server, FOX, "qwen-embedding", input_type="query")
    [spelt] = embed(server, "find: " + FOX, "qwen-embedding")
    assert close(vector, spelt)


def test_a_text_that_is_too_long_is_refused_with_both_numbers(server: RunningServer) -> None:
    error = refused(server, "/v1/embeddings", model="bge", input=["a", "a b " * 60])
    assert error["code"] == "context_length_exceeded"
    assert "input[1] has 243 tokens" in error["message"]
    assert (error["prompt_tokens"], error["max_model_len"]) == (243, 64)


def test_it_is_truncated_on_request(server: RunningServer) -> None:
    long = "a b " * 60
    whole = embed(server, long, truncate=True)[0]
    assert close(whole, embed(server, long, truncate_prompt_tokens=-1)[0])
    assert close(embed(server, "a b c d", truncate_prompt_tokens=6)[0], embed(server, "a b")[0])
    assert not close(whole, embed(server, "a b")[0])


def test_dimensions_are_reduced_only_where_the_model_was_trained_for_it(server: RunningServer) -> None:
    error = refused(server, "/v1/embeddings", model="bge", input=FOX, dimensions=8)
    assert error["param"] == "dimensions"
    assert "32" in error["message"]
    [whole] = embed(server, FOX, "matryoshka")
    [short] = embed(server, FOX, "matryoshka", dimensions=8)
    length = math.hypot(*whole[:8])
    assert close(short, [number / length for number in whole[:8]])
    assert embed(server, FOX, dimensions=32)[0] == embed(server, FOX)[0]
    assert "32" in refused(server, "/v1/embeddings", model="matryoshka", input=FOX, dimensions=64)["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [FOX, 3]}, "input[1]"),
        ({"input": {"text": FOX}}, "input"),
        ({"input": [9999]}, "input"),
        ({"input": [[]]}, "input[0]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": FOX, "dimensions": 0}, "dimensions"),
        ({"input": FOX, "encoding_format": "int8"}, "encoding_format"),
        ({"input": FOX, "input_type": "poem"}, "input_type"),
        ({"input": FOX, "input_type": "query", "task": "retrieval.passage"}, "input_type"),
    ],
)
def test_an_invalid_value_is_refused_by_its_field(
    server: RunningServer, body: dict[str, Any], param: str
) -> None:
    assert refused(server, "/v1/embeddings", model="bge", **body)["param"] == param


def test_without_a_name_the_first_model_of_the_type_is_used(server: RunningServer) -> None:
    status, answer = server.call("/v1/embeddings", {"input": FOX})
    assert (status, answer["model"]) == (200, "bge")
    status, answer = server.call("/rerank", {"query": FOX, "documents": [TOKYO]})
    assert (status, answer["model"]) == (200, "reranker")


def test_an_ignored_field_is_named_in_a_header(server: RunningServer) -> None:
    with server.open("/v1/embeddings", {"model": "bge", "input": FOX, "late_chunking": True}) as response:
        assert response.headers["x-mlx-backend-ignored"] == "late_chunking"


def test_what_only_a_reply_could_do_is_ignored_and_not_refused(server: RunningServer) -> None:
    with server.open("/v1/embeddings", {"model": "bge", "input": FOX, "n": 2, "echo": True}) as response:
        assert response.headers["x-mlx-backend-ignored"] == "n, echo"


# -- rankings -----------------------------------------------------------------------------------------------


def test_documents_come_back_best_first(server: RunningServer) -> None:
    documents = [TOKYO, {"text": "a brown fox"}, "the lazy dog", "b"]
    body = {"model": "reranker", "query": FOX, "documents": documents, "return_documents": True}
    status, answer = server.call("/v1/rerank", body)
    assert status == 200, answer
    results = answer["results"]
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)
    assert sorted(result["index"] for result in results) == [0, 1, 2, 3]
    texts = [TOKYO, "a brown fox", "the lazy dog", "b"]
    assert all(result["document"] == {"text": texts[result["index"]]} for result in results)
    assert answer["usage"]["total_tokens"] > 0
    _, top = server.call("/v1/rerank", {**body, "top_n": 2, "return_documents": False})
    assert [(each["index"], each["relevance_score"]) for each in top["results"]] == [
        (each["index"], each["relevance_score"]) for each in results[:2]
    ]
    assert "document" not in top["results"][0]


def test_scores_are_the_sigmoid_of_the_raw_scores(server: RunningServer) -> None:
    body = {"model": "reranker", "query": FOX, "documents": [TOKYO, "a brown fox"]}
    _, answer = server.call("/v1/rerank", body)
    _, raw = server.call("/v1/rerank", {**body, "raw_scores": True})
    for scaled, logit in zip(answer["results"], raw["results"], strict=True):
        assert scaled["index"] == logit["index"]
        assert math.isclose(scaled["relevance_score"], 1 / (1 + math.exp(-logit["relevance_score"])))


def test_a_long_document_is_truncated_and_a_long_query_is_refused(
    server: RunningServer,
) -> None:
    body = {"model": "reranker", "query": FOX, "documents": ["a b " * 500, "a b " * 400]}
    status, answer = server.call("/v1/rerank", body)
    assert status == 200
    assert len({result["relevance_score"] for result in answer["results"]}) == 1
    error = refused(
        server, "/v1/rerank", model="reranker", query="a b " * 60, documents=["a b c d e f g h " * 4]
    )
    assert (error["param"], error["code"]) == ("query", "context_length_exceeded")


def test_no_documents_give_no_results(server: RunningServer) -> None:
    status, answer = server.call("/v1/rerank", {"model": "reranker", "query": FOX, "documents": []})
    assert (status, answer["results"], answer["usage"]["total_tokens"]) == (200, [], 0)


def test_an_instruction_is_refused_where_it_would_be_ignored(server: RunningServer) -> None:
    body = {"model": "reranker", "query": FOX, "documents": [TOKYO], "instruction": "find animals"}
    assert refused(server, "/v1/rerank", **body)["param"] == "instruction"


# -- which model does what ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "model", "instead"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "bge", "'chat'"),
        ("/v1/completions", {"prompt": "hi"}, "reranker", "'chat'"),
        ("/v1/embeddings", {"input": FOX}, "chat", "'bge'"),
        ("/v1/embeddings", {"input": FOX}, "reranker", "'bge'"),
        ("/v1/rerank", {"query": FOX, "documents": [FOX]}, "bge", "'reranker'"),
    ],
)
def test_a_request_for_a_model_of_another_type_is_refused(
    server: RunningServer, path: str, body: dict[str, Any], model: str, instead: str
) -> None:
    error = refused(server, path, model=model, **body)
    assert (error["param"], error["code"]) == ("model", "wrong_model_type")
    assert repr(model) in error["message"]
    assert instead in error["message"]


def test_the_model_list_gives_each_models_type_loaded_or_not(server: RunningServer) -> None:
    for _ in range(2):
        listed = {entry["id"]: entry for entry in server.call("/v1/models")[1]["data"]}
        assert listed["chat"]["type"] == "llm"
        assert (listed["bge"]["type"], listed["bge"]["capabilities"]) == ("embedding", ["embedding"])
        assert listed["bge"]["context_length"] == listed["bge"]["max_model_len"] == 64
        assert (listed["reranker"]["type"], listed["reranker"]["capabilities"]) == ("rerank", ["rerank"])
        assert listed["qwen-embedding"]["context_length"] == 1024
        assert "reasoning" not in listed["bge"]
        for model in ("bge", "qwen-embedding"):
            embed(server, FOX, model)


def test_embedding_models_are_unloaded_and_loaded_again_like_others(server: RunningServer) -> None:
    [before] = embed(server, FOX)
    assert server.call("/v1/models/bge/unload", b"")[0] == 200
    assert server.call("/v1/models/bge")[1]["state"] == "unloaded"
    assert embed(server, FOX)[0] == before
    assert server.call("/v1/models/bge")[1]["state"] == "ready"


def test_tokens_are_counted_by_the_models_own_vocabulary(server: RunningServer) -> None:
    _, tokenized = server.call("/v1/tokenize", {"model": "bge", "prompt": FOX})
    _, bare = server.call("/v1/tokenize", {"model": "bge", "prompt": FOX, "add_special_tokens": False})
    assert tokenized["tokens"] == [0, *bare["tokens"], 2]
    assert tokenized["max_model_len"] == 64
    status, answer = server.call("/v1/embeddings", {"model": "bge", "input": [FOX, FOX]})
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 2 * tokenized["count"])
    messages = [{"role": "user", "content": "hi"}]
    assert refused(server, "/v1/tokenize", model="bge", messages=messages)["param"] == "messages"


def test_work_for_a_client_that_disconnected_is_cancelled(tmp_path: Path) -> None:
    tokenizer = wordpiece()
    write_tokenizer(tmp_path / "slow", tokenizer)
    encoder = TextEncoder(tmp_path / "slow", "slow", tokenizer.get_vocab_size())
    network = ScriptedNetwork(gated=True, encoder=encoder)
    working = Worker(network, FairLock())
    models = MultiModelRegistry(
        Catalogue([ModelSpec(name="slow", source=str(tmp_path / "slow"), type="embedding")]),
        talk,
        EngineOptions(),
        Settings(),
        load_worker=lambda *_: working,
    )
    assert network.gate is not None
    try:
        with served(models, Settings(port=0)) as server:
            connection = server.send({"input": ["fox " * 400] * 20}, "/v1/embeddings")
            assert network.stage_started.acquire(timeout=SOON)
            job = working._current
            assert job is not None
            connection.close()
            assert job._finished.wait(SOON)
            assert job.closed
            network.gate.release(2)
            status, answer = server.call("/v1/embeddings", {"input": "fox"})
            assert status == 200
            assert len(answer["data"]) == 1
            assert len(network.stages) == 2
    finally:
        network.gate.release(1000)
        models.stop()


def test_a_server_without_an_embedding_model_says_how_to_add_one(tmp_path: Path) -> None:
    write_bert(tmp_path / "small")
    with serving(tmp_path, '[models.small]\nmodel = "{folder}/small"') as server:
        status, answer = server.call("/v1/rerank", {"query": FOX, "documents": [FOX]})
        assert status == 404
        assert "--rerank-model" in answer["error"]["message"]
        assert "--model" in refused(server, "/v1/chat/completions", messages=[])["message"]
