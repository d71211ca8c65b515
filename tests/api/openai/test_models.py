"""Several models over HTTP: listed, loaded on demand, unloaded, and reported in /health."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from running_server import RunningServer, running, served
from scripted_engine import HARMONY_TEMPLATE, ScriptedEngine
from scripted_server import client_of

from mlx_backend.api.openai.codex_models import codex_model
from mlx_backend.chat.model_settings import ModelSettings
from mlx_backend.chat.service import Service
from mlx_backend.constraints.vocabulary import Vocabulary
from mlx_backend.conversation.effort import Effort
from mlx_backend.demo import MODEL_PATH
from mlx_backend.engine.mlx import load_engine
from mlx_backend.engine.threaded import Engine
from mlx_backend.errors import EngineError
from mlx_backend.models.description import ModelDescription
from mlx_backend.models.engine_options import EngineOptions
from mlx_backend.models.spec import ModelDefaults, ModelSpec
from mlx_backend.registry import config_file
from mlx_backend.registry.catalogue import Catalogue
from mlx_backend.registry.registry import MultiModelRegistry
from mlx_backend.settings import Settings

SOON = 60
CONFIG = """
[defaults]
temperature = 0.3

[models.small]
model = "{folder}/small"
aliases = ["gpt-4o"]
pinned = true

