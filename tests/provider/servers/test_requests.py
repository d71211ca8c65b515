"""A request refused for a field the plugin added is sent again without it, and later requests omit it at once."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from fake_servers import FakeServer, event_stream, listed, lm_studio, mlx_backend, ollama, vllm

from dify_mlx_provider.servers import discovery
from dify_mlx_provider.servers.requests import chat, post_json
from dify_mlx_provider.upstream.cache import DEFAULT_TTL
from dify_mlx_provider.upstream.credentials import Credentials
from dify_mlx_provider.upstream.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Callable

BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "reasoning_effort": "high",
}


pytestmark = pytest.mark.usefixtures("empty_cache")


def answer(server: FakeServer, kind: str = "auto", **fields: Any) -> str:
    credentials = Credentials.from_form({"endpoint_url": server.address, "server_kind": kind})
    return "".join(chunk["choices"][0]["delta"]["content"] for chunk in chat(credentials, {**BODY, **fields}))


def strict(*known: str) -> Callable[[dict[str, Any]], tuple[int, Any]]:
    """A server that refuses the first unknown field, as OpenAI's does."""

    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        unknown = next((name for name in body if name not in ("model", "messages", "stream", *known)), None)
        if unknown is None:
            return 200, event_stream("ok")
        return 400, {"error": {"message": f"Unrecognized request argument supplied: {unknown}", "code": None}}

    return reply


def other(name: str = "m", **more: Any) -> FakeServer:
    return FakeServer({"/v1/models": listed({"id": name, "owned_by": "me"})}, **more)


def test_refused_fields_are_omitted_one_after_the_other_and_remembered() -> None:
    with other(chat=strict("reasoning_effort")) as server:
        assert answer(server) == "ok"
        sent = [set(body) - {"model", "messages", "stream"} for body in server.bodies]
        assert sent == [
            {"stream_options", "reasoning_effort", "chat_template_kwargs"},
            {"reasoning_effort", "chat_template_kwargs"},
            {"reasoning_effort"},
        ]
        assert answer(server) == "ok"
        assert len(server.bodies) == 4
        assert server.bodies[3]["reasoning_effort"] == "high"


