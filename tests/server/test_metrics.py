"""/metrics: what requests add to it, who may see it, and that clients cannot make it grow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import ScriptedEngine, Transcript
from scripted_server import CHAT, USER, answered, client_of, streamed
from single_model import SingleModelRegistry
from werkzeug.test import Client

from mlx_backend.chat.service import Service
from mlx_backend.device.memory import MemoryBudget
from mlx_backend.errors import EngineError, EngineFailed
from mlx_backend.server.app import App
from mlx_backend.server.metrics import TokenClock
from mlx_backend.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

type Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

REPLY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Paris.<|return|>"
)


def samples_of(client: Client, **headers: str) -> Samples:
    response = client.get("/metrics", headers=headers)
    assert response.status_code == 200
    assert response.mimetype == "text/plain"
    return {
        (sample.name.removeprefix("mlx_backend_"), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.get_data(as_text=True))
        for sample in family.samples
    }


def status_of(client: Client, path: str, body: dict[str, Any] | None = None, **headers: str) -> int:
    """The status of a response that is read to its end: then its request is counted."""
    with client.open(path, method="POST" if body else "GET", json=body, headers=headers) as response:
        response.get_data()
        return response.status_code


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((name, frozenset(labels.items())), 0)


def test_replies_are_counted_by_outcome_with_their_tokens_and_times() -> None:
    with ScriptedEngine(lambda _: REPLY) as engine:
        client = client_of(engine)
        usage = answered(client, reasoning_effort="low").get_json()["usage"]
        assert streamed(client, reasoning_effort="low")
        found = samples_of(client)
    assert value(found, "requests_total", outcome="stop", key="") == 2
    own = {"model": "scripted", "key": ""}
    assert value(found, "decode_tokens_total", **own) == 2 * usage["completion_tokens"]
    prompts = value(found, "prefill_tokens_total", **own) + value(found, "cached_tokens_total", **own)
    assert prompts == 2 * usage["prompt_tokens"]
    reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    assert reasoning > 0
    assert value(found, "reasoning_tokens_total", model="scripted", effort="low") == 2 * reasoning
    assert value(found, "time_to_first_token_seconds_count", model="scripted") == 2
    assert 0 < value(found, "inter_token_seconds_count", model="scripted") < 2 * usage["completion_tokens"]
    assert value(found, "requests_running", model="scripted") == 0
    assert value(found, "prewarmed_tokens_total", model="scripted") == 0


def test_refusals_are_counted_by_reason() -> None:
    with ScriptedEngine(lambda _: REPLY) as engine:
        client = client_of(engine)
        assert status_of(client, CHAT, {"messages": []}) == 400
        assert status_of(client, CHAT, {"messages": [USER], "model": "none"}) == 404
        assert status_of(client, "/nowhere") == 404
        found = samples_of(client)
    assert value(found, "requests_total", outcome="refused", key="") == 3
    assert value(found, "requests_refused_total", reason="model_not_found", key="") == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "reason"), [(EngineFailed("It broke."), "engine_failed"), (EngineError("No."), "engine")]
)
def test_a_reply_that_fails_is_an_error_with_its_reason_whether_it_is_streamed_or_not(
    failure: EngineError, reason: str, stream: bool
) -> None:
    with ScriptedEngine(
        lambda _: Transcript(text=REPLY.removesuffix("<|return|>"), failure=failure)
    ) as engine:
        client = client_of(engine)
        status = status_of(client, CHAT, {"messages": [USER], "stream": stream})
        found = samples_of(client)
    assert status == 200 if stream else status >= 500
    assert value(found, "requests_total", outcome="error", key="") == 1
    assert value(found, "requests_refused_total", reason=reason, key="") == 1
    assert value(found, "decode_tokens_total", model="scripted", key="") > 0


def test_there_is_a_series_for_what_is_counted_and_none_for_when_that_began() -> None:
    with ScriptedEngine(lambda _: REPLY) as engine:
        client = client_of(engine)
        answered(client)
        names = {name for name, _ in samples_of(client)}
    assert "requests_total" in names
    assert not [name for name in names if name.endswith("_created")]


def test_the_page_is_as_long_as_before_whatever_clients_send_and_monitors_are_not_counted() -> None:
    with ScriptedEngine(lambda _: REPLY) as engine:
        client = client_of(engine)
        status_of(client, "/nowhere")
        status_of(client, CHAT, {"messages": [USER], "model": "a"})
        before = samples_of(client)
        for number in range(20):
            status_of(client, f"/nowhere/{number}")
            status_of(client, CHAT, {"messages": [USER], "model": f"model-{number}", "user": f"u{number}"})
            status_of(client, "/health")
        after = samples_of(client)
    assert after.keys() == before.keys()
    assert value(after, "requests_total", outcome="refused", key="") == 42


def test_with_keys_it_needs_one_and_names_them() -> None:
    with ScriptedEngine(lambda _: REPLY) as engine:
        client = client_of(engine, api_keys=(("alice", "right"),))
        assert status_of(client, "/metrics") == 401
        assert status_of(client, "/v1/models") == 401
        headers = {"Authorization": "Bearer right"}
        assert status_of(client, CHAT, {"messages": [USER]}, **headers) == 200
        found = samples_of(client, **headers)
    assert value(found, "requests_total", outcome="stop", key="alice") == 1
    assert value(found, "requests_total", outcome="refused", key="") == 1
    assert value(found, "requests_refused_total", reason="invalid_api_key", key="") == 1


def test_a_key_sees_its_own_requests_and_models_and_the_key_of_all_clients_sees_everything(
    tmp_path: Path,
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[keys]\nalice = "a"\n[keys.bob]\nkey = "b"\nmodels = ["another"]')
    with ScriptedEngine(lambda _: REPLY) as engine:
        client = client_of(engine, api_key="all", api_key_file=file)
        alice, bob, everybody = ({"Authorization": f"Bearer {key}"} for key in ("a", "b", "all"))
        assert status_of(client, CHAT, {"messages": [USER]}, **alice) == 200
        assert status_of(client, CHAT, {"messages": [USER]}, **bob) == 404
        seen = [samples_of(client, **headers) for headers in (alice, bob, everybody)]
    for samples, keys, models in zip(
        seen, ({"alice"}, {"bob"}, {"alice", "bob"}), ({"scripted"}, set(), {"scripted"}), strict=True
    ):
        labels = [dict(each) for _, each in samples]
        assert {each["key"] for each in labels if each.get("key")} == keys
        assert {each["model"] for each in labels if "model" in each} == models
        assert value(samples, "process_resident_memory_bytes") > 0


def test_memory_is_what_is_reserved_now_and_what_is_used() -> None:
    budget = MemoryBudget(1000, used=lambda: 200)
    with ScriptedEngine(lambda _: REPLY) as engine:
        client = Client(App(SingleModelRegistry(Service(engine)), Settings(), memory=budget))
        reservation = budget.reserve(300)
        found = samples_of(client)
        assert value(found, "memory_bytes", kind="limit") == 1000
        assert value(found, "memory_bytes", kind="reserved") == 300
        assert value(found, "memory_bytes", kind="used") == 200
        assert value(found, "memory_bytes", kind="host_cache_limit") == 10
        assert value(found, "memory_bytes", kind="host_caches") == 0
        reservation.close()
        assert value(samples_of(client), "memory_bytes", kind="reserved") == 0


def test_two_applications_count_for_themselves() -> None:
    with ScriptedEngine(lambda _: REPLY) as engine:
        one, other = client_of(engine), client_of(engine)
        answered(one)
        assert value(samples_of(other), "requests_total", outcome="stop", key="") == 0


def test_tokens_that_come_together_share_the_time_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1.0, 2.0, 5.0])
    monkeypatch.setattr("mlx_backend.server.metrics.time.perf_counter", lambda: next(now))
    times: list[float] = []
    clock = TokenClock(times.append)
    for tokens in (0, 1, 2, 2, 5):
        clock.advance(tokens)
    assert times == [1.0, 1.0, 1.0, 1.0]
