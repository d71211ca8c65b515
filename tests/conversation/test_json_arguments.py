"""Arguments that a model writes as JSON, or nearly: what goes out, however they are cut, and when."""

from __future__ import annotations

import json
import random
import time
from itertools import combinations

import pytest

from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.conversation.events import EndedBy, ToolCall, ToolCallDelta, ToolCallEnd, ToolCallStart
from mlx_backend.conversation.json_arguments import JsonArguments, is_json_object, repair_arguments
from mlx_backend.conversation.parser import ChannelParser, fold

REPAIRED = {
    "nothing": ("", {}),
    "blanks": (" \n\t", {}),
    "the end of the object around them": (" }", {}),
    "null": ("null", {}),
    "Python's null": (" None ", {}),
    "an empty string": ('""', {}),
    "blanks in a string": ('" \\n "', {}),
    "null in a string": ('"null"', {}),
    "a line break in a string": ('{"text": "one\ntwo\r\nthree"}', {"text": "one\ntwo\r\nthree"}),
    "a tab and an escape character in a string": ('{"t": "a\tb\x1b[0m"}', {"t": "a\tb\x1b[0m"}),
    "a path of Windows": (r'{"p": "D:\work\my docs"}', {"p": r"D:\work\my docs"}),
    "half an escape": (r'{"p": "D:\users\u00e9\u12"}', {"p": "D:\\users\u00e9\\u12"}),
    "a regular expression": (r'{"r": "^\d{2}\.\w+\s"}', {"r": r"^\d{2}\.\w+\s"}),
    "a line that goes on": ('{"c": "make \\\n  all"}', {"c": "make \\\n  all"}),
    "an apostrophe that is escaped": (r'{"c": "echo \'hi\'"}', {"c": "echo 'hi'"}),
    "commas before brackets": ('{"a": [1, 2,], "b": {"c": 3, }\n,}', {"a": [1, 2], "b": {"c": 3}}),
    "Python's constants": ('{"a": True, "b": [None,False]}', {"a": True, "b": [None, False]}),
    "constants in capitals": ('{"a": TRUE, "b": NULL}', {"a": True, "b": None}),
    "Python's quotation marks": (
        """{'a': 'it\\'s "so"', 'b': ["x", '']}""",
        {"a": 'it\'s "so"', "b": ["x", ""]},
    ),
    "a template string of JavaScript": ('{"a": `say "hi"\n\\`x\\``}', {"a": 'say "hi"\n`x`'}),
    "keys without quotation marks": ('{a: 1, b_c : {$d: [2]}}', {"a": 1, "b_c": {"$d": [2]}}),
    "spelt line breaks around values": (r'{"lines": \n[1, 2]\n\n}', {"lines": [1, 2]}),
    "an object in a string": (r'"{\"a\": \"x\\ny\", \"b\": [1]}"', {"a": "x\ny", "b": [1]}),
    "a pair of surrogates in a string": (r'"{\"a\": \"\ud83d\ude00\"}"', {"a": "\U0001f600"}),
    "faults of an object in a string": ("\"{'a': True,}\"", {"a": True}),
    "an object in a string that is never closed": (r'"{\"a\": 1}', {"a": 1}),
    "an object in a string of Python": ("""'{"a": "b"}'""", {"a": "b"}),
    "an object in quotation marks": ('"{"a": "b"}"', {"a": "b"}),
    "brackets too many": ('{"a": 1}}]', {"a": 1}),
    "doubled braces": ('{{"a": {"b": 1}}}', {"a": {"b": 1}}),
    "a fence": ('```json\n{"a": 1}\n```', {"a": 1}),
    "the end of a fence": ('{"a": 1}\n```\n', {"a": 1}),
}  # fmt: skip

