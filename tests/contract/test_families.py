"""A tiny model of every family behind the real server: listed, loaded, told its effort, held to calls and formats.

The weights are random, so what is asserted is what the server holds whatever a model writes. Where a published chat
template is there, it is tried in the same way.
"""

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from families.layouts import CHATML, THINK
from families.tiny_models import FAMILIES, REAL_TEMPLATES, write_family
from harmony_data import HARMONY_DATA
from running_server import RunningServer, served
from tokenizers import Tokenizer

from mlx_backend.conversation.dialects import DIALECTS, detect
from mlx_backend.engine.mlx import load_engine
from mlx_backend.models.engine_options import EngineOptions
from mlx_backend.registry.catalogue import Catalogue
from mlx_backend.registry.registry import MultiModelRegistry
from mlx_backend.settings import Settings

TEMPLATES = HARMONY_DATA / "templates"
REAL = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            not (TEMPLATES / f"{name}.jinja").exists(),
            reason="the published chat templates are not here; set HARMONY_DATA to their folder",
        ),
    )
    for name in REAL_TEMPLATES
]
ASKED = [{"role": "user", "content": "How warm is it in Oslo?"}]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Paris"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "exact": {"type": "boolean"},
        "note": {"type": "string", "maxLength": 6},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Weather.", "parameters": WEATHER},
    },
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look.",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    },
]
FOREIGN = (
    *("[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|call|>", "<arg_key>", "<arg_value>"),
    *("<|START_ACTION|>", "<|tool_call_start|>", "<|python_tag|>"),
)
FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
WITHOUT_TOOLS = {"plain", "HuggingFaceTB-SmolLM3-3B", "deepseek-ai-DeepSeek-V3.1"}
"""Their templates take none, or not under the name `tools`."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every model's folder, under one."""
    root = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        write_family(root / name, name)
    write_family(root / "spelt", "qwen-xml", tokens=CHATML)
    write_family(root / "crowded", "qwen-xml", tokens=(*FAMILIES["qwen-xml"].tokens, *FOREIGN))
    write_family(root / "own-end", "qwen-xml", tokens=("<|stop|>", *THINK), ends=("<|stop|>",))
    for template, name in REAL_TEMPLATES.items():
        if (file := TEMPLATES / f"{template}.jinja").exists():
            write_family(root / template, name, file.read_text(encoding="utf-8"))
    return root


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    """One server for all of them, each loaded with its first request."""
    import mlx.core as mx

    def load(spec: Any, options: EngineOptions, on_progress: Any) -> Any:
        return load_engine(spec.source, options, model_id=spec.name, on_progress=on_progress)

    settings = Settings(port=0, temperature=0.0, max_queue=8)
    models = MultiModelRegistry(Catalogue([], models_dirs=[folder]), load, EngineOptions(), settings)
    mx.disable_compile()  # compiling the first kernel of each architecture takes seconds
    try:
        with closing(_Stopped(models)), served(models, settings) as server:
            yield server
    finally:
        mx.enable_compile()


class _Stopped:
    def __init__(self, models: MultiModelRegistry) -> None:
        self._models = models

    def close(self) -> None:
        self._models.stop()


def family_of(name: str) -> str:
    return name if name in FAMILIES else REAL_TEMPLATES.get(name, "qwen-xml")


def biases(folder: Path, name: str) -> dict[str, int]:
    """Have a model end what it can, and write no layout: its weights are random, and might never end."""
    ids = Tokenizer.from_file(str(folder / name / "tokenizer.json")).get_vocab()
    family = FAMILIES[family_of(name)]
    closing = re.compile(r"</|.*(?:end|END|suffix|close)")
    bias = {
        ids[letter]: -100 for letter in "ĠĊĉč"
    }  # blank, line break, tab, return, as a byte-level vocabulary has them
    bias |= {ids["]"]: 30} | {ids[text]: 60 for text in family.tokens if text in ids and closing.match(text)}
    bias |= {ids[text]: 100 for text in family.ends if text in ids}
    return {str(token): value for token, value in bias.items()}


