"""What the plugin declares of its predefined models is what the server finds, reads and does with each of them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from harmony_data import HARMONY_DATA
from predefined_templates import FAMILIES, PredefinedFamily
from running_server import RunningServer, running
from vision_models import MIXTURES, WRITERS

from dify_mlx_provider.packaging.predefined import MODELS, Predefined, declaration
from mlx_backend.chat.capabilities import ModelFacts, describe
from mlx_backend.chat.model_settings import ModelSettings
from mlx_backend.conversation.dialects import detect
from mlx_backend.conversation.events import ReasoningDelta, ToolCallEnd, ToolCallStart
from mlx_backend.conversation.parser import ChannelParser, parse_text
from mlx_backend.engine.mlx import load_engine
from mlx_backend.models.description import ModelDescription
from mlx_backend.models.files import context_length
from mlx_backend.models.spec import RECOMMENDED_MODELS

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
ANSWER = {
    "type": "json_schema",
    "json_schema": {
        "name": "city",
        "schema": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
every_model = pytest.mark.parametrize("model", MODELS, ids=[model.model for model in MODELS])


def found_in(template: str, family: PredefinedFamily) -> ModelDescription:
    facts = ModelFacts(
        template=template,
        control_tokens=family.markers,
        vocabulary_size=512,
        context_length=context_length(family.config),
    )
    return describe(facts, ModelSettings.of())


def features_of(found: ModelDescription) -> set[str]:
    """Dify's words for what the server can do with a model, without what it sees: that hangs on what is installed."""
    features = {
        "thinking": {"agent-thought"},
        "tools": {"tool-call", "stream-tool-call"},
        "structured_output": {"structured-output"},
    }
    return set().union(*(features.get(capability, ()) for capability in found.capabilities))


def assert_declared(model: Predefined, family: PredefinedFamily, found: ModelDescription) -> None:
    declared = declaration(model)
    assert set(declared["features"]) - {"vision"} == features_of(found)
    assert model.sees == (family.config["model_type"] in WRITERS | MIXTURES or model.model == "default")
    assert model.model == "default" or declared["model_properties"]["context_size"] == found.context_length
    [rule] = [rule for rule in declared["parameter_rules"] if rule["name"] == "reasoning_effort"]
    assert rule["default"] == found.default_effort
    # mlx-backend can switch off the reasoning of any model; a declaration holds for every server.
    assert [effort for effort in found.efforts if effort != "none" or "none" in rule["options"]] == rule[
        "options"
    ]


def test_the_list_is_default_and_the_models_that_the_server_recommends() -> None:
    assert [model.model for model in MODELS] == ["default", *(each.repository for each in RECOMMENDED_MODELS)]
    assert len(MODELS) <= 8, "a short list: every entry is a switch on Dify's page"


@every_model
def test_a_declaration_says_what_the_server_finds_in_the_familys_template(model: Predefined) -> None:
    family = FAMILIES[model.model]
    assert_declared(model, family, found_in(family.template, family))


@every_model
def test_and_in_the_real_one(model: Predefined) -> None:
    family = FAMILIES[model.model]
    real = HARMONY_DATA / family.real_template
    if not family.real_template or not real.exists():
        pytest.skip("its real chat template is not here; HARMONY_DATA names the folder")
    assert_declared(model, family, found_in(real.read_text(encoding="utf-8"), family))


@every_model
def test_reasoning_and_calls_are_read_as_declared(model: Predefined) -> None:
    family = FAMILIES[model.model]
    dialect = detect(family.template, family.markers)
    message = parse_text(dialect.example, dialect, tools=[WEATHER])
    assert message.reasoning == "I need the weather."
    [call] = message.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris", "days": 3})
    parser = ChannelParser(dialect, tools=[WEATHER])
    pieces = [type(event) for letter in dialect.example for event in parser.feed(letter)]
    pieces += [type(event) for event in parser.close()]
    assert pieces.index(ReasoningDelta) < pieces.index(ToolCallStart) < pieces.index(ToolCallEnd)


KINDS = {id(family): model for model, family in FAMILIES.items()}


@pytest.fixture(scope="module", params=KINDS.values())
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningServer, list[Predefined]]]:
    """A model of a family's architecture, with random weights, on the real server; and what is declared of it."""
    family = FAMILIES[request.param]
    folder = family.write(tmp_path_factory.mktemp("model"))
    with running(load_engine(folder)) as server:
        yield server, [model for model in MODELS if FAMILIES[model.model] is family]


def ask(server: RunningServer, **fields: Any) -> Any:
    [choice] = server.chat([{"role": "user", "content": "the quick brown fox"}], **fields)["choices"]
    return choice


def test_the_engine_runs_what_is_declared(served: tuple[RunningServer, list[Predefined]]) -> None:
    server, models = served
    [listed] = server.call("/v1/models")[1]["data"]
    for model in models:
        assert model.model == "default" or listed["context_length"] == model.context_size
        assert listed["reasoning"]["default"] == model.default_effort
        for effort in model.efforts:
            assert ask(server, reasoning_effort=effort, max_tokens=4)["finish_reason"]
    said = ask(server, reasoning_effort="none", response_format=ANSWER, max_tokens=200)["message"]
    assert json.loads(said["content"])["city"] in ("Paris", "Rome")
    assert not said.get("reasoning_content")
    chunks = server.chunks(
        [{"role": "user", "content": "fox"}],
        tools=[WEATHER],
        tool_choice="required",
        thinking_budget=4,
        parallel_tool_calls=False,
        max_tokens=400,
    )
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0]["name"] == "get_weather"
    arguments = json.loads("".join(call.get("arguments", "") for call in calls))
    assert (arguments["city"] in ("Paris", "Rome"), arguments["days"] in (1, 2)) == (True, True)
