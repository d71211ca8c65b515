"""What a key allows: so many requests and tokens a minute, some models, a priority. Seen by its client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from scripted_engine import ScriptedEngine
from scripted_server import ANSWER, CHAT, USER, client_of
from single_model import SingleModelRegistry
from werkzeug.test import Client

from mlx_backend.api.errors import ApiError
from mlx_backend.chat.service import Service
from mlx_backend.models.engine_options import EngineOptions
from mlx_backend.models.spec import ModelSpec
from mlx_backend.registry.catalogue import Catalogue
from mlx_backend.registry.registry import MultiModelRegistry
from mlx_backend.server.api_keys import ApiKey
from mlx_backend.server.app import App
from mlx_backend.server.limits import RATE_LIMIT_HEADERS, RateLimits
from mlx_backend.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from werkzeug.test import TestResponse

    from mlx_backend.engine.base import GenerationRequest

ALICE = {"Authorization": "Bearer sk-alice"}
BODY = {"messages": [USER], "max_tokens": 50}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("mlx_backend.server.app.RateLimits", lambda: RateLimits(clock))
    return clock


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine(lambda _: ANSWER) as engine:
        yield engine


def with_keys(tmp_path: Path, text: str) -> dict[str, Any]:
    (tmp_path / "keys.toml").write_text(text)
    return {"api_key_file": tmp_path / "keys.toml"}


def asked(client: Client, **fields: Any) -> TestResponse:
    return client.post(CHAT, json={**BODY, **fields}, headers=ALICE)


def test_more_requests_than_a_minute_allows_are_a_429_in_openais_shape(
    engine: ScriptedEngine, tmp_path: Path, clock: Clock
) -> None:
    client = client_of(
        engine,
        **with_keys(tmp_path, '[keys]\nbob = "b"\n[keys.alice]\nkey = "sk-alice"\nrequests_per_minute = 2'),
    )
    left = []
    for _ in range(2):
        response = asked(client)
        assert response.status_code == 200
        left.append(response.headers["x-ratelimit-remaining-requests"])
        assert response.headers["x-ratelimit-limit-requests"] == "2"
    assert left == ["1", "0"]
    assert response.headers["x-ratelimit-reset-requests"] == "1m0s"
    refused = asked(client)
    assert refused.status_code == 429
    assert refused.headers["Retry-After"] == "30"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    error = refused.get_json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("requests", "rate_limit_exceeded", None)
    assert error["message"] == (
        "This API key has reached its limit of 2 requests per minute; try again in 30 s."
    )
    other = client.post(CHAT, json=BODY, headers={"x-api-key": "b"})
    assert other.status_code == 200
    assert not set(RATE_LIMIT_HEADERS) & {name.lower() for name, _ in other.headers}
    clock.now += 30
    assert asked(client).status_code == 200
    assert asked(client).status_code == 429


def test_a_request_that_the_server_has_no_room_for_uses_nothing_up(tmp_path: Path) -> None:
    keys = with_keys(tmp_path, '[keys.alice]\nkey = "sk-alice"\nrequests_per_minute = 2')
    with ScriptedEngine(lambda _: ANSWER) as engine:
        app = App(SingleModelRegistry(Service(engine)), Settings(**keys))
        app.in_flight.drain()
        refused = asked(Client(app))
    assert refused.status_code == 503
    assert refused.headers["x-ratelimit-remaining-requests"] == "2"


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_counted_when_a_reply_ends_and_what_is_owed_is_waited_for(
    engine: ScriptedEngine, tmp_path: Path, clock: Clock, stream: bool
) -> None:
    client = client_of(
        engine, **with_keys(tmp_path, '[keys.alice]\nkey = "sk-alice"\ntokens_per_minute = 30')
    )
    first = asked(client, stream=stream, stream_options={"include_usage": True} if stream else None)
    used = first.get_data(as_text=True)  # to its end
    first.close()
    assert first.status_code == 200
    total = int(used.rpartition('"total_tokens":')[2].partition(",")[0].partition("}")[0])
    assert total > 30
    refused = asked(client)
    assert refused.status_code == 429
    assert refused.get_json()["error"]["type"] == "tokens"
    assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
    assert refused.headers["Retry-After"] == str(2 * (total - 30 + 1))  # one token in two seconds
    clock.now += 2 * (total - 30 + 1)
    assert asked(client).status_code == 200


def test_a_client_who_leaves_pays_for_what_was_generated(
    engine: ScriptedEngine, tmp_path: Path, clock: Clock
) -> None:
    client = client_of(
        engine, **with_keys(tmp_path, '[keys.alice]\nkey = "sk-alice"\ntokens_per_minute = 100000')
    )
    before = int(client.get("/v1/models", headers=ALICE).headers["x-ratelimit-remaining-tokens"])
    response = client.post(CHAT, json={**BODY, "stream": True}, headers=ALICE, buffered=False)
    response.close()
    after = int(client.get("/v1/models", headers=ALICE).headers["x-ratelimit-remaining-tokens"])
    assert after < before  # the prompt at least


def test_a_limit_that_is_changed_holds_at_once_and_forgets_nothing(
    engine: ScriptedEngine, tmp_path: Path, clock: Clock
) -> None:
    text = '[keys.alice]\nkey = "sk-alice"\nrequests_per_minute = {}'
    client = client_of(engine, **with_keys(tmp_path, text.format(3)))
    app: Any = client.application
    asked(client), asked(client)
    with_keys(tmp_path, text.format(10))
    app.api_keys.reload()
    assert asked(client).headers["x-ratelimit-remaining-requests"] == "7"
    with_keys(tmp_path, text.format(1))
    app.api_keys.reload()
    assert asked(client).status_code == 429
    with_keys(tmp_path, '[keys]\nalice = "sk-alice"')
    app.api_keys.reload()
    assert asked(client).status_code == 200


def test_a_limit_that_is_lowered_locks_nobody_out_for_what_the_old_one_allowed(
    engine: ScriptedEngine, clock: Clock
) -> None:
    limits = RateLimits(clock)
    high = ApiKey(name="alice", digest=b"", tokens_per_minute=100_000)
    low = ApiKey(name="alice", digest=b"", tokens_per_minute=1000)
    limits.charge(high, 50_000)
    limits.admit(low)
    assert dict(limits.headers(low))["x-ratelimit-remaining-tokens"] == "500"
    limits.charge(low, 1500)  # a minute's worth too much
    with pytest.raises(ApiError, match="try again in 61 s"):
        limits.admit(low)
    limits.admit(high)  # what was used is little of this
    assert dict(limits.headers(high))["x-ratelimit-remaining-tokens"] == "98000"


@pytest.fixture
def several(tmp_path: Path) -> Iterator[Client]:
    """A server of two models; alice may use those that begin with `small`, bob all."""
    engines: list[ScriptedEngine] = []

    def load(spec: ModelSpec, *_: Any) -> ScriptedEngine:
        engines.append(ScriptedEngine(lambda _: ANSWER, model_id=spec.name))
        return engines[-1]

    specs = [
        ModelSpec(name="large", source=str(tmp_path), aliases=("gpt-4o",)),
        ModelSpec(name="small-one", source=str(tmp_path), aliases=("mini",)),
    ]
    models = MultiModelRegistry(Catalogue(specs), load, EngineOptions(), Settings(), default_name="large")
    keys = with_keys(tmp_path, '[keys]\nbob = "b"\n[keys.alice]\nkey = "sk-alice"\nmodels = ["small-*"]')
    yield Client(App(models, Settings(**keys)))
    models.stop()
    for engine in engines:
        engine.stop()


def test_a_key_is_shown_its_models_and_no_others(several: Client) -> None:
    def listed(**headers: str) -> list[str]:
        return [each["id"] for each in several.get("/v1/models", headers=headers).get_json()["data"]]

    assert listed(**ALICE) == ["small-one", "mini"]
    assert listed(Authorization="Bearer b") == ["large", "gpt-4o", "small-one", "mini"]
    assert several.get("/", headers=ALICE).get_json()["models"] == ["small-one"]
    tags = several.get("/api/tags", headers=ALICE).get_json()["models"]
    assert [each["model"] for each in tags] == ["small-one:latest", "mini:latest"]
    studio = several.get("/api/v0/models", headers=ALICE).get_json()["data"]
    assert [each["id"] for each in studio] == ["small-one", "mini"]


@pytest.mark.parametrize("name", ["large", "gpt-4o", "nothing"])
def test_a_model_that_a_key_may_not_use_is_as_unknown_as_one_that_is_not_there(
    several: Client, name: str
) -> None:
    said = f"The model {name!r} does not exist, or your API key may not use it. It may use 'small-one'."
    answers = [
        asked(several, model=name),
        several.get(f"/v1/models/{name}", headers=ALICE),
        several.post(f"/v1/models/{name}/unload", headers=ALICE),
        several.post("/v1/embeddings", json={"model": name, "input": "x"}, headers=ALICE),
        several.post("/tokenize", json={"model": name, "prompt": "x"}, headers=ALICE),
    ]
    for answer in answers:
        assert answer.status_code == 404
        assert answer.get_json()["error"]["message"] == said
        assert answer.get_json()["error"]["code"] == "model_not_found"
    for path, body in (
        ("/api/chat", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/api/generate", {"keep_alive": 0}),
        ("/api/embed", {"input": "x"}),
        ("/api/show", {}),
        ("/api/pull", {}),
    ):
        answer = several.post(path, json={"model": name, **body}, headers=ALICE)
        assert answer.status_code == 404
        assert answer.get_json()["error"].startswith(f"model not found: {said}")


@pytest.mark.parametrize("name", [None, "default", "small-one", "mini"])
def test_a_key_is_answered_by_its_models_and_its_default_is_the_first_of_them(
    several: Client, name: str | None
) -> None:
    answer = asked(several, **({} if name is None else {"model": name}))
    assert answer.status_code == 200
    assert answer.get_json()["model"] == "small-one"


def test_of_a_model_of_another_type_no_other_models_are_named(several: Client) -> None:
    answer = several.post("/v1/embeddings", json={"model": "mini", "input": "x"}, headers=ALICE)
    assert answer.status_code == 400
    assert answer.get_json()["error"]["message"] == (
        "The model 'small-one' generates text; this address is for one that computes embeddings."
    )
    nothing = several.post("/v1/embeddings", json={"input": "x"}, headers=ALICE)
    assert nothing.status_code == 404
    assert nothing.get_json()["error"]["message"] == "Your API key may use no model that computes embeddings."


@pytest.mark.parametrize(
    ("headers", "wanted", "queued"),
    [
        ({"x-api-key": "a"}, None, 2),
        ({"x-api-key": "a"}, 3, 5),
        ({"x-api-key": "a"}, -9, 2),  # no key goes before its place
        ({"x-api-key": "b"}, -9, 0),
        ({"x-api-key": "everybody"}, -9, -9),  # one key for all says nothing of who may go first
    ],
)
def test_a_keys_priority_is_the_best_that_its_requests_get(
    tmp_path: Path, headers: dict[str, str], wanted: int | None, queued: int
) -> None:
    seen: list[GenerationRequest] = []

    class Engine(ScriptedEngine):
        def generate(self, request: GenerationRequest, *rest: Any) -> Any:
            seen.append(request)
            return super().generate(request, *rest)

    keys = with_keys(tmp_path, '[keys]\nbob = "b"\n[keys.alice]\nkey = "a"\npriority = 2')
    with Engine(lambda _: ANSWER) as engine:
        client = client_of(engine, api_key="everybody", **keys)
        fields = {} if wanted is None else {"priority": wanted}
        assert client.post(CHAT, json={**BODY, **fields}, headers=headers).status_code == 200
    (request,) = seen
    assert request.priority == queued
