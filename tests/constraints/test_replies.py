"""The demonstration model held to grammars, on the real engine: it reasons as ever and answers as it must."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from mlx_backend.constraints import Grammars, Spec
from mlx_backend.constraints.compiler import ReplyRules, Rule
from mlx_backend.constraints.vocabulary import Vocabulary
from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.conversation.events import Channel, Message
from mlx_backend.conversation.parser import ChannelParser, fold
from mlx_backend.demo import MODEL_PATH
from mlx_backend.engine.base import Finished, GenerationRequest, Sampling, TokenDelta
from mlx_backend.engine.jobs import Generation
from mlx_backend.engine.mlx import load_engine
from mlx_backend.engine.threaded import Engine
from mlx_backend.errors import EngineError

FRANCE = "What is the capital of France?"
OSLO = "What is the weather in Oslo?"


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "description": f"Calls {name}.", "parameters": parameters, "strict": True}
    return {"type": "function", "function": function}


CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
ROUTE = {
    "type": "object",
    "properties": {
        "to": {"enum": ["Rome", "Cairo"]},
        "stops": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["to", "stops"],
}
TOOLS = [tool("get_weather", CITY), tool("get_weather_map", ROUTE)]

SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"answer": {"type": "string", "maxLength": 20}}, "required": ["answer"]},
    {
        "type": "object",
        "properties": {"sure": {"type": "boolean"}, "of": {"enum": ["Paris", "Rome"]}},
        "required": ["of"],
    },
    {
        "type": "array",
        "items": {"type": "integer", "minimum": 1, "maximum": 30},
        "minItems": 2,
        "maxItems": 4,
    },
    {"type": "object", "properties": {"in": CITY, "by": ROUTE}, "required": ["by", "in"]},
    {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[A-Z][a-z]{2,6}$"}]},
    {
        "type": "object",
        "patternProperties": {"^[a-z]{1,8}$": {"type": "boolean"}},  # a free name may run to the limit
        "additionalProperties": False,
        "maxProperties": 1,
    },
    {"const": {"fixed": [1, "two", None]}},
    {"type": "number", "minimum": 0, "maximum": 1},
]


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Check a value against as much of JSON Schema as is used above."""
    kinds: dict[str, Any] = {
        "object": dict,
        "array": list,
        "string": str,
        "boolean": bool,
        "null": type(None),
    }
    match schema.get("type"):
        case "integer" | "number" as kind:
            right = isinstance(value, int if kind == "integer" else int | float) and not isinstance(
                value, bool
            )
            if not (right and schema["minimum"] <= value <= schema["maximum"]):
                return False
        case str() as kind:
            if not isinstance(value, kinds[kind]):
                return False
    if "anyOf" in schema and not any(fits(value, other) for other in schema["anyOf"]):
        return False
    if isinstance(value, str) and len(value) > schema.get("maxLength", 99):
        return False
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        return False
    if isinstance(value, list) and "items" in schema:
        if not schema["minItems"] <= len(value) <= schema["maxItems"]:
            return False
        if not all(fits(item, schema["items"]) for item in value):
            return False
    if isinstance(value, dict) and "type" in schema:
        named, other = schema.get("properties", {}), schema.get("additionalProperties")
        if not set(schema.get("required", ())) <= value.keys() or len(value) > schema.get(
            "maxProperties", 99
        ):
            return False
        patterns = schema.get("patternProperties", {})
        for name, inner in value.items():
            of_pattern = [found for pattern, found in patterns.items() if re.search(pattern, name)]
            allowed = named.get(name) or (of_pattern or [other])[0]
            if not allowed or not fits(inner, allowed):
                return False
    return value in schema.get("enum", [value]) and value == schema.get("const", value)


@dataclass
class Held:
    """The demonstration model, its grammars, and how to ask it."""

    engine: Engine
    grammars: Grammars

    def request(
        self,
        question: str,
        spec: Spec | None,
        *,
        tools: Sequence[dict[str, Any]] = (),
        effort: str = "low",
        seed: int = 0,
        temperature: float = 1.0,
        more: str = "",
        opens_in: Channel | None = None,
        begun: str = "",
    ) -> GenerationRequest:
        messages = [{"role": "user", "content": question}]
        text = self.engine.tokenizer.render(messages, list(tools) or None, reasoning_effort=effort)
        return GenerationRequest(
            prompt=self.engine.tokenizer.encode(text + more + begun, control_tokens=True),
            max_tokens=400,
            sampling=Sampling(temperature=temperature, seed=seed),
            constraint=None if spec is None else spec.start(opens_in, begun=begun),
        )

    def read(
        self, generation: Generation, tools: Sequence[str] = (), opens_in: Channel | None = None
    ) -> Message:
        parser = ChannelParser(
            "harmony", tools=tools, opens_in=opens_in, special_tokens=self.engine.tokenizer.special_tokens
        )
        events = []
        for item in generation:
            if isinstance(item, TokenDelta):
                events += parser.feed(item.text, item.token)
            elif isinstance(item, Finished):
                events += parser.close(item.reason)
        return fold(events)

    def ask(self, question: str, spec: Spec | None, **options: Any) -> Message:
        names = [each["function"]["name"] for each in options.get("tools", ())]
        generation = self.engine.generate(self.request(question, spec, **options))
        return self.read(generation, names, options.get("opens_in"))


