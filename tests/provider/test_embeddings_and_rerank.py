"""Embeddings and rankings from all kinds of servers: what they are sent, and how their answers are parsed."""

from __future__ import annotations

import base64
import math
import struct
from typing import TYPE_CHECKING, Any

import pytest
from fake_servers import FakeServer, listed, llama_cpp, lm_studio, mlx_backend, mlx_lm, ollama, vllm

from dify_mlx_provider.knowledge import embed, rank
from dify_mlx_provider.upstream.credentials import Credentials
from dify_mlx_provider.upstream.errors import Refused, ServerError

if TYPE_CHECKING:
    from collections.abc import Callable


pytestmark = pytest.mark.usefixtures("empty_cache")


def at(server: FakeServer, **form: str) -> Credentials:
    return Credentials.from_form({"endpoint_url": server.address, **form})


def lengths(body: dict[str, Any]) -> tuple[int, Any]:
    """A model whose vectors hold the texts' lengths."""
    data = [{"index": at, "embedding": [len(text), 1.0]} for at, text in enumerate(body["input"])]
    return 200, {"data": data, "usage": {"total_tokens": 7}}


def short_only(most: int, status: int = 400) -> Callable[[dict[str, Any]], tuple[int, Any]]:
    """A model that refuses longer texts."""

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        if any(len(text) > most for text in body["input"]):
            return status, {"error": {"message": "input exceeds the available context size", "code": status}}
        return lengths(body)

    return answer


def test_only_servers_that_know_a_field_are_sent_it() -> None:
    with mlx_backend({"id": "e", "type": "embedding"}, embeddings=lengths) as server:
        embed("e", at(server), ["a"], query=True)
        embed("e", at(server, context_size="99"), ["a"], query=False)
        embed("e", at(server, document_prefix="passage:"), ["a"], query=False)
        first, second, third = server.bodies
    assert (first["input_type"], first["truncate_prompt_tokens"]) == ("query", -1)
    assert first["encoding_format"] == "base64"
    assert (second["input_type"], second["truncate_prompt_tokens"]) == ("document", 99)
    assert (third["input"], "input_type" in third) == (["passage: a"], False)
    with vllm(embeddings=lengths) as server:
        embed("e", at(server), ["a"], query=True)
        assert set(server.bodies[0]) == {"model", "input", "encoding_format", "truncate_prompt_tokens"}
    for start in (llama_cpp, lm_studio, ollama):
        with start(embeddings=lengths) as server:
            embed("e", at(server), ["a"], query=True)
            assert set(server.bodies[0]) == {"model", "input", "encoding_format"}
            assert server.bodies[0]["encoding_format"] == "float"


def test_texts_are_truncated_here_for_servers_that_do_not() -> None:
    with lm_studio(embeddings=lengths) as server:
        found = embed("text-embedding-nomic", at(server), ["ab" * 10_000, "short"], query=False)
    cut, short = (vector[0] for vector in found.vectors)
    assert 2_048 * 4 - 40 < cut <= 2_048 * 4
    assert short == 5


def test_texts_refused_as_too_long_are_sent_again_alone_and_shorter() -> None:
    with llama_cpp(embeddings=short_only(100)) as server:
        found = embed("e", at(server), ["x" * 50, "y" * 250], query=False)
        assert [vector[0] for vector in found.vectors] == [50, 250 * 2 // 3 * 2 // 3 * 2 // 3]
    with llama_cpp(embeddings=short_only(100, 500)) as server:
        assert embed("e", at(server), ["y" * 150], query=False).vectors[0][0] == 100
    with llama_cpp(embeddings=short_only(3)) as server, pytest.raises(Refused, match="context size"):
        embed("e", at(server), ["x" * 50], query=False)


def test_other_refusals_are_not_retried() -> None:
    refuse = (400, {"error": {"message": "this model does not support embeddings"}})
    with lm_studio(embeddings=lambda _: refuse) as server, pytest.raises(Refused, match="does not support"):
        embed("e", at(server), ["a", "b"], query=False)
    assert len(server.bodies) == 1


def test_default_is_the_first_embedding_model() -> None:
    with lm_studio(embeddings=lengths) as server:
        embed("default", at(server), ["a"], query=True)
        assert server.bodies[0]["model"] == "text-embedding-nomic"


def test_vectors_are_put_in_order_and_decoded_from_base64() -> None:
    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        packed = base64.b64encode(struct.pack("<2f", 0.5, -1.0)).decode()
        return 200, {"data": [{"index": 1, "embedding": [1, 2]}, {"index": 0, "embedding": packed}]}

    with ollama(embeddings=answer) as server:
        found = embed("e", at(server), ["first", "second"], query=False)
    assert found.vectors == [[0.5, -1.0], [1.0, 2.0]]
    assert found.tokens == 4, "an estimate, where the server does not count"


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"data": []},
        {"data": [{"index": 0, "embedding": [1.0]}]},
        {"data": [{"index": 0, "embedding": [1.0]}, {"index": 0, "embedding": [1.0]}]},
        {"data": [{"index": 0, "embedding": [1.0]}, {"index": 5, "embedding": [1.0]}]},
        {"data": [{"index": 0, "embedding": [1.0]}, {"index": 1, "embedding": [1.0, 2.0]}]},
        {"data": [{"index": 0, "embedding": [1.0]}, {"index": 1, "embedding": []}]},
        {"data": [{"index": 0, "embedding": [1.0]}, {"index": 1, "embedding": [None]}]},
        {"data": [{"index": 0, "embedding": [1.0]}, {"index": 1, "embedding": [float("nan")]}]},
        {"data": [{"index": 0, "embedding": [1.0]}, {"index": 1, "embedding": [10**400]}]},
        {"data": [{"index": 0, "embedding": "!"}, {"index": 1, "embedding": "!"}]},
        {"data": [{"index": 0, "embedding": "YWI="}, {"index": 1, "embedding": "YWI="}]},
        {"data": [1, 2]},
        [],
        "hello",
    ],
)
def test_an_incomplete_answer_is_an_error(answer: Any) -> None:
    with llama_cpp(embeddings=lambda _: (200, answer)) as server, pytest.raises(ServerError):
        embed("e", at(server), ["a", "b"], query=False)


