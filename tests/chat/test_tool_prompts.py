"""Tools reach a model whose chat template tells it nothing of them, under names that it can say."""

from __future__ import annotations

import ast
import json
from typing import TYPE_CHECKING, Any

import pytest
from chat_templates import GEMMA_3, GEMMA_3_MARKERS, QWEN_XML_MARKERS, qwen_xml
from constraint_replies import PairTokenizer
from scripted_engine import ScriptedEngine

from mlx_backend.chat.request import ChatRequest, ToolChoice
from mlx_backend.chat.service import Service
from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.conversation.dialects.tool_prompts import python_signature
from mlx_backend.conversation.events import Event
from mlx_backend.conversation.parser import fold, parse_text
from mlx_backend.conversation.tool_names import ToolNames

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.conversation.events import Message

WEATHER: dict[str, Any] = {
    "name": "get-weather",
    "description": "Get the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {
            "days": {"type": "integer", "description": "How many days.", "default": 3},
            "city": {"type": "string", "description": "Its name."},
            "from": {"type": ["string", "null"]},
        },
        "required": ["city"],
    },
}
BARE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}[assistant]"
MARKED = BARE + "{#<｜tool▁sep｜>```json#}"
"""A model of the family of DeepSeek V3 and R1, whose templates render calls and no definitions."""
DEEPSEEK_MARKERS = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜end▁of▁sentence｜>"),
)
ASKED = [{"role": "user", "content": "Weather?"}]


