"""One set of weights under several names: loaded once, with the settings of each name; and `NAME:EFFORT`."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pool_harness import GB, PoolHarness
from scripted_engine import HARMONY_TEMPLATE, ScriptedEngine
from scripted_server import ANSWER, CHAT, USER
from werkzeug.test import Client, TestResponse

from mlx_backend.engine.threaded import Engine
from mlx_backend.models.engine_options import EngineOptions
from mlx_backend.models.spec import ModelSpec
from mlx_backend.registry import config_file
from mlx_backend.registry.catalogue import Catalogue
from mlx_backend.registry.model_pool import DRAINING
from mlx_backend.registry.registry import MultiModelRegistry
from mlx_backend.server.app import App
from mlx_backend.settings import Settings

CONFIG = """
[models.plain]
model = "{folder}/weights"
aliases = ["gpt-4o"]

[models.deep]
model = "{folder}/weights"
reasoning_effort = "high"
temperature = 0.1
list_efforts = true

[models.long]
model = "{folder}/weights"
context_length = 5000

[models."qwen:high"]
model = "{folder}/other"

[models.qwen]
model = "{folder}/weights"
effort_budgets = {{ low = 77 }}
"""
KEYS = '[keys]\nbob = "b"\n[keys.alice]\nkey = "a"\nmodels = ["deep"]'


class Served:
    """A server of these models, whose engines are scripted."""

    def __init__(self, folder: Path, **chosen: Any) -> None:
        for name in ("weights", "other"):
            (folder / name).mkdir()
            (folder / name / "config.json").write_text('{"model_type": "gpt_oss"}')
            (folder / name / "chat_template.jinja").write_text(HARMONY_TEMPLATE)
            (folder / name / "model.safetensors").write_bytes(b"")
        read = config_file.parse(CONFIG.format(folder=folder), folder=folder)
        self.engines: dict[str, ScriptedEngine] = {}
        self.gate: threading.Event | None = None
        settings = Settings(**chosen)
        self.models = MultiModelRegistry(
            Catalogue(read.models), self.load, EngineOptions(), settings, default_name="plain"
        )
        self.client = Client(App(self.models, settings))

    def load(self, spec: ModelSpec, _options: EngineOptions, _progress: Callable[[float], None]) -> Engine:
        assert spec.name not in self.engines or not self.engines[spec.name].is_healthy()
        if self.gate is not None:
            assert self.gate.wait(60)
        self.engines[spec.name] = ScriptedEngine(lambda _: ANSWER, model_id=spec.name)
        return self.engines[spec.name]

    def ask(self, model: str, **fields: Any) -> TestResponse:
        return self.client.post(CHAT, json={"model": model, "messages": [USER], **fields})

    def effort(self, model: str, **fields: Any) -> str:
        response = self.ask(model, **fields)
        assert response.status_code == 200, response.get_data(as_text=True)
        return response.headers["x-mlx-backend-effort"]

    def refusal(self, model: str, **headers: str) -> str:
        response = self.client.post(CHAT, json={"model": model, "messages": [USER]}, headers=headers)
        assert response.status_code == 404
        assert response.get_json()["error"]["code"] == "model_not_found"
        text: str = response.get_json()["error"]["message"]
        return text

    def states(self, **headers: str) -> dict[str, str]:
        listed = self.client.get("/v1/models", headers=headers).get_json()["data"]
        return {each["id"]: each["state"] for each in listed}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    yield served
    served.models.stop()


def test_names_with_the_same_folder_and_engine_options_share_what_is_loaded(served: Served) -> None:
    answers = {
        name: served.ask(name).get_json()["model"] for name in ("deep", "plain", "gpt-4o", "qwen", "long")
    }
    assert answers == {"deep": "deep", "plain": "plain", "gpt-4o": "plain", "qwen": "qwen", "long": "long"}
    assert set(served.engines) == {"plain", "long"}
    assert len(served.engines["plain"].requests) == 4


def test_each_name_has_its_own_effort_sampling_and_budgets(served: Served) -> None:
    assert served.effort("plain") == "medium (default); level=medium"
    assert served.effort("deep") == "high (model default); level=high"
    assert served.effort("deep", reasoning_effort="low") == "low (reasoning_effort); level=low"
    warm, cold, _ = served.engines["plain"].requests
    assert (warm.request.sampling.temperature, cold.request.sampling.temperature) == (1.0, 0.1)
    assert "Reasoning: high" in cold.prompt


def test_loading_and_unloading_one_name_is_loading_and_unloading_all(served: Served) -> None:
    loaded = served.client.post("/v1/models/deep/load")
    assert (loaded.status_code, loaded.get_json()) == (200, {"model": "deep", "message": "It is loaded."})
    states = served.states()
    assert [states[name] for name in ("plain", "gpt-4o", "deep", "qwen", "long")] == ["ready"] * 4 + [
        "unloaded"
    ]
    health = served.client.get("/health").get_json()["models"]
    assert [(each["model"], each.get("shares")) for each in health] == [
        ("plain", None),
        ("deep", "plain"),
        ("qwen", "plain"),
    ]
    metrics = served.client.get("/metrics").get_data(as_text=True)
    assert 'mlx_backend_requests_running{model="plain"}' in metrics
    assert 'mlx_backend_requests_running{model="deep"}' not in metrics
    assert served.client.post("/v1/models/qwen/unload").get_json()["message"] == "It has been unloaded."
    assert set(served.states().values()) == {"unloaded"}


def test_what_cannot_be_loaded_in_time_says_how_far_it_is_by_the_name_that_was_asked_for(
    tmp_path: Path,
) -> None:
    served = Served(tmp_path, load_seconds=0)
    served.gate = threading.Event()
    refused = served.client.post("/v1/models/deep/load")
    assert refused.status_code == 503
    assert "'deep' is being loaded" in refused.get_json()["error"]["message"]
    assert refused.headers["retry-after"]
    assert served.client.post("/v1/models/nobody/load").status_code == 404
    served.gate.set()
    served.models.stop()


EFFORTS_IN_NAMES: list[tuple[str, dict[str, Any], str]] = [
    ("plain:high", {}, "high (model name); level=high"),
    ("gpt-4o:HIGH", {}, "high (model name); level=high"),
    ("deep:low", {}, "low (model name); level=low"),
    ("plain:none", {}, "none (model name); level=none; budget=0"),
    ("plain:high", {"reasoning_effort": "low"}, "low (reasoning_effort); level=low"),
    ("plain:high", {"enable_thinking": True}, "high (model name); level=high"),
    (
        "plain:high",
        {"messages": [{"role": "system", "content": "Reasoning: low"}, USER]},
        "low (system prompt); level=low",
    ),
]


def test_a_name_may_end_in_one_of_the_models_efforts(served: Served) -> None:
    for name, fields, header in EFFORTS_IN_NAMES:
        assert served.effort(name, **fields) == header, name
        assert len(served.engines) == 1


def test_a_name_that_holds_a_colon_itself_comes_first(served: Served) -> None:
    assert served.ask("qwen:high").get_json()["model"] == "qwen:high"
    assert served.effort("qwen:high:low") == "low (model name); level=low"
    assert set(served.engines) == {"qwen:high"}


@pytest.mark.parametrize("word", ["xhigh", "8b", "", "x" * 500])
def test_a_level_that_the_model_does_not_have_is_refused_with_those_it_has(served: Served, word: str) -> None:
    assert "plain:none, plain:low, plain:medium, plain:high" in served.refusal(f"plain:{word}")


@pytest.mark.parametrize("name", ["nobody:high", ":high", ":", "nobody:8b:high"])
def test_an_effort_makes_no_model_of_an_unknown_name(served: Served, name: str) -> None:
    assert f"{name!r} is not served here" in served.refusal(name)


def test_efforts_are_listed_as_names_only_where_that_is_switched_on(served: Served) -> None:
    names = ["deep", *(f"deep:{effort}" for effort in ("none", "low", "medium", "high"))]
    assert list(served.states()) == ["plain", "gpt-4o", *names, "long", "qwen:high", "qwen"]
    low = served.client.get("/v1/models/deep:low").get_json()
    assert (low["id"], low["root"], low["reasoning"]["default"]) == ("deep:low", "deep", "low")
    assert low == next(
        each for each in served.client.get("/v1/models").get_json()["data"] if each["id"] == "deep:low"
    )


def test_a_key_that_may_use_a_model_may_use_its_efforts_and_learns_of_no_other_name(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(KEYS)
    served = Served(tmp_path, api_key_file=tmp_path / "keys.toml")
    alice = {"Authorization": "Bearer a"}
    try:
        answer = served.client.post(CHAT, json={"model": "deep:low", "messages": [USER]}, headers=alice)
        assert answer.headers["x-mlx-backend-effort"].startswith("low (model name)")
        assert "deep:none, deep:low" in served.refusal("deep:huge", **alice)
        for name in ("plain", "plain:low", "plain:huge"):
            assert "It may use 'deep'." in served.refusal(name, **alice)
            assert served.client.post(f"/v1/models/{name}/load", headers=alice).status_code == 404
        assert "plain" not in served.client.get("/v1/models", headers=alice).get_data(as_text=True)
        assert "plain" not in served.client.get("/health", headers=alice).get_data(as_text=True)
        refused = served.client.post("/v1/models/deep/unload", headers=alice)
        assert "stays in memory: others use its weights" in refused.get_json()["error"]["message"]
        assert served.states(**alice)["deep"] == "ready"
    finally:
        served.models.stop()


def test_leases_by_any_name_keep_the_weights_and_the_longest_time_to_live_holds(
    harness: PoolHarness, tmp_path: Path
) -> None:
    harness.sizes |= {"one": 3 * GB, "big": 4 * GB}
    pool = harness.serve(
        ModelSpec(name="one", source="shared", ttl=10),
        ModelSpec(name="two", source="shared", ttl=50),
        ModelSpec(name="big", source="big"),
        memory_limit=5 * GB,
    )
    first, second = pool.acquire("two", 5), pool.acquire("one", 5)
    assert harness.loads == ["one"]
    assert [(status.name, status.in_use, status.shares) for status in pool.statuses()] == [
        ("one", 2, ""),
        ("two", 2, "one"),
        ("big", 0, ""),
    ]
    assert pool.unload("two") == DRAINING
    first.release()
    assert harness.status("one").state == "ready"
    second.release()
    harness.wait_for_state("two", "unloaded")
    pool.acquire("two", 5).release()
    harness.clock.advance(20)
    assert harness.status("one").state == "ready"
    pool.acquire("big", 5).release()
    assert harness.status("two").state == "unloaded", "it was in the way"
