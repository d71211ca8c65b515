"""What a reply can be held to, what is refused and in which words, and that nothing takes for ever."""

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from byte_tokenizer import ByteTokenizer

from mlx_backend.constraints import GrammarError, Grammars, Spec, sandbox
from mlx_backend.constraints.compiler import ReplyRules, Rule
from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.conversation.events import Channel
from mlx_backend.engine.base import Constraint

TOKENIZER = ByteTokenizer(("</s>",), None)
END = 256


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, DIALECTS["plain"])


def accepted(spec: Spec, text: str) -> str:
    """Say as much of a text as may be said, and a full stop if it may end there."""
    return accepted_by(spec.start(), text)


def accepted_by(constraint: Constraint, text: str) -> str:
    for at, byte in enumerate([*text.encode(), END]):
        words = constraint.allowed_mask()
        assert words is not None
        if not words[byte >> 5] >> (byte & 31) & 1:
            return text.encode()[:at].decode()
        if byte != END:
            constraint.advance(byte)
    return text + "."


def test_any_object_is_a_json_object(grammars: Grammars) -> None:
    spec = grammars.json_object()
    for text in ("{}", '{"a": [1, 2.5e3, {"b": null}], "é": "\\u0001\\n"}'):
        assert accepted(spec, text) == text + "."
    assert accepted(spec, "[1]") == ""
    assert accepted(spec, '{"a": 01}') == '{"a": 0'


def test_white_space_is_a_blank_or_a_line_break_and_an_indentation(grammars: Grammars) -> None:
    spec = grammars.json_object()
    pretty = json.dumps({"a": [1, {"b": 2}], "c": {}}, indent=4)
    assert accepted(spec, pretty) == pretty + "."
    assert accepted(spec, "{\n\n") == "{\n"
    assert accepted(spec, "{  ") == "{ "
    assert accepted(spec, "{\n" + " " * 100) == "{\n" + " " * 40
    assert accepted(spec, "{} ") == "{}", "and none behind the answer"
    assert accepted(spec, " {}") == ""


def test_a_strict_object_has_the_properties_that_are_named(grammars: Grammars) -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "object", "properties": {"b": {"type": "integer"}}},
            "open": {"type": "object", "properties": {}, "additionalProperties": {"type": "integer"}},
        },
    }
    strict, loose = (grammars.json_schema(schema, strict=strict) for strict in (True, False))
    assert accepted(strict, '{"a": {"z": 1}}') == '{"a": {"'
    assert accepted(loose, '{"a": {"z": 1}}') == '{"a": {"z": 1}}.'
    assert accepted(strict, '{"open": {"z": 1}}') == '{"open": {"z": 1}}.'


def test_nothing_is_closed_where_that_would_shut_out_a_neighbour(grammars: Grammars) -> None:
    schema = {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]},
        ]
    }
    assert accepted(grammars.json_schema(schema, strict=True), '{"a": 1, "b": 2}') == '{"a": 1, "b": 2}.'


@pytest.mark.parametrize(
    ("make", "lawful", "other"),
    [
        (lambda g: g.choice(["ja", "ja doch", 'a"\n😀\\']), 'a"\n😀\\', "nein"),
        (lambda g: g.regex(r"^\d{3}/[a-zä]+$"), "123/xyä", "12/x"),
        (lambda g: g.regex("(?i)yes|no"), "NO", "maybe"),
    ],
    ids=["choice", "regex", "flags"],
)
def test_texts_of_other_kinds(
    grammars: Grammars, make: Callable[[Grammars], Spec], lawful: str, other: str
) -> None:
    assert accepted(make(grammars), lawful) == lawful + "."
    assert accepted(make(grammars), other) != other + "."


@pytest.mark.parametrize(("kind", "day"), [("time", ""), ("date-time", "2026-11-22T")])
def test_the_second_60_is_never_written_though_formats_allow_it(
    grammars: Grammars, kind: str, day: str
) -> None:
    moment = {"type": "string", "format": kind}
    schemas: list[dict[str, Any]] = [
        {"properties": {"at": moment}},
        {"properties": {"at": moment | {"pattern": "^[12]"}}},
        {"properties": {"at": {"anyOf": [moment, {"type": "null"}]}}},
        {"properties": {"at": {"$ref": "#/$defs/moment"}}, "$defs": {"moment": moment}},
    ]
    for schema in schemas:
        spec = grammars.json_schema({"type": "object", **schema}, strict=True)
        for text in ("12:30:59Z", "23:59:00.60+05:30"):
            assert accepted(spec, f'{{"at": "{day}{text}"}}').endswith("."), text
        for text in ("12:30:60Z", "23:59:60Z"):
            assert accepted(spec, f'{{"at": "{day}{text}"}}') == f'{{"at": "{day}{text[:6]}'
    named = grammars.json_schema({"const": {"format": kind, "at": "12:30:60Z"}}, strict=True)
    assert accepted(named, f'{{"format": "{kind}", "at": "12:30:60Z"}}').endswith(".")