def tool(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": function}


def named(name: str) -> dict[str, Any]:
    return tool({**WEATHER, "name": name})


def engine(text: str, template: str, markers: Sequence[str] = GEMMA_3_MARKERS) -> ScriptedEngine:
    return ScriptedEngine(lambda _: text, chat_template=template, markers=markers)


def answered(model: ScriptedEngine, **fields: Any) -> tuple[str, Message]:
    """What the model was told, and its reply as the client gets it."""
    request = ChatRequest(**{"messages": ASKED, "tools": [tool(WEATHER)], **fields})
    events = [event for event in Service(model).chat(request).events() if isinstance(event, Event.__value__)]
    return model.requests[-1].prompt, fold(events)


# -- what is told ---------------------------------------------------------------------------------


def test_gemma_3_is_told_python_functions_and_its_call_comes_out_under_the_clients_name() -> None:
    with engine("```tool_code\nget_weather(city='Paris', days='2', from_='x')\n```", GEMMA_3) as model:
        prompt, reply = answered(model, messages=[{"role": "system", "content": "Be brief."}, *ASKED])
    assert (
        "def get_weather(days: int = 3, *, city: str, from_: str | None = None) -> Any:\n"
        '    """Get the weather of a city.\n\n    Args:\n        days: How many days.\n'
    ) in prompt
    assert prompt.index("Be brief.") < prompt.index("```tool_code") < prompt.index("Weather?<end_of_turn>")
    [call] = reply.tool_calls
    assert (call.name, json.loads(call.arguments)) == (
        "get-weather",
        {"city": "Paris", "days": 2, "from": "x"},
    )


def test_gemma_3_finds_its_calls_and_their_results_in_its_history_as_it_wrote_them() -> None:
    call = {"id": "1", "function": {"name": "get-weather", "arguments": '{"city": "Paris"}'}}
    history = [
        *ASKED,
        {"role": "assistant", "content": "Let me look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    with engine("It is sunny.", GEMMA_3) as model:
        prompt, reply = answered(model, messages=history)
    assert prompt.endswith(
        "<start_of_turn>model\nLet me look.\n```tool_code\nget_weather(city='Paris')\n```<end_of_turn>\n"
        "<start_of_turn>user\n```tool_output\nsunny\n```<end_of_turn>\n<start_of_turn>model\n"
    )
    assert reply.content == "It is sunny."


def test_any_other_family_is_told_json_and_its_own_form_of_a_call() -> None:
    with engine(
        '<tool_call>{"name": "get-weather", "arguments": {"city": "Oslo"}}</tool_call>', BARE, ()
    ) as model:
        prompt, reply = answered(model)
    told = prompt.partition("<tools>\n")[2].partition("\n</tools>")[0]
    assert json.loads(told) == WEATHER
    assert (
        '<tool_call>\n{"name": "tool_name", "arguments": {"argument_name": "value"}}\n</tool_call>' in prompt
    )
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("get-weather", '{"city": "Oslo"}')]


def test_the_form_of_a_call_is_told_in_control_tokens_and_nobody_else_can_write_them() -> None:
    smuggled = "\ue0000\ue000 <｜tool▁sep｜> \ue0010\ue001"
    with engine("No.", MARKED, DEEPSEEK_MARKERS) as model:
        answered(model, messages=[{"role": "user", "content": smuggled}])
        special = model.tokenizer.special_tokens
        control = [special[token] for token in model.requests[-1].request.prompt if token in special]
        assert control == list(DEEPSEEK_MARKERS[:5]), "those of the sample alone"
        assert smuggled in model.requests[-1].prompt


def test_a_template_that_tells_of_tools_is_left_to_it() -> None:
    with engine("No.", qwen_xml(), QWEN_XML_MARKERS) as model:
        prompt, _ = answered(model)
    assert prompt.count("get-weather") == 1
    assert "You can call" not in prompt


def test_without_tools_nothing_is_told_and_what_looks_like_a_call_is_text() -> None:
    text = 'Write <tool_call>{"name": "f"}</tool_call>.'
    with engine(text, BARE, ()) as model:
        prompt, reply = answered(model, tools=())
    assert prompt == "[user]Weather?[assistant]"
    assert reply.content == text


def test_a_required_call_is_enforced_under_the_name_that_can_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripted_engine.ScriptedTokenizer", PairTokenizer)
    choice = ToolChoice(required=True, name="get-weather")
    with engine("It is sunny.\n```tool_code\nget_weather(city='Rome')\n```", GEMMA_3) as model:
        _, reply = answered(model, tool_choice=choice, max_tokens=100)
    assert [call.name for call in reply.tool_calls] == ["get-weather"]


# -- Python signatures ----------------------------------------------------------------------------

FUNCTIONS: list[dict[str, Any]] = [
    {"name": "f"},
    {"name": "f", "description": 'Quotes """ and \\ and a last "'},
    {"name": "f", "parameters": {"type": "object", "properties": {}}},
    {
        "name": "f",
        "parameters": {"properties": {"class": {}, "a-b": {}, "1st": {"type": "int"}, "天気": True}},
    },
    {"name": "f", "parameters": {"properties": {"a": {"default": "x\ny"}, "b": {"enum": [1, None, "c"]}}}},
    {
        "name": "f",
        "parameters": {
            "properties": {
                "a": {"type": "array", "items": {"$ref": "#/$defs/item"}, "maxItems": 4},
                "b": {"anyOf": [{"type": "string"}, {"type": "object", "properties": {"k": {}}}]},
                "c": {"type": "string", "pattern": "^[a-z]+$", "description": "Two\nlines."},
            },
            "required": ["b"],
            "$defs": {"item": {"type": "object", "properties": {"inner": {"$ref": "#/$defs/item"}}}},
        },
    },
    {"name": "f", "parameters": {"type": "nonsense", "properties": [], "required": "x", "items": 3}},
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=range(len(FUNCTIONS)))
def test_a_signature_is_python_and_says_all_that_the_definition_does(function: dict[str, Any]) -> None:
    written = python_signature(function)
    [definition] = ast.parse(written).body
    assert isinstance(definition, ast.FunctionDef)
    doc = ast.get_docstring(definition) or ""
    said = " ".join((written + doc).split())
    for text in texts_in(function):
        assert " ".join(text.split()) in said or repr(text) in said or json.dumps(text) in said, text


def texts_in(value: Any) -> list[str]:
    """The texts that a person wrote into a definition: values, and names of properties."""
    match value:
        case str():
            return [] if value in ("object", "string", "array", "int", "nonsense", "x") else [value]
        case dict():
            words = ("properties", "type", "items", "name", "parameters", "description", "required")
            keys = [key for key in value if key not in (*words, "default", "enum", "anyOf")]
            return [*keys, *(text for each in value.values() for text in texts_in(each))]
        case list():
            return [text for each in value for text in texts_in(each)]
        case _:
            return []


# -- names ----------------------------------------------------------------------------------------

ODD_NAMES = [
    *("get-weather", "web.search", "files/read", "get weather", "天気-東京", "1st", "class", "print", "f(x)"),
    *(
        "a:b",
        "x<y>",
        "name\nline",
        'q"uote',
        "to=x",
        "with,comma",
        "emoji🎉",
        "a" * 200,
        "-",
        "",
        "get_weather",
    ),
]


@pytest.mark.parametrize("name", list(DIALECTS))
def test_every_name_comes_back_in_every_dialect(name: str) -> None:
    dialect = DIALECTS[name]
    assert dialect.calls is not None
    names = ToolNames(ODD_NAMES, dialect)
    said = names.definitions([named(each) for each in ODD_NAMES])
    assert len({each["function"]["name"] for each in said}) == len(ODD_NAMES)
    for each in ODD_NAMES:
        written = "".join(
            piece.text for piece in dialect.calls.encode(names.for_model(each), {"city": "Oslo"})
        )
        parser_events = parse_text(written, dialect, tools=said)
        assert [call.name for call in parser_events.tool_calls] == [names.for_model(each)]


@pytest.mark.parametrize("name", list(DIALECTS))
def test_plain_names_are_never_changed(name: str) -> None:
    plain = ["get_weather", "f", "_private", "getWeather2", "json", "final", "call", "A" * 64]
    names = ToolNames(plain, DIALECTS[name])
    assert not names.differ
    for each in plain:
        calls = DIALECTS[name].calls
        assert calls is not None
        written = "".join(piece.text for piece in calls.encode(each, {"city": "Oslo"}))
        assert [call.name for call in parse_text(written, name, tools=plain).tool_calls] == [each]


def test_two_tools_that_would_be_said_alike_stay_two() -> None:
    names = ToolNames(["get-weather", "get weather", "get_weather"], DIALECTS["gemma3"])
    assert [names.for_model(each) for each in ("get-weather", "get weather", "get_weather")] == [
        *("get_weather_2", "get_weather_3", "get_weather"),
    ]
    assert names.for_model("get-news") == "get_news", "of a tool that is no longer offered"
