"""Counting the chunks of a document: by the server, many in a request, and by an estimate where it cannot."""

from __future__ import annotations

from typing import Any

import pytest
from fake_servers import FakeServer, mlx_backend, vllm

from dify_mlx_provider.servers import token_count
from dify_mlx_provider.servers.probe import MAX_RESPONSE_BYTES
from dify_mlx_provider.servers.token_count import count_tokens_each, estimate_tokens
from dify_mlx_provider.upstream.credentials import Credentials

pytestmark = pytest.mark.usefixtures("empty_cache")

EMBEDDING = {"id": "e", "type": "embedding"}


def letters(body: dict[str, Any]) -> tuple[int, Any]:
    """A tokenizer for which every letter is a token."""
    return 200, {"count": [len(text) for text in body["prompt"]]}


def at(server: FakeServer) -> Credentials:
    return Credentials.from_form({"endpoint_url": server.address})


def test_the_chunks_of_a_document_are_counted_in_one_request() -> None:
    chunks = ["x" * (number % 7) for number in range(500)]
    with mlx_backend(EMBEDDING, tokenize=letters) as server:
        assert count_tokens_each(at(server), "e", chunks) == [len(chunk) for chunk in chunks]
        assert server.bodies == [{"model": "e", "prompt": chunks}]
        assert count_tokens_each(at(server), "e", []) == []
        assert len(server.bodies) == 1


def test_a_request_holds_no_more_texts_than_the_server_takes_and_no_more_than_the_answer_may_hold() -> None:
    many = ["a"] * (token_count.MAX_TEXTS + 1)
    large = ["語" * (token_count.MAX_BYTES // 3 - 1), "b" * 3, "cc", "d" * (token_count.MAX_BYTES + 1), "e"]
    with mlx_backend(EMBEDDING, tokenize=letters) as server:
        assert count_tokens_each(at(server), "e", many) == [1] * len(many)
        assert [len(body["prompt"]) for body in server.bodies] == [token_count.MAX_TEXTS, 1]
        server.bodies.clear()
        assert count_tokens_each(at(server), "e", large) == [len(text) for text in large]
        assert [body["prompt"] for body in server.bodies] == [large[:2], large[2:3], large[3:4], large[4:]]
    longest_token = len("999999,")
    assert token_count.MAX_BYTES * longest_token < MAX_RESPONSE_BYTES


def test_default_is_the_first_embedding_model_and_not_the_one_that_chats() -> None:
    with mlx_backend({"id": "chat", "type": "llm"}, EMBEDDING, tokenize=letters) as server:
        count_tokens_each(at(server), "default", ["a"])
        assert server.bodies[0]["model"] == "e"


@pytest.mark.parametrize(
    "answer",
    [
        (400, {"error": {"message": "prompt: must be a text"}}),
        (200, {"count": 3}),
        (200, {"count": [3, 3, 3]}),
        (200, {"count": [3, "4"]}),
        (200, []),
    ],
)
def test_a_server_that_cannot_is_asked_once_and_the_rest_is_estimated(answer: tuple[int, Any]) -> None:
    texts = ["x" * token_count.MAX_BYTES, "東京", "abcdefgh"]
    with mlx_backend(EMBEDDING, tokenize=lambda _: answer) as server:
        assert count_tokens_each(at(server), "e", texts[1:]) == [2, 2]
        assert count_tokens_each(at(server), "e", texts) == [estimate_tokens(text) for text in texts]
        assert len(server.bodies) == 2


def test_other_servers_are_not_asked_at_all() -> None:
    with vllm(tokenize=letters) as server:
        assert count_tokens_each(at(server), "e", ["abcdefgh", "東京"]) == [2, 2]
        assert server.bodies == []