[models.large]
model = "{folder}/large"
reasoning_effort = "high"
reasoning_format = "think"
max_tokens = 77
"""


class EngineFactory:
    """Makes scripted engines in place of loading models; a gate blocks the load of the one that is named."""

    def __init__(self) -> None:
        self.engines: dict[str, ScriptedEngine] = {}
        self.loads: list[str] = []
        self.blocked: str | None = None
        self.gate = threading.Event()
        self.half = threading.Event()
        self.broken: set[str] = set()

    def load(self, spec: ModelSpec, _options: EngineOptions, on_progress: Callable[[float], None]) -> Engine:
        self.loads.append(spec.name)
        on_progress(0.5)
        self.half.set()
        if spec.name == self.blocked:
            assert self.gate.wait(SOON)
        if spec.name in self.broken:
            raise EngineError(f"The weights of {spec.name} are missing.")
        thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" if spec.name == "large" else ""
        answer = f"{thought}<|channel|>final<|message|>I am {spec.name}.<|return|>"
        self.engines[spec.name] = ScriptedEngine(lambda _: answer, model_id=spec.name)
        return self.engines[spec.name]


@pytest.fixture
def factory() -> EngineFactory:
    return EngineFactory()


@contextmanager
def serving(
    factory: EngineFactory, folder: Path, config: str = CONFIG, **chosen: Any
) -> Iterator[RunningServer]:
    for name in ("small", "large"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text("{}")
        (folder / name / "model.safetensors").write_bytes(b"")
    read = config_file.parse(config.format(folder=folder), folder=folder)
    settings = Settings(port=0, **chosen)
    catalogue = Catalogue(read.models, others=read.others)
    models = MultiModelRegistry(catalogue, factory.load, EngineOptions(), settings, default_name="small")
    try:
        models.preload()
        with served(models, settings) as server:
            yield server
    finally:
        factory.gate.set()
        models.stop()


def states(server: RunningServer) -> dict[str, str]:
    listed = server.call("/v1/models")[1]["data"]
    return {model["id"]: model["state"] for model in listed if "root" not in model}


def answer(server: RunningServer, **fields: Any) -> str:
    text: str = server.chat(**fields)["choices"][0]["message"]["content"]
    return text


def test_a_model_is_loaded_by_the_first_request_that_names_it(factory: EngineFactory, tmp_path: Path) -> None:
    with serving(factory, tmp_path) as server:
        assert states(server) == {"small": "ready", "large": "unloaded"}
        assert answer(server) == answer(server, model="gpt-4o") == "I am small."
        assert answer(server, model="large").endswith("I am large.")
        assert states(server) == {"small": "ready", "large": "ready"}
        assert factory.loads == ["small", "large"]


def test_each_model_has_defaults_of_its_own(factory: EngineFactory, tmp_path: Path) -> None:
    with serving(factory, tmp_path, temperature=0.9, max_tokens=99) as server:
        answers = {model: answer(server, model=model) for model in ("small", "large")}
        assert answers == {"small": "I am small.", "large": "<think>\nHm.\n</think>\n\nI am large."}
        [small], [large] = (factory.engines[name].requests for name in ("small", "large"))
        assert (small.request.sampling.temperature, small.request.max_tokens) == (0.3, 99)
        assert large.request.max_tokens == 77
        assert "Reasoning: medium" in small.prompt
        assert "Reasoning: high" in large.prompt


def test_background_requests_are_recognised_as_the_server_and_each_model_are_set(
    factory: EngineFactory, tmp_path: Path
) -> None:
    title = [{"role": "user", "content": "Generate a concise 3-7 word title for this conversation."}]
    config = CONFIG.replace('reasoning_effort = "high"', "background_detection = true")
    with serving(factory, tmp_path, config, background_detection=False) as server:
        for model in ("small", "large"):
            server.chat(title, model=model)
        [small], [large] = (factory.engines[name].requests for name in ("small", "large"))
        assert (small.request.priority, large.request.priority) == (0, 1)
        assert "Reasoning: medium" in small.prompt
        assert "Reasoning: low" in large.prompt


def test_an_alias_is_listed_like_the_model_it_stands_for(factory: EngineFactory, tmp_path: Path) -> None:
    with serving(factory, tmp_path) as server:
        listed = {model["id"]: model for model in server.call("/v1/models")[1]["data"]}
        assert list(listed) == ["small", "gpt-4o", "large"]
        assert listed["gpt-4o"] == listed["small"] | {"id": "gpt-4o", "root": "small"}
        assert "root" not in listed["small"]
        for name, model in listed.items():
            assert server.call(f"/v1/models/{name}") == (200, model)
        assert server.call("/v1/models/default") == (200, listed["small"])


def test_a_model_is_described_before_it_is_loaded(factory: EngineFactory, tmp_path: Path) -> None:
    with serving(factory, tmp_path, temperature=0.9) as server:
        (tmp_path / "large" / "chat_template.jinja").write_text(HARMONY_TEMPLATE)
        (tmp_path / "large" / "config.json").write_text('{"max_position_embeddings": 512}')
        _, large = server.call("/v1/models/large")
        assert large.pop("created") > 0
        levels = large["supported_reasoning_levels"]
        assert [level["effort"] for level in levels] == ["none", "low", "medium", "high"]
        assert all(level["description"] for level in levels)
        assert large == {
            "id": "large",
            "object": "model",
            "owned_by": "mlx-backend",
            "state": "unloaded",
            "type": "llm",
            "context_length": 512,
            "max_model_len": 512,
            "dialect": {
                "name": "harmony",
                "recognised_by": "the template has <|channel|>, <|message|>",
            },
            "capabilities": ["completion", "thinking", "tools"],
            "reasoning": {
                "efforts": ["none", "low", "medium", "high"],
                "default": "high",
                "preserved": False,
            },
            "supported_reasoning_levels": levels,
            "default_reasoning_level": "high",
            "sampling_defaults": {"temperature": 0.3},
            "info": {"meta": {"capabilities": {"builtin_tools": False, "vision": False}}},
            "default_max_tokens": 77,
        }
        assert factory.loads == ["small"], "nothing was loaded for it"


def test_efforts_that_are_budgets_are_listed_as_such_and_the_log_says_so(
    factory: EngineFactory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = CONFIG + "effort_budgets = {{ medium = 2000 }}\n"
    with serving(factory, tmp_path, config) as server:
        template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
        (tmp_path / "large" / "chat_template.jinja").write_text(template)
        _, large = server.call("/v1/models/large")
        assert large["reasoning"]["budgets"] == {"low": 1024, "medium": 2000}
        assert [level["description"] for level in large["supported_reasoning_levels"]] == [
            "Answers at once",
            "Reasons briefly: at most 1,024 tokens",
            "Reasons for a while: at most 2,000 tokens",
            "Reasons at length",
        ]
    assert not any("held to budgets" in message for message in caplog.messages), "it has levels of its own"
    with ScriptedEngine(lambda _: "", chat_template=template, model_id="thinker") as engine:
        Service(engine, ModelSettings.of(ModelDefaults(effort_budgets=((Effort.LOW, 500),)))).prepare()
    assert "The reasoning of thinker is held to budgets of tokens: low 500, medium 4,096." in caplog.messages


def test_while_a_model_loads_others_answer_and_health_shows_its_progress(
    factory: EngineFactory, tmp_path: Path
) -> None:
    factory.blocked = "large"
    with serving(factory, tmp_path, load_seconds=SOON) as server:
        factory.half.clear()
        waiting = threading.Thread(target=answer, args=(server,), kwargs={"model": "large"})
        waiting.start()
        assert factory.half.wait(SOON)
        assert answer(server, model="small") == "I am small."
        status, health = server.call("/health")
        assert (status, health["status"]) == (200, "ok"), "the default model is there"
        assert {"model": "large", "state": "loading", "percent": 50} in [
            {key: entry.get(key) for key in ("model", "state", "percent")} for entry in health["models"]
        ]
        factory.gate.set()
        waiting.join(SOON)
        assert factory.loads == ["small", "large"]


def test_a_request_that_will_not_wait_for_a_load_gets_a_retry_after(
    factory: EngineFactory, tmp_path: Path
) -> None:
    factory.blocked = "large"
    with serving(factory, tmp_path, load_seconds=0) as server:
        status, body = server.call("/v1/chat/completions", {"model": "large", "messages": [USER]})
        assert (status, body["error"]["code"]) == (503, "model_loading")
        assert "'large' is being loaded" in body["error"]["message"]
        assert body["error"]["percent"] in (0, 50)
        assert f"({body['error']['percent']} %)" in body["error"]["message"]
        assert f"again in {body['error']['retry_after']} s" in body["error"]["message"]


USER = {"role": "user", "content": "hello"}


def test_a_model_that_cannot_be_loaded_says_why(factory: EngineFactory, tmp_path: Path) -> None:
    factory.broken.add("large")
    with serving(factory, tmp_path) as server:
        status, body = server.call("/v1/chat/completions", {"model": "large", "messages": [USER]})
        assert status == 500
        assert body["error"]["message"] == "The weights of large are missing."
        assert answer(server) == "I am small."


def test_without_pinned_models_health_is_ok_even_if_one_failed(
    factory: EngineFactory, tmp_path: Path
) -> None:
    factory.broken.add("small")
    with serving(factory, tmp_path, CONFIG.replace("pinned = true", "")) as server:
        assert server.call("/v1/chat/completions", {"messages": [USER]})[0] == 500
        status, health = server.call("/health")
        assert (status, health["status"], health["models"][0]["state"]) == (200, "ok", "failed")
        assert health["models"][0]["detail"] == "The weights of small are missing."
        assert answer(server, model="large").endswith("I am large.")


def test_a_slash_in_a_models_name_may_be_percent_encoded() -> None:
    with ScriptedEngine([], model_id="org/name") as engine, running(engine) as server:
        body = server.call("/v1/models/org/name")
        assert body[0] == 200
        assert server.call("/v1/models/org%2Fname") == server.call("/v1/models/org%2fname") == body


def test_a_model_is_unloaded_on_request_unless_it_is_pinned(factory: EngineFactory, tmp_path: Path) -> None:
    with serving(factory, tmp_path) as server:
        answer(server, model="large")
        status, body = server.call("/v1/models/large/unload", {})
        assert (status, body["model"]) == (200, "large")
        assert "unloaded" in body["message"]
        while states(server)["large"] != "unloaded":  # the reply before it is given back after it was read
            pass
        assert states(server) == {"small": "ready", "large": "unloaded"}
        assert not factory.engines["large"].is_healthy()
        status, body = server.call("/v1/models/small/unload", {})
        assert (status, body["error"]["code"]) == (409, "model_pinned")
        answer(server, model="large")
        assert factory.loads == ["small", "large", "large"]


def test_an_unknown_model_is_refused_with_the_names_of_those_served(
    factory: EngineFactory, tmp_path: Path
) -> None:
    with serving(factory, tmp_path) as server:
        for name in ("nobody", "nobody/nothing", "../small", "/etc"):
            status, body = server.call("/v1/chat/completions", {"model": name, "messages": [USER]})
            assert status in (403, 404), name
            assert body["error"]["param"] == "model"
            assert server.call(f"/v1/models/{name}")[0] in (403, 404), name


def test_a_client_that_disconnects_releases_its_model(factory: EngineFactory, tmp_path: Path) -> None:
    with serving(factory, tmp_path) as server:
        with server.open(
            "/v1/chat/completions", {"model": "large", "messages": [USER], "stream": True}
        ) as stream:
            stream.readline()
        while (
            "in use" in (message := server.call("/v1/models/large/unload", {})[1]["message"])
            or "as soon" in message
        ):
            if states(server)["large"] == "unloaded":
                break
        assert states(server)["large"] == "unloaded"


def test_a_draining_server_refuses_new_requests_and_waits_for_those_in_flight(factory: EngineFactory) -> None:
    with (
        ScriptedEngine(lambda _: "<|channel|>final<|message|>All of it.<|return|>", gated=True) as engine,
        running(engine) as server,
        server.open("/v1/chat/completions", {"messages": [USER], "stream": True}) as stream,
    ):
        stream.readline()
        server.app.in_flight.drain()
        assert not server.app.in_flight.wait_until_idle(0)
        status, body = server.call("/v1/chat/completions", {"messages": [USER]})
        assert (status, body["error"]["code"]) == (503, "shutting_down")
        assert body["error"]["retry_after"] == 10
        status, health = server.call("/health")
        assert (status, health["status"]) == (503, "draining")
        engine.advance(20)
        assert "[DONE]" in stream.read().decode()
        assert server.app.in_flight.wait_until_idle(SOON)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_reply_cut_by_the_servers_shutdown_says_so(stream: bool) -> None:
    with (
        ScriptedEngine(lambda _: "<|channel|>final<|message|>All of it.<|return|>", gated=True) as engine,
        running(engine) as server,
        server.send({"messages": [USER], "stream": stream}) as connection,
    ):
        while not engine.requests:
            pass
        received = b""
        if stream:
            engine.advance(4)
            while b'"role"' not in received:
                received += connection.recv(4096)
        server.app.in_flight.drain()
        engine.stop()
        while b"}}" not in received[received.find(b'{"error"') :]:
            received += connection.recv(4096) or pytest.fail(f"It ended with {received!r}")
        tail = received[received.index(b'{"error"') :]
        error = json.loads(tail[: tail.index(b"}}") + 2])["error"]
    assert (error["code"], error["type"], error["retry_after"]) == ("shutting_down", "server_error", 10)
    assert error["message"].startswith("The server is shutting down")
    assert stream or received.startswith(b"HTTP/1.1 503 ")


def test_grammars_are_prepared_after_loading_and_not_by_the_first_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[Vocabulary] = []
    build = Vocabulary.build

    def noted(vocabulary: Vocabulary) -> None:
        build(vocabulary)
        built.append(vocabulary)

    monkeypatch.setattr(Vocabulary, "build", noted)
    spec = ModelSpec(name="demo", source=str(MODEL_PATH), pinned=True)

    def load(spec: ModelSpec, options: EngineOptions, on_progress: Callable[[float], None]) -> Engine:
        return load_engine(spec.source, options, model_id=spec.name, on_progress=on_progress)

    models = MultiModelRegistry(Catalogue([spec]), load, EngineOptions(), Settings(), default_name="demo")
    try:
        models.preload()
        for thread in threading.enumerate():
            if thread.name == "grammars":
                thread.join(SOON)
        assert len(built) == 1
    finally:
        models.stop()


def test_of_a_model_that_has_yet_to_be_downloaded_nothing_is_claimed(factory: EngineFactory) -> None:
    catalogue = Catalogue([ModelSpec(name="big", source="nobody/big")], allow_download=True)
    models = MultiModelRegistry(catalogue, factory.load, EngineOptions(), Settings(), default_name="big")
    try:
        with served(models, Settings(port=0)) as server:
            (model,) = server.call("/v1/models")[1]["data"]
    finally:
        factory.gate.set()
        models.stop()
    assert model["capabilities"] == []
    assert not {"context_length", "reasoning"} & model.keys()


@pytest.mark.parametrize("path", ["/v1/models", "/models"])
def test_the_model_is_listed(path: str) -> None:
    with ScriptedEngine([]) as engine:
        client = client_of(engine)
        (model,) = client.get(path).get_json()["data"]
        assert model["id"] == "scripted"
        assert model["context_length"] == 131072
        assert client.get(f"{path}/scripted").get_json() == model
        assert client.get(f"{path}/other").status_code == 404
        assert client.head(path).status_code == 200


def test_codex_reads_the_same_document(factory: EngineFactory, tmp_path: Path) -> None:
    with serving(factory, tmp_path) as server:
        (tmp_path / "large" / "chat_template.jinja").write_text(HARMONY_TEMPLATE)
        (tmp_path / "large" / "config.json").write_text('{"max_position_embeddings": 50000}')
        _, listed = server.call("/v1/models?client_version=0.169.0")
        assert [model["slug"] for model in listed["models"]] == [model["id"] for model in listed["data"]]
        assert [model["priority"] for model in listed["models"]] == [0, 1, 2]
        small, alias, large = listed["models"]
        assert alias == small | {"slug": "gpt-4o", "display_name": "gpt-4o", "priority": 1}
        assert (large["context_window"], large["truncation_policy"]["limit"]) == (50_000, 5_000)
        assert large["default_reasoning_level"] == "high"
        assert large["supported_reasoning_levels"][0] == {"effort": "none", "description": "Answers at once"}
        assert large["supports_reasoning_summaries"], "or Codex sends no effort"


@pytest.mark.parametrize(
    ("capabilities", "kind", "by_parallel_calls", "modalities", "taught"),
    [
        (("tools", "tool_choice", "vision"), "freeform", True, ["text", "image"], "`apply_patch` tool"),
        (("tools",), None, True, ["text"], "apply_patch <<'EOF'"),
        ((), None, False, ["text"], "apply_patch <<'EOF'"),
    ],
)
def test_codex_edits_by_a_tool_with_a_grammar_where_calls_are_held_to_it_and_by_a_command_elsewhere(
    capabilities: tuple[str, ...],
    kind: str | None,
    by_parallel_calls: bool,
    modalities: list[str],
    taught: str,
) -> None:
    model = codex_model("m", ModelDescription(capabilities=capabilities), 0)
    assert model["apply_patch_tool_type"] == kind
    assert model["supports_parallel_tool_calls"] is by_parallel_calls
    assert model["input_modalities"] == modalities
    assert taught in model["base_instructions"]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/scripted", "/v1/models/nothing"])
def test_clients_of_anthropic_get_its_shapes_by_their_header_in_errors_too(path: str) -> None:
    client = client_of(ScriptedEngine(["unused"]), api_key="secret")
    version = {"anthropic-version": "2023-06-01"}
    refused = client.get(path, headers=version).get_json()
    assert (refused["type"], refused["error"]["type"]) == ("error", "authentication_error")
    answer = client.get(path, headers=version | {"x-api-key": "secret"}).get_json()
    found = answer["data"][0] if "data" in answer else answer
    assert found["type"] == ("error" if path.endswith("nothing") else "model")
    assert (
        "object" in client.get(path, headers={"x-api-key": "secret"}).get_json() or found["type"] == "error"
    )
