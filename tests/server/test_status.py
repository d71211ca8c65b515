"""What the server says about itself, and logs about a reply."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
from scripted_engine import ScriptedEngine
from scripted_server import ANSWER, USER, answered, client_of

from mlx_backend import __version__, commit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from werkzeug.test import Client


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine(lambda _: ANSWER) as engine:
        yield engine


@pytest.fixture
def client(engine: ScriptedEngine) -> Client:
    return client_of(engine)


def test_health_and_home(client: Client) -> None:
    assert client.get("/health").get_json() == {
        "status": "ok",
        "server": "mlx-backend",
        "version": __version__,
        "commit": commit(),
        "models": [{"model": "scripted", "state": "ready", "running": 0, "waiting": 0}],
    }
    assert client.get("/").get_json()["name"] == "mlx-backend"


def test_every_list_and_every_model_gives_the_same_time_of_creation(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count(1_700_000_000)
    monkeypatch.setattr("time.time", lambda: next(seconds))
    client = client_of(engine)
    (listed,) = client.get("/v1/models").get_json()["data"]
    assert listed == client.get("/v1/models/scripted").get_json()
    assert listed == client.get("/models/scripted").get_json()


def test_the_log_line_says_what_a_request_was_and_cost(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    body = answered(client, reasoning_effort="high").get_json()
    (line,) = [r.getMessage() for r in caplog.records if body["id"] in r.getMessage()]
    usage = body["usage"]
    for part in (
        "model=scripted",
        "effort=high (reasoning_effort)",
        f"prompt={usage['prompt_tokens']} cached=0 completion={usage['completion_tokens']}",
        "tok/s",
        "finish=stop",
    ):
        assert part in line


def test_the_log_line_names_a_background_request(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    title = {"role": "user", "content": "Generate a concise 3-7 word title for this conversation."}
    for messages in ([title], [USER]):
        answered(client, messages=messages)
    first, second = [r.getMessage() for r in caplog.records if "finish=stop" in r.getMessage()]
    assert "effort=low (background request: Zed, title)" in first
    assert first.endswith("finish=stop priority=1")
    assert "effort=medium (default)" in second
    assert second.endswith("finish=stop")


def test_ready_says_whether_requests_may_be_sent_and_nothing_else(engine: ScriptedEngine) -> None:
    client = client_of(engine, api_key="k")
    ready = client.get("/ready")
    assert (ready.status_code, ready.get_json()) == (200, {"status": "ready"})
    app: Any = client.application
    app.in_flight.drain()
    draining = client.get("/ready")
    assert (draining.status_code, draining.get_json()) == (503, {"status": "draining"})


def test_a_server_whose_engine_has_stopped_is_not_ready(client: Client, engine: ScriptedEngine) -> None:
    engine.stop()
    stopped = client.get("/ready")
    assert (stopped.status_code, stopped.get_json()) == (503, {"status": "stopped"})