def test_the_digits_of_a_second_come_to_an_end(grammars: Grammars) -> None:
    moment = {"type": "string", "format": "time"}
    spec = grammars.json_schema({"type": "object", "properties": {"at": moment}}, strict=True)
    start = '{"at": "12:30:59.'
    assert accepted(spec, f'{start}{"1" * 9}Z"}}').endswith(".")
    assert accepted(spec, start + "1" * 10) == start + "1" * 9


_REAL = {
    "date": ["2024-02-29", "2000-02-29", "2023-02-28", "2023-12-31", "0004-02-29"],
    "time": ["00:00:00Z", "23:59:59.9-05:30", "12:00:00.000001+14:00"],
    "date-time": ["2024-02-29T00:00:00Z", "1985-04-12T23:20:50.52Z", "1937-01-01T12:00:27.87+00:20"],
}
_UNREAL = {
    "date": ["2023-02-29", "1900-02-29", "2023-04-31", "2023-02-30", "2023-13-01", "2023-01-00", "2023-1-1"],
    "time": ["24:00:00Z", "12:60:00Z", "12:00:60Z", "12:00:00", "12:00:00.Z", "12:00:00+24:00"],
    "date-time": [
        *("2023-02-29T00:00:00Z", "1900-02-29T00:00:00Z", "2023-01-01T24:00:00Z", "2023-01-01T12:00:00.Z"),
        *("1990-12-31T23:59:60Z", "1990-12-31T15:59:60-08:00", "2023-01-01T12:00:00+0530"),
    ],
}


@pytest.mark.parametrize("kind", _REAL)
def test_dates_and_times_are_those_of_rfc_3339_that_exist(grammars: Grammars, kind: str) -> None:
    moment = {"type": "string", "format": kind}
    spec = grammars.json_schema({"type": "object", "properties": {"at": moment}}, strict=True)

    def is_possible(text: str) -> bool:
        value = f'{{"at": "{text}"}}'
        return accepted(spec, value) == f"{value}."

    assert [text for text in _REAL[kind] if not is_possible(text)] == []
    assert [text for text in _UNREAL[kind] if is_possible(text)] == []