@pytest.fixture(scope="module")
def demo() -> Iterator[Held]:
    with load_engine(MODEL_PATH) as engine:
        yield Held(engine, Grammars(engine.tokenizer, DIALECTS["harmony"]))


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_answers_fit_their_schema_whatever_is_drawn_and_reasoning_is_there(
    demo: Held, schema: dict[str, Any]
) -> None:
    spec = demo.grammars.json_schema(schema, strict=True)
    for seed in range(4):
        message = demo.ask(FRANCE, spec, seed=seed)
        assert message.finish == "stop"
        assert fits(json.loads(message.content), schema), message.content
        assert "capital of France" in message.reasoning


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"n": {"type": "string", "maxLength": 9}}, "required": ["n"]},
        {"required": ["n"]},
        {"additionalProperties": {"type": "boolean"}},
    ],
)
def test_a_schema_with_properties_and_no_type_is_an_objects(demo: Held, schema: dict[str, Any]) -> None:
    for seed in range(4):
        message = demo.ask(FRANCE, demo.grammars.json_schema(schema, strict=False), seed=seed)
        assert message.content.lstrip().startswith("{")


def test_what_the_model_knows_it_still_says(demo: Held) -> None:
    sentence = demo.grammars.regex("The .{5,30} is [A-Z][a-z]+\\.")
    assert demo.ask(FRANCE, sentence, temperature=0).content == "The capital of France is Paris."
    choice = demo.grammars.choice(
        [f"The capital of France is {city}." for city in ("London", "Paris", "Rome")]
    )
    assert demo.ask(FRANCE, choice, temperature=0).content == "The capital of France is Paris."


def test_effort_still_decides_how_long_it_reasons(demo: Held) -> None:
    spec = demo.grammars.json_object()
    lengths = [
        len(demo.ask(FRANCE, spec, effort=effort, temperature=0).reasoning)
        for effort in ("low", "medium", "high")
    ]
    assert lengths == sorted(lengths)
    assert lengths[0] * 4 < lengths[2]
    free = demo.ask(FRANCE, None, effort="high", temperature=0).reasoning
    assert demo.ask(FRANCE, spec, effort="high", temperature=0).reasoning == free


@pytest.mark.parametrize("name", ["get_weather", "get_weather_map"])
def test_a_named_call_is_made_though_nothing_asks_for_it(demo: Held, name: str) -> None:
    spec = demo.grammars.tool_calls(TOOLS, required=True, name=name)
    parameters = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}[name]
    for seed in range(4):
        message = demo.ask(FRANCE, spec, tools=TOOLS, seed=seed)
        [call] = message.tool_calls
        assert call.name == name
        assert call.complete
        assert fits(json.loads(call.arguments), parameters)
        assert message.finish == "tool_calls"
        assert message.reasoning


def test_a_required_call_is_the_models_choice(demo: Held) -> None:
    spec = demo.grammars.tool_calls(TOOLS, required=True)
    [call] = demo.ask(OSLO, spec, tools=TOOLS[:1], temperature=0).tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Oslo"})


def test_where_nothing_is_required_the_model_answers_and_calls_as_it_would(demo: Held) -> None:
    spec = demo.grammars.tool_calls(TOOLS[:1], required=False)
    for question in (FRANCE, OSLO):
        free = demo.ask(question, None, tools=TOOLS[:1], temperature=0)
        assert demo.ask(question, spec, tools=TOOLS[:1], temperature=0) == free
    both = spec | demo.grammars.json_schema(SCHEMAS[0], strict=True)
    assert demo.ask(OSLO, both, tools=TOOLS[:1], temperature=0).tool_calls == free.tool_calls
    assert fits(json.loads(demo.ask(FRANCE, both, tools=TOOLS[:1]).content), SCHEMAS[0])


def test_an_answer_that_is_continued_goes_on_to_the_schemas_end(demo: Held) -> None:
    begun = '{"answer": "Par'
    spec = demo.grammars.json_schema(SCHEMAS[0], strict=True)
    header = "<|channel|>final<|message|>"
    message = demo.ask(FRANCE, spec, more=header, begun=begun, opens_in=Channel.FINAL)
    assert fits(json.loads(begun + message.content), SCHEMAS[0])


def test_a_crowd_of_schemas_and_a_free_neighbour_do_not_disturb_each_other(demo: Held) -> None:
    specs = [*(demo.grammars.json_schema(schema, strict=True) for schema in SCHEMAS), None]
    alone = [demo.ask(FRANCE, spec, seed=seed) for seed, spec in enumerate(specs)]
    generations = [
        demo.engine.generate(demo.request(FRANCE, spec, seed=seed)) for seed, spec in enumerate(specs)
    ]
    assert [demo.read(generation) for generation in generations] == alone


def test_a_grammar_that_leads_nowhere_fails_its_own_reply_and_nobody_elses(demo: Held) -> None:
    never = Vocabulary(demo.engine.tokenizer).end_token  # it stands for the end, which is masked here
    nowhere = Spec(demo.grammars, ReplyRules(answer=Rule(f'start: "Well" <[{never}]>')))
    failing, other = (
        demo.engine.generate(demo.request(FRANCE, spec))
        for spec in (nowhere, demo.grammars.json_schema(SCHEMAS[0], strict=True))
    )
    with pytest.raises(EngineError, match="any further: no token of this model continues it from here"):
        list(failing)
    assert fits(json.loads(demo.read(other).content), SCHEMAS[0])