def scored(*scores: float) -> Callable[[dict[str, Any]], tuple[int, Any]]:
    results = [{"index": at, "relevance_score": score} for at, score in enumerate(scores)]
    return lambda _: (200, {"results": results})


def test_scores_outside_0_to_1_go_through_a_sigmoid() -> None:
    with vllm(rerank=scored(0.2, 0.9)) as server:
        assert [(each.index, each.score) for each in rank("r", at(server), "q", ["a", "b"])] == [
            (1, 0.9),
            (0, 0.2),
        ]
        assert server.bodies[0] == {"model": "r", "query": "q", "documents": ["a", "b"]}
    with llama_cpp(rerank=scored(-3.0, 4.0)) as server:
        [best, worst] = rank("r", at(server), "q", ["a", "b"])
    assert (best.index, worst.index) == (1, 0)
    assert math.isclose(best.score, 1 / (1 + math.exp(-4)))


@pytest.mark.parametrize(
    "words", ["The query has 99 tokens; with a document the model holds 64", "input exceeds the context size"]
)
def test_a_query_refused_as_too_long_is_shortened(words: str) -> None:
    def ranked(body: dict[str, Any]) -> tuple[int, Any]:
        if len(body["query"]) > 50:
            return 400, {"error": {"message": words}}
        return scored(0.2, 0.9)(body)

    with mlx_backend({"id": "r", "type": "rerank"}, rerank=ranked) as server:
        assert rank("r", at(server), "q" * 100, ["a" * 20, "b"])[0].index == 1
        assert server.bodies[-1] == {"model": "r", "query": "q" * 44, "documents": ["a" * 20, "b"]}
    with llama_cpp(rerank=lambda _: (400, {"error": {"message": words}})) as server:  # noqa: SIM117
        with pytest.raises(Refused, match=words):
            rank("r", at(server), "q" * 100, ["a"])


@pytest.mark.parametrize(
    "results",
    [
        None,
        [],
        [{"index": 0, "relevance_score": 1}],
        [{"index": 0, "relevance_score": 1}, {"index": 9}],
        [{"index": 0, "relevance_score": 1}, {"index": 1, "relevance_score": 10**400}],
        ["a", "b"],
    ],
)
def test_an_incomplete_ranking_is_an_error(results: Any) -> None:
    with vllm(rerank=lambda _: (200, {"results": results})) as server:  # noqa: SIM117
        with pytest.raises(Refused, match="2 scores"):
            rank("r", at(server), "q", ["a", "b"])


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (lm_studio, "LM Studio at"),
        (llama_cpp, "--reranking"),
        (mlx_lm, "mlx_lm.server at"),
        (ollama, "does not rerank: it has no /rerank"),
    ],
)
def test_a_server_that_cannot_rerank_is_named(start: Callable[[], FakeServer], words: str) -> None:
    with start() as server, pytest.raises(Refused) as caught:
        rank("r", at(server), "q", ["a"])
    assert words in str(caught.value)


def test_lm_studios_error_for_a_missing_endpoint_is_understood() -> None:
    unknown = (200, {"error": "Unexpected endpoint or method. (POST /v1/rerank)"})
    with lm_studio(rerank=lambda _: unknown) as server, pytest.raises(Refused, match="does not rerank"):
        rank("r", at(server), "q", ["a"])


def test_an_error_object_with_status_200_is_an_error() -> None:
    from_error_object = (200, {"error": {"message": "the model broke"}})
    with (
        vllm(embeddings=lambda _: from_error_object) as server,
        pytest.raises(ServerError, match="the model broke"),
    ):
        embed("e", at(server), ["a"], query=False)


def test_a_missing_model_is_reported_with_those_that_fit() -> None:
    missing = (404, {"error": {"message": "model 'x' not found", "code": "model_not_found"}})
    with lm_studio(embeddings=lambda _: missing) as server, pytest.raises(ServerError) as caught:
        embed("x", at(server), ["a"], query=False)
    assert "text-embedding-nomic" in str(caught.value)
    assert "qwen-vl" not in str(caught.value)


def test_a_prefix_gets_back_the_space_that_a_form_strips() -> None:
    with FakeServer({"/v1/models": listed({"id": "m"})}, embeddings=lengths) as server:
        form = at(server, query_prefix="query:", document_prefix="文書：")
        embed("m", form, ["a"], query=True)
        embed("m", form, ["a"], query=False)
        assert [body["input"] for body in server.bodies] == [["query: a"], ["文書：a"]]