def message_of(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """Fold a stream's deltas as a client does."""
    message: dict[str, Any] = {"content": None}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for field in ("content", "reasoning_content"):
            if field in delta:
                message[field] = (message.get(field) or "") + delta[field]
        for part in delta.get("tool_calls", ()):
            call = calls.setdefault(part["index"], {"name": "", "arguments": ""})
            for key, text in part["function"].items():
                call[key] += text
    return message | {"calls": [calls[index] for index in sorted(calls)]}


def check(arguments: dict[str, Any]) -> None:
    """Check them against WEATHER."""
    assert {"city", "days"} <= arguments.keys() <= {"city", "days", "exact", "note"}
    assert arguments["city"] in ("Oslo", "Paris")
    assert type(arguments["days"]) is int
    assert 1 <= arguments["days"] <= 9
    assert type(arguments.get("exact", True)) is bool
    assert len(arguments.get("note", "")) <= 6


def answer(server: RunningServer, name: str, *, is_streamed: bool = False, **fields: Any) -> dict[str, Any]:
    """The reply's only choice; if it is to be streamed too, that has to be the same."""
    fields = {"messages": ASKED, "model": name, "max_tokens": 400, **fields}
    [choice] = server.chat(**fields)["choices"]
    whole: dict[str, Any] = choice
    if not is_streamed:
        return whole
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    [*chunks] = [chunk["choices"][0] for chunk in server.chunks(**fields) if chunk["choices"]]
    folded = message_of([chunk["delta"] for chunk in chunks])
    assert folded["calls"] == calls
    assert (folded["content"] or "") == (message["content"] or "")
    assert folded.get("reasoning_content") == message.get("reasoning_content")
    assert chunks[-1]["finish_reason"] == choice["finish_reason"]
    return whole


def test_there_is_a_model_of_every_family_and_it_is_recognised() -> None:
    assert set(FAMILIES) == set(DIALECTS)
    for name, family in FAMILIES.items():
        assert detect(family.template, family.tokens).name == name


@pytest.mark.parametrize("name", [*FAMILIES, *REAL])
def test_the_list_has_the_templates_own_levels_and_each_reply_says_which_was_told(
    server: RunningServer, name: str
) -> None:
    status, listed = server.call(f"/v1/models/{name}")
    assert status == 200
    assert listed.pop("state") == "unloaded"
    efforts = listed.get("reasoning", {}).get("efforts", [])
    if name in FAMILIES:
        family = FAMILIES[name]
        assert tuple(efforts) == family.efforts
        assert listed.get("default_reasoning_level") == (family.default if efforts else None)
    has_tools = name not in WITHOUT_TOOLS
    assert {"structured_output"} | ({"tools", "tool_choice"} if has_tools else set()) <= {
        *listed["capabilities"]
    }
    assert has_tools or "tool_choice" not in listed["capabilities"]
    for effort in efforts or ["high"]:
        body = {"model": name, "messages": ASKED, "max_tokens": 1, "reasoning_effort": effort}
        with server.open("/v1/chat/completions", body) as response:
            told = response.headers["x-mlx-backend-effort"]
            reasoning = json.load(response).get("reasoning")
        said = f"{effort} (reasoning_effort)" + (f"; level={effort}" if efforts else "")
        assert told.partition("; budget=")[0] == said
        assert reasoning["effort"] == effort
        if efforts:
            assert reasoning["level"] == effort
            assert ("budget" in told) == (reasoning.get("budget") is not None)
            assert effort != "none" or told.endswith("budget=0")
    # Loading it changes nothing of what it says; what fits into memory is known only then.
    loaded = server.call(f"/v1/models/{name}")[1]
    assert loaded.pop("available_context") > 0
    assert loaded == listed | {"state": "ready"}


@pytest.mark.parametrize("name", [*FAMILIES, *REAL])
def test_a_call_that_is_required_comes_and_the_next_turn_has_it_with_its_result(
    server: RunningServer, folder: Path, name: str
) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "reasoning_effort": "none", "logit_bias": biases(folder, name)}
    choice = answer(server, name, tool_choice="required", **fields)
    assert choice["finish_reason"] == "tool_calls"
    assert not choice["message"].get("reasoning_content")
    assert not choice["message"]["content"]
    for call in choice["message"]["tool_calls"]:
        if call["function"]["name"] == "get_weather":
            check(json.loads(call["function"]["arguments"]))
        else:
            assert call["function"]["name"] == "look"

    named = {"type": "function", "function": {"name": "get_weather"}}
    fields["parallel_tool_calls"] = False
    is_streamed = name in FAMILIES  # a published template changes nothing of how a reply is read
    message = answer(server, name, tool_choice=named, is_streamed=is_streamed, **fields)["message"]
    [call] = message["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    arguments = json.loads(call["function"]["arguments"])
    check(arguments)

    result = {"role": "tool", "tool_call_id": call["id"], "content": "21 degrees"}
    history: dict[str, Any] = {"model": name, "messages": [*ASKED, message, result], "tools": TOOLS}
    _, tokenized = server.call("/tokenize", history)
    _, told = server.call("/detokenize", {"model": name, "tokens": tokenized["tokens"]})
    asked = told["prompt"].rfind(ASKED[0]["content"])
    called = told["prompt"].find("get_weather", asked)
    got = told["prompt"].rfind("21 degrees")
    assert 0 <= asked < called < got
    assert arguments["city"] in told["prompt"][called:got]
    answered = server.chat(**history, max_tokens=2, reasoning_effort="none")["choices"][0]
    assert answered["finish_reason"] in ("length", "stop")


@pytest.mark.parametrize("name", list(FAMILIES))
def test_an_answer_is_held_to_its_schema_behind_reasoning_of_any_length(
    server: RunningServer, folder: Path, name: str
) -> None:
    held: dict[str, Any] = {"response_format": FORMAT, "logit_bias": biases(folder, name)}
    choice = answer(server, name, is_streamed=True, **held, reasoning_effort="high", thinking_budget=4)
    assert choice["finish_reason"] == "stop"
    check(json.loads(choice["message"]["content"]))
    assert len(choice["message"].get("reasoning_content", "")) <= 4
    # With tools, the answer may also be a call.
    choice = answer(server, name, **held, tools=TOOLS, reasoning_effort="none")
    if choice["finish_reason"] == "stop":
        check(json.loads(choice["message"]["content"]))
    else:
        assert choice["message"]["tool_calls"]


@pytest.mark.parametrize("name", list(FAMILIES))
def test_without_tools_nothing_is_a_call_whatever_the_model_writes(
    server: RunningServer, folder: Path, name: str
) -> None:
    tokenizer = Tokenizer.from_file(str(folder / name / "tokenizer.json"))
    opens = {
        str(token): 100
        for text in FAMILIES[name].tokens
        if "call" in text.lower() or "action" in text.lower() or "tools" in text
        if (token := tokenizer.token_to_id(text)) is not None and text not in FAMILIES[name].ends
    }
    choice = answer(
        server,
        name,
        tools=TOOLS,
        tool_choice="none",
        logit_bias=opens,
        max_tokens=8,
        reasoning_effort="none",
    )
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] in ("length", "stop")