@pytest.mark.parametrize("by", ["a form that is saved", "time"])
def test_a_refusal_is_forgotten(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = ["reasoning_effort"]
    with other(chat=lambda body: strict(*known)(body)) as server:
        assert answer(server) == "ok"
        known += ["chat_template_kwargs", "stream_options"]
        if by == "time":
            monkeypatch.setattr(discovery._refused_fields, "_clock", lambda: time.monotonic() + DEFAULT_TTL)
        else:
            discovery.forget_servers()
        assert answer(server) == "ok"
        assert {"stream_options", "chat_template_kwargs"} <= server.bodies[-1].keys()


def test_a_refusal_is_remembered_for_one_model_only() -> None:
    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        if body["model"] == "gemma3" and "reasoning_effort" in body:
            return 400, {"error": {"message": '"gemma3" does not support thinking', "type": "api_error"}}
        return 200, event_stream("ok")

    with ollama(chat=reply) as server:
        assert answer(server, model="gemma3") == "ok"
        assert answer(server, model="gpt-oss:20b") == "ok"
        assert server.bodies[-1]["reasoning_effort"] == "high"


def test_a_field_the_user_chose_is_never_omitted() -> None:
    with other(chat=strict("stream_options", "reasoning_effort", "chat_template_kwargs")) as server:
        with pytest.raises(Refused, match="supplied: top_k"):
            answer(server, top_k=3)
        assert len(server.bodies) == 1


def test_a_refusal_that_omitting_does_not_cure_is_reported_and_not_remembered() -> None:
    def reply(_: dict[str, Any]) -> tuple[int, Any]:
        return 400, {"error": {"message": "reasoning_effort and stream_options are bad, so is all else"}}

    with vllm(chat=reply) as server:
        for _ in range(2):
            with pytest.raises(Refused, match="bad, so is all else"):
                answer(server)
        assert [len(body) for body in server.bodies[:2]] == [len(body) for body in server.bodies[2:]]


def test_default_becomes_a_chat_model() -> None:
    with lm_studio() as server:
        assert answer(server, model="default") == "ok"
        assert server.bodies[0]["model"] == "openai/gpt-oss-20b"


def only(*served: str) -> Callable[[dict[str, Any]], tuple[int, Any]]:
    """A server that knows these models only."""

    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        if body["model"] in served:
            return 200, event_stream("ok")
        return 404, {"error": {"message": f"The model {body['model']} does not exist."}}

    return reply


def test_a_server_that_refuses_default_gets_its_first_models_name() -> None:
    with other(chat=only("m")) as server:
        assert answer(server, "mlx-backend", model="default") == "ok"
        assert [body["model"] for body in server.bodies] == ["default", "m"]


@pytest.mark.parametrize("served", ["gemma", "m"])
def test_an_unknown_model_is_reported_with_those_served(served: str) -> None:
    with other(served, chat=only(served)) as server:
        with pytest.raises(Refused) as caught:
            answer(server, model="x")
        assert str(caught.value) == (
            f"the server at {server.address}/v1 does not have the model 'x': The model x does not exist. "
            f"It has: {served}. Choose one of these, or start the server with the model you want."
        )
        assert len(server.bodies) == 1


def refusing(message: str) -> Any:
    """A chat that knows no model, and says so in these words."""
    return lambda _: (404, {"error": {"message": message, "code": "model_not_found"}})


def test_mlx_backend_without_the_model_is_reported_with_its_address_its_models_and_default() -> None:
    words = refusing("The model 'x' is not on this machine.")
    models = [{"id": "a", "type": "llm"}, {"id": "e", "type": "embedding"}]
    with mlx_backend(*models, chat=words) as server, pytest.raises(Refused) as caught:
        answer(server, model="x")
    assert str(caught.value) == (
        f"the server at {server.address}/v1 does not have the model 'x'. It has: a. Choose one of these, or Default, "
        "which always works, or start the server with the model you want."
    )


def test_a_model_that_has_left_the_server_is_reported_with_those_that_are_there_now() -> None:
    with mlx_backend(
        {"id": "x", "type": "llm"}, chat=refusing("The model 'x' is not served here.")
    ) as server:
        credentials = Credentials.from_form({"endpoint_url": server.address})
        assert discovery.find_server(credentials).names() == ["x"]
        server.answers["/v1/models"] = listed({"id": "other", "type": "llm", "owned_by": "mlx-backend"})
        with pytest.raises(Refused) as caught:
            answer(server, model="x")
    assert str(caught.value) == (
        f"the server at {server.address}/v1 does not have the model 'x'. It has: other. Choose one of these, or "
        "Default, which always works, or start the server with the model you want."
    )


def test_a_missing_embedding_model_is_reported_once() -> None:
    embeddings = refusing("The model 'x' is not served here. There is 'e'.")
    models = [{"id": "a", "type": "llm"}, {"id": "e", "type": "embedding"}]
    with mlx_backend(*models, embeddings=embeddings) as server:
        credentials = Credentials.from_form({"endpoint_url": server.address})
        with pytest.raises(Refused) as caught:
            post_json(credentials, "x", "/embeddings", {"input": ["a"]}, "embedding")
    assert str(caught.value) == (
        f"the server at {server.address}/v1 does not have the model 'x'. It has: e. Choose one of these, or start the "
        "server with the model you want."
    )


def test_what_a_server_says_of_a_model_that_it_lists_is_left_as_it_is() -> None:
    words = "The model 'x' could be 'a/x' or 'b/x': send the whole name."
    listing = [{"id": "a/x"}, {"id": "b/x"}]
    with mlx_backend(*listing, chat=refusing(words)) as server, pytest.raises(Refused) as caught:
        answer(server, model="x")
    assert str(caught.value) == words


def test_a_server_without_models_is_reported_with_what_to_do() -> None:
    with mlx_backend(chat=refusing("no")) as server, pytest.raises(Refused) as caught:
        answer(server, model="x")
    assert str(caught.value).endswith("the model 'x': no. Start the server with the model you want.")


def test_a_server_that_lists_default_but_refuses_it_is_asked_once() -> None:
    with other("default", chat=only("m")) as server:
        with pytest.raises(Refused, match="model default does not exist"):
            answer(server, model="default")
        assert len(server.bodies) == 1


def test_mlx_backend_gets_the_name_default() -> None:
    with mlx_backend({"id": "one"}, {"id": "two"}) as server:
        assert answer(server, model="default") == "ok"
        assert server.bodies[0]["model"] == "default"


def test_a_server_that_describes_nothing_is_still_used() -> None:
    with FakeServer() as server:
        assert answer(server) == "ok"
        assert server.bodies[0]["reasoning_effort"] == "high"
        assert server.bodies[0]["chat_template_kwargs"]["reasoning_effort"] == "high"