@pytest.mark.parametrize(
    "beside",
    [
        {"maxLength": 64},
        {"minLength": 1, "maxLength": 1000},
        {"pattern": "^[012]"},
        {"pattern": "^[12].*[0-9Z]$", "maxLength": 64},
        {"pattern": "[0-9]", "allOf": [{"minLength": 4}, {"maxLength": 64}]},
        {"type": ["string", "null"], "maxLength": 64},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", _REAL)
def test_dates_and_times_may_have_a_pattern_and_a_length(
    grammars: Grammars, kind: str, beside: dict[str, Any]
) -> None:
    moment = {"type": "string", "format": kind} | beside
    spec = grammars.json_schema({"type": "object", "properties": {"at": moment}}, strict=True)
    real = next(text for text in _REAL[kind] if text.startswith("2") and not text.startswith("2000"))
    assert accepted(spec, f'{{"at": "{real}"}}').endswith(".")
    for text in (_UNREAL[kind][0], "x"):
        assert not accepted(spec, f'{{"at": "{text}"}}').endswith("."), text


def test_a_length_that_no_time_has_is_refused(grammars: Grammars) -> None:
    for kind, length in (("time", 8), ("date", 9), ("date-time", 19)):
        with pytest.raises(GrammarError, match="nothing can satisfy it"):
            grammars.json_schema({"type": "string", "format": kind, "maxLength": length}, strict=True)


def test_a_grammar_that_leads_nowhere_says_so(grammars: Grammars) -> None:
    spec = Spec(grammars, ReplyRules(answer=Rule(f"start: <[{END}]>")))
    with pytest.raises(GrammarError, match="no token of this model continues it from here"):
        spec.start().allowed_mask()


# -- refusals -----------------------------------------------------------------------------------------------


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "place", "words"),
    [
        ([], "", r"A JSON Schema is an object; \[\] is a list"),
        ({"properties": {"a": {"not": {}}}}, "/properties/a", 'the keyword "not"'),
        (
            {"properties": {"a/b": {"items": {"uniqueItems": True}}}},
            "/properties/a~1b/items",
            '"uniqueItems"',
        ),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"format": "int32", "type": "string"}}}, "/$defs/x", '"int32"'),
        ({"type": "sting"}, "", 'there is no type "sting"'),
        ({"items": {"$ref": "#/$defs/gone"}}, "/items", '"#/\\$defs/gone" does not exist'),
        ({"$ref": "https://example.com/s"}, "", "another document"),
        (
            {"anyOf": [{"type": "string", "pattern": "a(?=b)"}]},
            "/anyOf/0",
            r"pattern a\(\?=b\) is not valid",
        ),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "", "nothing can satisfy it: minLength"),
        ({"oneOf": [{"type": "string"}, {"const": "a"}]}, "", "use anyOf"),
        ({"const": float("nan")}, "", "NaN or Infinity"),
        ({"const": "\ud800"}, "", "half of a surrogate pair"),
        (nested(200), "", "more than 100 levels deep"),
        ({"enum": ["x" * 300_000]}, "", "at most 200000"),
        (
            {"properties": {f"p{at}": {} for at in range(501)}},
            "",
            "501 optional properties; at most 500",
        ),
    ],
)
def test_a_schema_that_cannot_be_held_to_says_what_is_wrong_and_where(
    grammars: Grammars, schema: Any, place: str, words: str
) -> None:
    with pytest.raises(GrammarError, match=words) as refusal:
        grammars.json_schema(schema, strict=True)
    assert refusal.value.pointer == place
    assert "\n" not in str(refusal.value)


def test_patterns_that_are_too_much_together_are_refused_in_words(grammars: Grammars) -> None:
    patterns = [
        {"pattern": f"^(a|b)*{letter}(a|b){{{at}}}$"} for letter, at in (("a", 19), ("a", 18), ("b", 17))
    ]
    with pytest.raises(GrammarError, match="too complex: whether a text can match all of its patterns"):
        grammars.json_schema({"type": "string", "allOf": patterns}, strict=False)


def test_a_schema_that_is_not_strict_says_what_of_it_is_ignored(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 3}}}}
    spec = grammars.json_schema(schema, strict=False)
    assert spec.ignored == ('The schema: the keyword "not" cannot be enforced here',)
    assert accepted(spec, '{"a": 3}') == '{"a": 3}.'
    schema = {"type": "object", "if": {}, "not": {}, "properties": {"a": {"type": "string", "format": "x"}}}
    assert grammars.json_schema(schema, strict=False).ignored == (
        'The schema: the keywords "if", "not" cannot be enforced here',
        'The schema: the format "x" cannot be enforced here',
    )
    [note] = grammars.json_schema({"oneOf": [{"type": "string"}, {"const": "a"}]}, strict=False).ignored
    assert note == "The schema: a oneOf is enforced as anyOf: a value may match several"


def test_a_schema_that_only_turns_in_a_circle_is_refused_when_the_reply_begins(grammars: Grammars) -> None:
    with pytest.raises(GrammarError, match="nothing can satisfy it"):
        grammars.json_schema({"$ref": "#"}, strict=True).start()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda g: g.choice([]), "1 to 10000 texts, not 0"),
        (lambda g: g.choice(["\udc00"]), "half of a surrogate pair"),
        (lambda g: g.regex("("), r"the pattern \( is not valid: unclosed group"),
        (lambda g: g.regex("a" * 300_000), "300000 characters"),
    ],
)
def test_other_grammars_are_refused_in_words_too(
    grammars: Grammars, make: Callable[[Grammars], Spec], words: str
) -> None:
    with pytest.raises(GrammarError, match=words):
        make(grammars)


# -- tools --------------------------------------------------------------------------------------------------