AS_WRITTEN = [
    '{"a": "he said "no" and left", "b": True,}',  # where does the string end?
    '{"a": "don\'t say "don\'t"", "b": \'c\'}',
    '{"a": {"b": 1, "c": 2}',  # where does the inner object end?
    '{"a": "x',
    '{"a": ',
    '{"a": 1,',
    '{"a": 1 "b": 2}',
    '{"a": [1, 2}, "b": True}',
    '{"a": yes}',
    '{"a": Nonesuch, "b": 1,}',
    '{"a" 1}',
    '{"a": NaN}',
    '{"a": 1} and more',
    '{"a": {{"b": 1}}}',
    "```python\nx = {'a': 1,}\n```",
    '{"a": 1}{"b": 2}',
    "print({'a': True,})\n",
    "    x = None\n",
    "nul",
    "[1, 2]",
    '"Paris"',
    "3",
]
SOUND = [
    "{}",
    ' { "a" : [ ] , "b":{ } }',
    r'{"path": "C:\new\table"}',  # JSON, though a path was meant
    r'{"a": "\u00e9\ud83d\"\\\/", "b": -1.5e+10}',
    '{"a": [true, false, null], "True": {"None": 0}}',
    '{"code": "if (a) {\\n\\t\'x\' + [1,]; // True,\\n}"}',
]


def read(*pieces: str) -> str:
    arguments = JsonArguments()
    return "".join(map(arguments.feed, pieces)) + arguments.finish()


def assert_read_as(text: str, expected: str) -> None:
    """However the text is cut."""
    assert repair_arguments(text) == expected
    assert read(*text) == expected
    for first, second in combinations(range(len(text) + 1), 2):
        assert read(text[:first], text[first:second], text[second:]) == expected, (first, second)


@pytest.mark.parametrize(("written", "meant"), REPAIRED.values(), ids=REPAIRED)
def test_what_is_plain_is_repaired(written: str, meant: object) -> None:
    assert json.loads(repair_arguments(written)) == meant
    assert_read_as(written, repair_arguments(written))
    assert repair_arguments(repair_arguments(written)) == repair_arguments(written)


@pytest.mark.parametrize("written", AS_WRITTEN)
def test_what_is_not_plain_stays_as_it_was_written(written: str) -> None:
    assert_read_as(written, written)
    assert not is_json_object(written)


@pytest.mark.parametrize("written", SOUND)
def test_json_stays_as_it_was_written(written: str) -> None:
    assert_read_as(written, written)
    assert is_json_object(written)


def test_random_text_is_read_alike_however_it_is_cut_and_json_is_never_changed() -> None:
    rng = random.Random(32)
    parts = [*"{}[]\"'\\,: \n\t1-a", "True", "null", "u12", "\\n", '{"a": ', "\\u00e9", "key"]
    for _ in range(3_000):
        text = rng.choice(["", "{", '{"a":', '"{']) + "".join(rng.choices(parts, k=rng.randrange(14)))
        whole = repair_arguments(text)
        assert read(*text) == whole, text
        size = rng.randrange(2, 5)
        assert read(*(text[at : at + size] for at in range(0, len(text), size))) == whole, text
        if is_json_object(text):
            assert whole == text.rstrip()


@pytest.mark.parametrize(
    "text",
    [
        "{" + "," * 50_000,
        '{"a": 1,' + " " * 50_000,
        "[" * 50_000,
        "{" + "a" * 50_000,
        '{"a": "' + "\\u12" * 12_000,
        '"' + '\\"' * 25_000,
        '"{' + '\\"a\\": 1, ' * 5_000,
        "{}" + "}" * 50_000,
        " " * 50_000,
    ],
    ids=lambda text: text[:9],
)
def test_hostile_text_is_read_in_linear_time_and_hardly_any_of_it_is_held(text: str) -> None:
    arguments = JsonArguments()
    held, started = 0, time.process_time()
    for at, character in enumerate(text):
        held += 1 - len(arguments.feed(character))
        assert at < 5 or held < 256 or text.startswith(('"{', "{}"))
    assert time.process_time() - started < 5


# in every dialect

BODY = '{"text": "WORDS"}'
WRITTEN = {
    name: text
    for name, dialect in DIALECTS.items()
    if dialect.calls is not None
    and BODY in (text := "".join(piece.text for piece in dialect.calls.encode("save", {"text": "WORDS"})))
}
TOOL = {"name": "save", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}}


def calls_of(dialect: str, text: str, *, ended_by: EndedBy = "stop") -> tuple[ToolCall, ...]:
    """The calls of a turn, which are the same character by character."""
    parser = ChannelParser(dialect, tools=[TOOL])
    whole = fold([*parser.feed(text), *parser.close(ended_by)])
    parser = ChannelParser(dialect, tools=[TOOL])
    assert fold([*(event for one in text for event in parser.feed(one)), *parser.close(ended_by)]) == whole
    assert not whole.content.strip()
    return whole.tool_calls


