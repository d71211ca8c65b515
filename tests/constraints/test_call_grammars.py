"""Whatever the grammar of a family's calls allows, its reader reads as calls of offered tools that fit them.

EVERY_SPLIT=1 writes 40 random replies for each grammar in place of 8.
"""

import codecs
import json
import os
import random
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
from byte_tokenizer import ByteTokenizer
from constraint_replies import choices

from mlx_backend.constraints import GrammarError, Grammars, Spec, can_require_calls
from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.conversation.dialects.block_format import BlockCalls
from mlx_backend.conversation.dialects.calls.elements import NAMESPACE
from mlx_backend.conversation.events import Channel, Message
from mlx_backend.conversation.parser import ChannelParser, fold
from mlx_backend.engine.base import Constraint

END = "<|im_end|>"
SEEDS = 40 if os.environ.get("EVERY_SPLIT") else 8
ENFORCED = [name for name, dialect in DIALECTS.items() if name != "harmony" and can_require_calls(dialect)]
# Each family's control tokens, as far as its calls have some; the others have none here, and spell their markers.
CONTROL: dict[str, tuple[str, ...]] = {
    "qwen-xml": ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    "glm": (
        *("<think>", "</think>", "<tool_call>", "</tool_call>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "mistral": ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"),
    "mistral-list": ("[THINK]", "[/THINK]", "[TOOL_CALLS]"),
    "mistral-ids": ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "hunyuan-a13b": ("<think>", "</think>", "<tool_calls>", "</tool_calls>"),
    "kimi-k2": (
        *("<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    "kimi-k3": ("<|open|>", "<|close|>", "<|sep|>"),
    "deepseek-v3.1": (
        *("<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    ),
    "deepseek-v3": (
        *("<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    ),
    "dsml": ("<think>", "</think>", "｜DSML｜"),
    "minimax-m2": ("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
    "minimax-m3": ("<mm:think>", "</mm:think>", "]<]minimax[>["),
    "gemma4": ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "llama3-json": ("<|python_tag|>",),
    "hermes-json": ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>", "<|tools_prefix|>", "<|tools_suffix|>"),
    "granite": ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    "hunyuan": ("<think>", "</think>", "<tool_calls>", "</tool_calls>", "<tool_call>", "</tool_call>"),
    "cohere": (
        *("<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>"),
        *("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
}

JSON_STRINGS = {
    *(
        "mistral",
        "kimi-k2",
        "deepseek-v3",
        "deepseek-v3.1",
        "llama3-json",
        "hermes-json",
        "cohere",
        "apertus",
    ),
    *("granite", "hunyuan-a13b", "mistral-list", "mistral-ids"),
}


def tool(name: str, properties: dict[str, Any], *required: str, strict: bool = True) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": name, "parameters": parameters, "strict": strict},
    }


POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "on": {"type": "boolean"}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOLS = [
    tool("get_weather", {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}}, "city"),
    tool(
        "plot",
        {
            "label": {"type": "string", "minLength": 1, "maxLength": 8},
            "größe": {"type": "integer"},
            "points": {"type": "array", "items": POINT, "minItems": 1, "maxItems": 3},
            "origin": POINT,
            "is_open": {"type": "boolean"},
            "note": {"type": ["string", "null"]},
        },
        "points",
        "is_open",
    ),
    tool("look", {}),
]
BY_NAME = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Check a value against as much of JSON Schema as is used above."""
    if "enum" in schema:
        return value in schema["enum"]
    match schema["type"]:
        case "string":
            return isinstance(value, str) and schema.get("minLength", 0) <= len(value) <= schema.get(
                "maxLength", 1e9
            )
        case "integer":
            return type(value) is int and schema.get("minimum", value) <= value <= schema.get(
                "maximum", value
            )
        case "boolean":
            return isinstance(value, bool)
        case "array":
            return 1 <= len(value) <= 3 and all(fits(item, schema["items"]) for item in value)
        case "object":
            named = schema["properties"]
            return (
                isinstance(value, dict)
                and {*schema["required"]} <= value.keys() <= named.keys()
                and all(fits(item, named[key]) for key, item in value.items())
            )
        case _:  # a text or null
            return value is None or isinstance(value, str)


@lru_cache(maxsize=64)
def grammars_of(name: str, *, has_tokens: bool = True) -> tuple[ByteTokenizer, Grammars]:
    tokenizer = ByteTokenizer((END, *(CONTROL.get(name, ()) if has_tokens else ())), None)
    return tokenizer, Grammars(tokenizer, DIALECTS[name])


def hints_of(name: str) -> list[bytes]:
    """Return what the family writes between values, first what closes one, and markup that must not end one."""
    codec = DIALECTS[name].calls
    assert isinstance(codec, BlockCalls)
    written = "".join(piece.text for piece in codec.encode("plot", {"label": "\0", "note": "\1"}))
    closer = written.partition("\0")[2].partition("note")[0]
    closer = NAMESPACE if closer.startswith(NAMESPACE) else closer[: closer.find(">") + 1] or closer
    texts = [
        closer,
        written.partition("\1")[2],
        written.partition("plot")[0],
        *sorted(codec.markers),
        "<parameter=note>",
    ]
    return [text.encode() for text in texts if text]


class Allowed(NamedTuple):
    """The tokens of a mask, by what they are to `write_randomly`."""

    all: list[int]
    markers: list[int]
    structure: list[int]
    readable: list[int]

    @classmethod
    @lru_cache(maxsize=4096)
    def of(cls, mask: bytes) -> "Allowed":
        bits = int.from_bytes(mask, "little")
        found = [token for token in range(bits.bit_length()) if bits >> token & 1]
        return cls(
            found,
            markers=[token for token in found if token > 255],
            structure=[token for token in found if token < 128 and chr(token) in "<\"}])'\n"],
            readable=[token for token in found if 32 <= token < 127],
        )


def write_randomly(
    tokenizer: ByteTokenizer, constraint: Constraint, rng: random.Random, hints: list[bytes]
) -> list[int]:
    """Write allowed tokens at random, and now and then as much of a hint as is allowed."""
    written: list[int] = []
    pending: list[int] = []
    [end] = tokenizer.encode(END, control_tokens=True)
    while not written or written[-1] != end:
        mask = constraint.allowed_mask()
        assert isinstance(mask, memoryview)
        allowed = Allowed.of(mask.tobytes())
        assert allowed.all, tokenizer.decode(written)
        if pending and pending[0] in allowed.all:
            token = pending.pop(0)
        else:
            is_long = len(written) > 120
            hint = hints[0] if is_long else rng.choice(hints)
            pending = list(hint) if rng.random() < (0.5 if is_long else 0.1) else []
            if end in allowed.markers and (is_long or rng.random() < 0.3):
                token = end
            elif allowed.markers and rng.random() < 0.3:
                token = rng.choice(allowed.markers)
            elif pending and pending[0] in allowed.all:
                token = pending.pop(0)
            elif allowed.structure and rng.random() < (0.7 if is_long else 0.2):
                token = rng.choice(allowed.structure)
            else:
                is_readable = allowed.readable and rng.random() < 0.9
                token = rng.choice(allowed.readable if is_readable else allowed.all)
        written.append(token)
        constraint.advance(token)
        assert len(written) < 6_000, tokenizer.decode(written)[-300:]
    return written


def message_of(
    tokenizer: ByteTokenizer, name: str, written: list[int], opens_in: Channel | None = None
) -> Message:
    parser = ChannelParser(name, tools=TOOLS, opens_in=opens_in, special_tokens=tokenizer.special_tokens)
    characters = codecs.getincrementaldecoder("utf-8")("replace")
    events = []
    for token in written:
        marker = tokenizer.special_tokens.get(token)
        if marker:
            characters.reset()
        events += parser.feed(marker or characters.decode(tokenizer.bytes_of(token)), token)
    return fold([*events, *parser.close()])


def check_calls(message: Message, *, names: set[str] | None = None) -> None:
    assert message.finish == "tool_calls"
    assert not message.content.strip()
    for call in message.tool_calls:
        assert call.name in (names or BY_NAME)
        arguments = json.loads(call.arguments)
        assert fits(arguments, BY_NAME[call.name]), (call.name, arguments)


def test_the_families_whose_calls_can_be_enforced() -> None:
    assert {*DIALECTS} - {*ENFORCED} == {"harmony"}, "which has a machine of its own, see test_harmony"


@pytest.mark.parametrize("name", ENFORCED)
def test_whatever_a_family_may_write_is_read_as_calls_that_fit_their_schemas(name: str) -> None:
    # In a JSON string nothing is forbidden: what is markup there has to be a control token, as it is in these families.
    for has_tokens in [True] if name in JSON_STRINGS else [True, False] if name in CONTROL else [False]:
        tokenizer, grammars = grammars_of(name, has_tokens=has_tokens)
        spec = grammars.tool_calls(TOOLS, required=True)
        hints = hints_of(name)
        for seed in range(SEEDS):
            written = write_randomly(tokenizer, spec.start(Channel.FINAL), random.Random(seed), hints)
            message = message_of(tokenizer, name, written, Channel.FINAL)
            try:
                check_calls(message)
            except (AssertionError, ValueError):
                raise AssertionError((seed, tokenizer.decode(written), message)) from None


@pytest.mark.parametrize("name", ENFORCED)
def test_one_call_of_the_tool_that_is_named(name: str) -> None:
    tokenizer, grammars = grammars_of(name)
    spec = grammars.tool_calls(TOOLS, required=False, name="get_weather", parallel=False)
    for seed in range(3):
        written = write_randomly(tokenizer, spec.start(Channel.FINAL), random.Random(seed), hints_of(name))
        message = message_of(tokenizer, name, written, Channel.FINAL)
        check_calls(message, names={"get_weather"})
        assert len(message.tool_calls) == 1


def write(tokenizer: ByteTokenizer, spec: Spec, text: str, opens_in: Channel | None = None) -> str:
    """Write a text as far as it is allowed."""
    constraint = spec.start(opens_in)
    written: list[int] = []
    for token in tokenizer.encode(text, control_tokens=True):
        if token not in choices(constraint):
            break
        constraint.advance(token)
        written.append(token)
    return tokenizer.decode(written)


@pytest.mark.parametrize("name", ENFORCED)
def test_several_calls_as_the_family_writes_them_unless_only_one_is_wanted(name: str) -> None:
    tokenizer, grammars = grammars_of(name)
    codec = DIALECTS[name].calls
    assert isinstance(codec, BlockCalls)
    texts = [
        "".join(piece.text for piece in codec.encode(*call))
        for call in (("get_weather", {"city": "Paris", "unit": "C"}), ("look", {}))
    ]
    one = texts[0] + END
    assert write(tokenizer, grammars.tool_calls(TOOLS, required=True), one) == one
    begins, ends = codec.around
    if codec.syntax.in_list:
        ends = texts[0][texts[0].rindex("]") :]
        begins = texts[0][: texts[0].rindex("[", 0, texts[0].index("get_weather")) + 1]
    between = ", " if codec.syntax.in_list else ""
    two = texts[0].removesuffix(ends) + between + texts[1].removeprefix(begins) + END
    several = write(tokenizer, grammars.tool_calls(TOOLS, required=True), two)
    assert several == (two if name != "llama3-json" else texts[0])
    assert len(write(tokenizer, grammars.tool_calls(TOOLS, required=True, parallel=False), two)) < len(two)


@pytest.mark.parametrize("name", [name for name in ENFORCED if DIALECTS[name].has_reasoning])
def test_a_required_call_comes_behind_free_reasoning(name: str) -> None:
    tokenizer, grammars = grammars_of(name)
    dialect = DIALECTS[name]
    assert dialect.calls is not None
    call = "".join(piece.text for piece in dialect.calls.encode("look", {})) + END
    opener, closer = next(iter(dialect.blocks.items()))
    spec = grammars.tool_calls(TOOLS, required=True)
    if tokenizer.encode(opener, control_tokens=True)[0] in tokenizer.special_tokens:
        text = f"{opener}I think {{ of it.{closer}\n\n{call}"
        assert write(tokenizer, spec, text) == text
        assert write(tokenizer, spec, f"{opener}x{closer}Hello") == f"{opener}x{closer}"
    text = f"I think {{ of it.{closer}{call}"
    assert write(tokenizer, spec, text, Channel.ANALYSIS) == text


@pytest.mark.parametrize("name", [name for name, dialect in DIALECTS.items() if dialect.blocks])
def test_an_answer_is_held_to_its_schema_behind_the_reasoning_of_every_family(name: str) -> None:
    tokenizer, grammars = grammars_of(name)
    opener, closer = next(iter(DIALECTS[name].blocks.items()))
    spec = grammars.json_schema(POINT, strict=True)
    reasoned = f"I think {{ of it.{closer}\n\n"
    text = f'{reasoned}{{"x": 5}}{END}'
    assert write(tokenizer, spec, text, Channel.ANALYSIS) == text
    assert write(tokenizer, spec, f"{reasoned}Five.", Channel.ANALYSIS) == reasoned
    if tokenizer.encode(opener, control_tokens=True)[0] in tokenizer.special_tokens:
        assert write(tokenizer, spec, opener + text) == opener + text
        assert write(tokenizer, spec, "Five.") == ""


WRAPPED = [
    (name, opener, closer)
    for name, dialect in DIALECTS.items()
    for opener, closer in dialect.answers.items()
    if opener in CONTROL.get(name, ()) or name == "kimi-k3"
]


@pytest.mark.parametrize(("name", "opener", "closer"), WRAPPED)
def test_an_answer_may_stand_between_its_familys_markers(name: str, opener: str, closer: str) -> None:
    tokenizer, grammars = grammars_of(name)
    begins, ends = next(iter(DIALECTS[name].blocks.items()))
    reasoned = f"{begins}I think.{ends}"
    held = grammars.json_schema(POINT, strict=True)
    text = f'{opener}{{"x": 5}}{closer}{END}'
    for before, opens_in in (("", None), (reasoned, None), (f"I think.{ends}", Channel.ANALYSIS)):
        assert write(tokenizer, held, before + text, opens_in) == before + text
    # The prompt may have opened the answer already.
    opened = text.removeprefix(opener)
    assert write(tokenizer, held, opened, Channel.FINAL) == opened
    assert write(tokenizer, held, f"{opener}Five.") == opener
    assert write(tokenizer, held, f'{opener}{{"x": 5}}{closer}{opener}') == f'{opener}{{"x": 5}}{closer}'
    # A free answer, and then a call that is not.
    codec = DIALECTS[name].calls
    assert codec is not None
    call = "".join(piece.text for piece in codec.encode("look", {}))
    free = grammars.tool_calls(TOOLS, required=False)
    for text in (
        f"{reasoned}{opener}I look.{closer}{call}{END}",
        f"{opener}Nothing to look up.{closer}{END}",
    ):
        assert write(tokenizer, free, text) == text
    must = grammars.tool_calls(TOOLS, required=True)
    assert write(tokenizer, must, f"{reasoned}{opener}") != reasoned + opener


def test_a_checkpoints_suffix_is_in_the_markers_it_has_to_write() -> None:
    suffixed = [marker.replace(">", ":x1>") for marker in CONTROL["hunyuan-a13b"]]
    tokenizer = ByteTokenizer((END, *suffixed), None)
    grammars = Grammars(tokenizer, DIALECTS["hunyuan-a13b"])
    spec = grammars.tool_calls([tool("look", {})], required=True)
    call = '<tool_calls:x1>[{"name": "look", "arguments": {}}]</tool_calls:x1>' + END
    for text in (call, "<think:x1>I look.</think:x1>" + call):
        assert write(tokenizer, spec, text) == text
    assert write(tokenizer, spec, "<tool_calls>") == ""


def test_a_strict_tool_is_held_to_its_schema_once_the_model_begins_a_call() -> None:
    tokenizer, grammars = grammars_of("qwen-xml")
    spec = grammars.tool_calls(TOOLS, required=False)
    call = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=unit>\n"
    assert write(tokenizer, spec, f"I look. {call}K") == f"I look. {call}"
    assert write(tokenizer, spec, "Nothing to look up." + END) == "Nothing to look up." + END


@pytest.mark.parametrize(
    ("properties", "words"),
    [
        ({"when": {"type": "string", "format": "date"}}, "/properties/when .*'format' cannot be enforced"),
        ({"a>b": {"type": "string"}}, "cannot write the name 'a>b'"),
        ({"n": {"type": "integer", "not": {"const": 3}}}, '"?not"?'),
    ],
)
def test_what_a_format_cannot_hold_refuses_a_strict_tool_and_is_noted_for_others(
    properties: dict[str, Any], words: str
) -> None:
    _, grammars = grammars_of("qwen-xml")
    strict = [tool("f", properties, *properties)]
    with pytest.raises(GrammarError, match=words):
        grammars.tool_calls(strict, required=True)
    spec = grammars.tool_calls([tool("f", properties, *properties, strict=False)], required=True)
    assert spec.ignored
    spec.start()


def test_a_byte_that_no_text_holds_is_never_taken_for_a_control_token() -> None:
    tokenizer, grammars = grammars_of("qwen-xml")
    constraint = grammars.tool_calls(TOOLS, required=True).start(Channel.FINAL)
    assert choices(constraint) == [tokenizer.encode("<tool_call>", control_tokens=True)[0]]
