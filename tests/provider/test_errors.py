"""What Dify shows when a server refuses, is not there, or breaks off."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from daemon import PluginError, PluginProcess
from dify_view import text_of, user
from invocations import ask
from raw_server import RawServer

if TYPE_CHECKING:
    from conftest import Stub


def partial_answer(plugin: PluginProcess, stub: Stub) -> tuple[str, PluginError]:
    """The text that reached Dify before the answer broke off, and the error."""
    chunks: list[dict[str, Any]] = []
    with pytest.raises(PluginError) as caught:
        chunks.extend(plugin.invoke([user("hi")], credentials=stub.credentials))
    return text_of(chunks), caught.value


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "InvokeBadRequestError"),
        (401, "InvokeAuthorizationError"),
        (403, "InvokeAuthorizationError"),
        (404, "InvokeBadRequestError"),
        (413, "InvokeBadRequestError"),
        (429, "InvokeRateLimitError"),
        (500, "InvokeServerUnavailableError"),
        (503, "InvokeServerUnavailableError"),
    ],
)
def test_each_status_is_one_of_difys_kinds_in_the_servers_words(
    plugin: PluginProcess, stub: Stub, status: int, kind: str
) -> None:
    stub.will_send(
        json.dumps({"error": {"message": "because of this"}}), status=status, type="application/json"
    )
    with pytest.raises(PluginError) as caught:
        ask(plugin, stub)
    assert caught.value.kind == kind
    assert "because of this" in caught.value.message
    assert caught.value.message.startswith("[MLX] ")


def test_no_server_is_a_connection_error_with_advice(plugin: PluginProcess) -> None:
    with pytest.raises(PluginError) as caught:
        list(plugin.invoke([user("hi")], credentials={"endpoint_url": "http://127.0.0.1:9/v1"}))
    assert caught.value.kind == "InvokeConnectionError"
    assert "start it with `mlx-backend`" in caught.value.message


@pytest.mark.parametrize("answer", ['{"detail": "Not Found"}', "<html>no such page</html>", ""])
def test_an_address_without_an_api_is_reported(plugin: PluginProcess, stub: Stub, answer: str) -> None:
    stub.will_send(answer, status=404, type="application/json")
    with pytest.raises(PluginError, match="it usually ends in /v1"):
        ask(plugin, stub)


def test_a_page_instead_of_an_api_is_reported(plugin: PluginProcess, stub: Stub) -> None:
    stub.will_send("<html>welcome</html>", type="text/html")
    with pytest.raises(PluginError, match="not an OpenAI-compatible server") as caught:
        ask(plugin, stub)
    assert caught.value.kind == "InvokeBadRequestError"


def test_a_server_whose_head_never_ends_is_one_sentence(plugin: PluginProcess) -> None:
    with RawServer([b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000, None], chats_only=True) as server:
        with pytest.raises(PluginError, match="not an OpenAI-compatible server") as caught:
            list(plugin.invoke([user("hi")], credentials={"endpoint_url": f"{server.address}/v1"}))
        assert caught.value.kind == "InvokeBadRequestError"


def sse(delta: dict[str, Any]) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n"


@pytest.mark.parametrize(
    ("ending", "kind"),
    [
        (
            'data: {"error": {"message": "out of memory", "type": "server_error"}}\n\n',
            "InvokeServerUnavailableError",
        ),
        (
            'data: {"error": {"message": "too long", "type": "invalid_request_error"}}\n\n',
            "InvokeBadRequestError",
        ),
        (
            'data: {"error": {"message": "slow down", "code": "rate_limit_exceeded"}}\n\n',
            "InvokeRateLimitError",
        ),
        ('data: {"choices": [{"delta": {"cont', "InvokeServerUnavailableError"),
        ("data: nonsense\n\n", "InvokeServerUnavailableError"),
        ("", "InvokeServerUnavailableError"),
    ],
    ids=["server error", "bad request", "rate limit", "half a line", "no JSON", "cut"],
)
def test_an_answer_that_breaks_off_closes_its_block_and_says_why(
    plugin: PluginProcess, stub: Stub, ending: str, kind: str
) -> None:
    stub.will_send(sse({"reasoning_content": "I was just"}), ending, cut=True)
    text, error = partial_answer(plugin, stub)
    assert text == "<think>\nI was just\n</think>"
    assert error.kind == kind


def test_comments_in_a_stream_are_ignored(plugin: PluginProcess, stub: Stub) -> None:
    done = 'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
    stub.will_send(": keepalive 1/80\n\n", sse({"content": "Hi"}), ": keepalive\r\n\r\n", done)
    assert text_of(ask(plugin, stub)) == "Hi"