def tool(name: str, parameters: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


@pytest.fixture(scope="module")
def callers() -> Grammars:
    return Grammars(ByteTokenizer(("<|im_end|>", "<tool_call>", "</tool_call>"), None), DIALECTS["think"])


def test_tools_without_parameters_take_any_object(callers: Grammars) -> None:
    kinds: list[Any] = [None, {}, {"properties": {}}]
    for parameters in kinds:
        callers.tool_calls([tool("f", parameters)], required=True).start()


def test_parameters_that_nothing_can_be_held_to_refuse_only_a_strict_tool(callers: Grammars) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?!x)"}}}
    spec = callers.tool_calls([tool("f", {}), tool("g", odd)], required=True)
    [note] = spec.ignored
    assert note.startswith(
        "tools[1] (g): any object is accepted. tools[1] (g): its parameters at /properties/a cannot"
    )
    with pytest.raises(
        GrammarError, match=r"tools\[0\] \(g\): its parameters at /properties/a cannot be used"
    ):
        callers.tool_calls([tool("g", odd, strict=True)], required=True)


def test_a_call_needs_tools_to_be_called(callers: Grammars) -> None:
    with pytest.raises(GrammarError, match="the request has no tools"):
        callers.tool_calls([], required=True)
    with pytest.raises(GrammarError, match=r'There is no tool "h" to call; the request\'s tools: f, g'):
        callers.tool_calls([tool("f", {}), tool("g", {})], required=True, name="h")


# -- hostile schemas ----------------------------------------------------------------------------------------

HOSTILE: dict[str, dict[str, Any]] = {
    "patterns multiplied": {
        "allOf": [{"type": "string", "pattern": f".*a.{{{at}}}b.*"} for at in range(1, 30)]
    },
    "enums multiplied": {"allOf": [{"enum": list(range(9_000))}, {"enum": list(range(9_000))}]},
    "choices multiplied": {
        "allOf": [{"anyOf": [{"required": [f"a{at}"]}, {"required": [f"b{at}"]}]} for at in range(40)]
    },
    "references doubled": {
        "$ref": "#/$defs/d0",
        "$defs": {
            **{
                f"d{at}": {"allOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 2, "minLength": at} for at in range(40)
            },
            "d40": {"type": "string", "pattern": "a"},
        },
    },
    "a long multiple": {"type": "integer", "multipleOf": 10**9 + 7},
}


@pytest.mark.parametrize("schema", HOSTILE.values(), ids=HOSTILE)
def test_a_schema_that_would_take_for_ever_is_refused_in_seconds(
    grammars: Grammars, schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.2)
    with pytest.raises(GrammarError, match=r"too complex|nothing can satisfy"):
        grammars.json_schema(schema, strict=False).start()


def test_a_schema_that_becomes_too_much_work_in_mid_reply_fails_that_reply(grammars: Grammars) -> None:
    either = [{"properties": {f"{letter}{at}": {"const": 1}}} for at in range(8) for letter in "ab"]
    schema = {"type": "object", "allOf": [{"anyOf": either[at : at + 2]} for at in range(0, 16, 2)]}
    constraint = grammars.json_schema(schema, strict=True).start()
    with pytest.raises(GrammarError, match="cannot follow its grammar any further: it is too complex"):
        accepted_by(constraint, "{}")


def test_a_large_schema_that_people_mean_is_taken(grammars: Grammars) -> None:
    optional: dict[str, Any] = {f"p{at}": {"type": "string"} for at in range(300)}
    required: dict[str, Any] = {f"r{at}": {"enum": [f"{at} {of}" for of in range(10)]} for at in range(300)}
    texts = {"p7": "x", "p250": "y"}, {name: schema["enum"][3] for name, schema in required.items()}
    for properties, names, value in ((optional, [], texts[0]), (required, [*required], texts[1])):
        schema = {"type": "object", "properties": properties, "required": names}
        for indent in (None, 2):
            text = json.dumps(value, indent=indent)
            assert accepted(grammars.json_schema(schema, strict=True), text) == text + "."


# -- several threads ----------------------------------------------------------------------------------------


def test_many_replies_can_be_begun_at_once() -> None:
    grammars = Grammars(TOKENIZER, DIALECTS["plain"])
    said: dict[int, str] = {}

    def hold(at: int) -> None:
        said[at] = accepted(grammars.choice([f"answer {at % 3}"]), f"answer {at % 3}")

    threads = [threading.Thread(target=hold, args=(at,)) for at in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == {at: f"answer {at % 3}." for at in range(12)}


def test_a_reply_begins_afresh_each_time(grammars: Grammars) -> None:
    spec = grammars.choice(["one", "two"])
    assert accepted(spec, "one") == "one."
    assert accepted(spec, "two") == "two."
    assert spec.start(Channel.FINAL, begun="tw").allowed_mask() is not None