def test_the_dialects_of_json_are_known_by_how_they_write() -> None:
    assert {"harmony", "hermes-json", "mistral-list", "deepseek-v3", "apertus", "cohere"} < WRITTEN.keys()
    assert "qwen-xml" not in WRITTEN


@pytest.mark.parametrize("dialect", WRITTEN)
def test_faults_are_repaired_in_every_dialect(dialect: str) -> None:
    for written, meant in REPAIRED.values():
        if not (written.startswith("{") and written.endswith("}")):
            continue
        [call] = calls_of(dialect, WRITTEN[dialect].replace(BODY, written))
        assert json.loads(call.arguments) == meant, written


@pytest.mark.parametrize("dialect", WRITTEN)
@pytest.mark.parametrize("nothing", ["", " ", "null", '""', '" "', '"null"'])
def test_no_arguments_are_an_empty_object_in_every_dialect(dialect: str, nothing: str) -> None:
    if dialect == "apertus" and not nothing.strip():
        return  # its calls are nothing but a key and a value
    [call] = calls_of(dialect, WRITTEN[dialect].replace(BODY, nothing))
    assert call == ToolCall("save", "{}", id=call.id)


@pytest.mark.parametrize("dialect", WRITTEN)
def test_arguments_go_out_as_they_are_written(dialect: str) -> None:
    before, after = WRITTEN[dialect].split(BODY)
    parser = ChannelParser(dialect, tools=[TOOL])
    assert not any(isinstance(event, ToolCallDelta) for event in parser.feed(before))
    events = [parser.feed(character) for character in BODY]
    index = 0
    assert [event for event in events[0] if not isinstance(event, ToolCallStart)] == [
        ToolCallDelta(index, "{")
    ]
    assert events[1:-1] == [[ToolCallDelta(index, character)] for character in BODY[1:-1]]
    rest = [*events[-1], *parser.feed(after), *parser.close()]
    assert rest[:2] == [ToolCallDelta(index, "}"), ToolCallEnd(index)]


@pytest.mark.parametrize("dialect", WRITTEN)
def test_a_call_that_is_cut_stays_open(dialect: str) -> None:
    cut = WRITTEN[dialect].partition("RDS")[0]
    [call] = calls_of(dialect, cut, ended_by="length")
    assert call == ToolCall("save", '{"text": "WO', complete=False, id=call.id)


@pytest.mark.parametrize(
    "written",
    [
        '{"name": "save", "arguments": "{\\"text\\": \\"a\\"}"}',
        '{"id": "c1", "type": "function", "function": {"name": "save", "arguments": {"text": "a"}}}',
        "{'name': 'save', 'parameters': {'text': 'a'}}",
        '{"arguments": {"text": "a",}, "name": "save"}',
        '{"tool": "save", "input": {text: "a"}}',
        '{"name": "save", "text": "a"}',
    ],
)
def test_objects_of_calls_are_read_in_every_spelling(written: str) -> None:
    [call] = calls_of("hermes-json", f"<tool_call>\n{written}\n</tool_call>")
    assert (call.name, json.loads(call.arguments)) == ("save", {"text": "a"})
    several = f"<tool_call>[{written}, {written}]</tool_call>"
    assert [json.loads(call.arguments) for call in calls_of("hermes-json", several)] == [{"text": "a"}] * 2


@pytest.mark.parametrize("dialect", ["mistral-list", "llama3-json", "cohere", "apertus"])
def test_calls_in_a_list_go_out_one_after_the_other(dialect: str) -> None:
    first = WRITTEN[dialect].split(BODY)[0]
    item = first[first.index("{") :]
    after = WRITTEN[dialect].split(BODY)[1]
    separator = ", " if "[" in first.removeprefix("[TOOL_CALLS]") else "; "
    closed = "}" * (item.count("{"))
    text = f"{first}{BODY}{closed}{separator}{item}{BODY}{after}"
    assert [call.arguments for call in calls_of(dialect, text)] == [BODY, BODY]