@pytest.mark.parametrize("name", ["spelt", "crowded"])
def test_a_vocabulary_with_fewer_markers_than_its_template_or_with_other_families_too(
    server: RunningServer, folder: Path, name: str
) -> None:
    fields: dict[str, Any] = {"reasoning_effort": "none", "logit_bias": biases(folder, name)}
    choice = answer(server, name, tools=TOOLS, tool_choice="required", is_streamed=True, **fields)
    assert choice["finish_reason"] == "tool_calls"
    choice = answer(server, name, response_format=FORMAT, is_streamed=True, **fields)
    check(json.loads(choice["message"]["content"]))
    tokenizer = Tokenizer.from_file(str(folder / name / "tokenizer.json"))
    for marker in FOREIGN if name == "crowded" else ():
        bias = {str(tokenizer.token_to_id(marker)): 100}
        free = answer(server, name, tools=TOOLS, logit_bias=bias, max_tokens=6, reasoning_effort="none")
        assert free["finish_reason"] == "length"
        assert "tool_calls" not in free["message"]


def test_a_turn_may_end_with_a_token_that_only_the_models_files_name(
    server: RunningServer, folder: Path
) -> None:
    _, listed = server.call("/v1/models/own-end")
    assert {"tool_choice", "structured_output"} <= set(listed["capabilities"])
    stop = Tokenizer.from_file(str(folder / "own-end" / "tokenizer.json")).token_to_id("<|stop|>")
    bias = biases(folder, "own-end") | {str(stop): 100}
    fields: dict[str, Any] = {"reasoning_effort": "none", "is_streamed": True, "logit_bias": bias}
    choice = answer(server, "own-end", tools=TOOLS, tool_choice="required", **fields)
    assert choice["finish_reason"] == "tool_calls"
    choice = answer(server, "own-end", response_format=FORMAT, **fields)
    assert choice["finish_reason"] == "stop"
    check(json.loads(choice["message"]["content"]))


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "banana"},
        {"properties": ["a"]},
        {"type": "object", "properties": {"a": 5}},
        {"$ref": "#/nowhere"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["qwen-xml", "hermes-json"])
def test_a_schema_that_is_none_holds_nothing_unless_it_is_strict(
    server: RunningServer, folder: Path, name: str, parameters: dict[str, Any]
) -> None:
    function = {"name": "look", "parameters": parameters}
    bias = biases(folder, name)
    fields: dict[str, Any] = {"tool_choice": "required", "reasoning_effort": "none", "logit_bias": bias}
    choice = answer(server, name, tools=[{"type": "function", "function": function}], max_tokens=60, **fields)
    # Any object fits, so one that goes on and on may have been cut; half a call is not sent.
    assert choice["finish_reason"] in ("tool_calls", "length")
    strict = {"type": "function", "function": {**function, "strict": True}}
    body = {"model": name, "messages": ASKED, "tools": [strict], "max_tokens": 60, **fields}
    status, answered = server.call("/v1/chat/completions", body)
    assert status in (200, 400)
    if status == 400:
        assert answered["error"]["param"] == "tools[0].function.parameters"
        assert "tools[0] (look): its parameters" in answered["error"]["message"]
