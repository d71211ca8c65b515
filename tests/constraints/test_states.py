"""Where in a turn a grammar holds: what each dialect lets go, what it demands, and where a reply may end."""

import codecs
import json
import random
import re
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from mlx_backend.constraints import GrammarError, Grammars, Spec
from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.conversation.events import Channel, Message
from mlx_backend.conversation.parser import ChannelParser, fold
from mlx_backend.engine.base import Constraint
from mlx_backend.engine.scripted import HARMONY_MARKERS, ScriptedTokenizer

THINK_MARKERS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NUMBER = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": NUMBER, "strict": True}}
    for name in ("look", "look_up")
]


class Pairs(ScriptedTokenizer):
    """A scripted vocabulary of pieces of two bytes: small enough to be masked."""

    PIECE = 2
    _SIZES = (256, 256**2)  # type: ignore[assignment]

    def singly(self, text: str) -> list[int]:
        """Tokenise as a model may: markers that are tokens, and all else byte by byte."""
        parts = re.split("|".join(f"({re.escape(marker)})" for marker in self._ids), text)
        return [
            token
            for part in parts
            if part
            for token in ([self._ids[part]] if part in self._ids else part.encode())
        ]


def allows(constraint: Constraint, token: int) -> bool:
    words = constraint.allowed_mask()
    assert words is not None
    return bool(words[token >> 5] >> (token & 31) & 1)


def choices(constraint: Constraint) -> list[int]:
    words = constraint.allowed_mask()
    assert words is not None
    return [at * 32 + bit for at, word in enumerate(words) if word for bit in range(32) if word >> bit & 1]


class Reply:
    """Speaks a reply token by token, and stops where it may not go on."""

    def __init__(
        self, tokenizer: Pairs, spec: Spec, opens_in: Channel | None = None, begun: str = ""
    ) -> None:
        self.tokenizer = tokenizer
        self.constraint = spec.start(opens_in, begun=begun)
        self.said = ""

    def say(self, text: str) -> "Reply":
        """Say markers and headers as the model's template has them, and what is between them bytewise."""
        self._say(self.tokenizer.singly(text))
        return self

    def spell(self, text: str) -> "Reply":
        self._say(self.tokenizer.encode(text, control_tokens=True))
        return self

    def _say(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not allows(self.constraint, token):
                break
            self.constraint.advance(token)
            self.said += self.tokenizer.decode([token])

    @property
    def markers(self) -> set[str]:
        """The control tokens that may come next."""
        special = self.tokenizer.special_tokens
        return {special[token] for token in choices(self.constraint) if token in special}

    @property
    def only_markers(self) -> bool:
        return all(token in self.tokenizer.special_tokens for token in choices(self.constraint))


@pytest.fixture(scope="module")
def harmony() -> tuple[Pairs, Grammars]:
    tokenizer = Pairs(HARMONY_MARKERS, None)
    return tokenizer, Grammars(tokenizer, DIALECTS["harmony"])


@pytest.fixture(scope="module")
def think() -> tuple[Pairs, Grammars]:
    tokenizer = Pairs(THINK_MARKERS, None)
    return tokenizer, Grammars(tokenizer, DIALECTS["think"])


ANALYSIS = "<|channel|>analysis<|message|>"
ANSWER = "<|start|>assistant<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"

# -- harmony ------------------------------------------------------------------------------------------------


def test_reasoning_is_free_and_the_answer_behind_it_is_not(harmony: tuple[Pairs, Grammars]) -> None:
    tokenizer, grammars = harmony
    reply = Reply(tokenizer, grammars.json_schema(SCHEMA, strict=True))
    assert reply.markers == {"<|channel|>"}
    reply.spell(ANALYSIS).say('anything { at all: "<think>", 思考')
    assert reply.markers == {"<|end|>"}, "it can neither end here nor leave the answer out"
    reply.spell("<|end|>" + ANSWER).say('{"a": no')
    assert reply.said.endswith('{"a": ')
    reply.say("-12}")
    assert reply.markers == {"<|return|>"}
    assert reply.only_markers
    reply.spell("<|return|>")
    assert reply.markers == {"<|return|>"}, "and nothing comes behind the end"


def test_an_answer_may_come_without_reasoning_but_reasoning_comes_only_once(
    harmony: tuple[Pairs, Grammars],
) -> None:
    tokenizer, grammars = harmony
    spec = grammars.json_object()
    assert Reply(tokenizer, spec).spell("<|channel|>final<|message|>").say("{}").markers == {"<|return|>"}
    twice = Reply(tokenizer, spec).spell(ANALYSIS).say("hm").spell("<|end|><|start|>assistant" + ANALYSIS)
    assert twice.said.endswith("<|start|>assistant<|channel|>")
    assert Reply(tokenizer, spec).spell("<|channel|>commentary<|message|>").said == "<|channel|>", (
        "no preamble"
    )


@pytest.mark.parametrize(
    ("opens_in", "rest"),
    [
        (Channel.ANALYSIS, "and so on<|end|>" + ANSWER),
        (Channel.COMMENTARY, "I will answer.<|end|>" + ANSWER),
        (Channel.FINAL, ""),
    ],
)
def test_a_reply_that_the_prompt_has_begun_is_held_from_there(
    harmony: tuple[Pairs, Grammars], opens_in: Channel, rest: str
) -> None:
    tokenizer, grammars = harmony
    reply = Reply(tokenizer, grammars.json_schema(SCHEMA, strict=True), opens_in)
    text, marker, header = rest.partition("<|end|>")
    reply.say(text).spell(marker + header).say('{"a": 1}<|return|>')
    assert reply.said == rest + '{"a": 1}<|return|>'


def test_an_answer_that_is_continued_is_held_from_its_beginning(harmony: tuple[Pairs, Grammars]) -> None:
    tokenizer, grammars = harmony
    spec = grammars.json_schema(SCHEMA, strict=True)
    assert Reply(tokenizer, spec, Channel.FINAL, '{"a": 4').say("2}x").said == "2}"
    with pytest.raises(GrammarError, match="does not fit what the reply is constrained to: it begins 'Sure"):
        spec.start(Channel.FINAL, begun="Sure, here is")


def test_a_required_call_is_demanded_and_held_to_the_tools_parameters(
    harmony: tuple[Pairs, Grammars],
) -> None:
    tokenizer, grammars = harmony
    spec = grammars.tool_calls(TOOLS, required=True)
    reply = Reply(tokenizer, spec).spell(ANALYSIS).say("I need it.")
    assert reply.markers == {"<|end|>"}
    reply.spell("<|end|>" + ANSWER)
    assert reply.said.endswith("<|channel|>"), "no answer"
    reply.spell(CALL.removeprefix("<|channel|>")).say('{"x": "no')
    assert reply.said.endswith('{"x": ')
    assert reply.say("7}").markers == {"<|call|>"}
    preamble = Reply(tokenizer, spec).spell("<|channel|>commentary<|message|>").say("I will look.")
    assert preamble.spell("<|end|><|start|>assistant" + CALL).say("{").said.endswith("<|message|>{")


def test_the_model_chooses_among_tools_whose_names_begin_alike(harmony: tuple[Pairs, Grammars]) -> None:
    tokenizer, grammars = harmony
    spec = grammars.tool_calls(TOOLS, required=True)
    for header in (CALL, CALL.replace("look", "look_up")):
        assert Reply(tokenizer, spec).spell(header).said == header
    named = grammars.tool_calls(TOOLS, required=False, name="look_up")
    assert Reply(tokenizer, named).spell(CALL).said != CALL
    assert Reply(tokenizer, named).spell(CALL.replace("look", "look_up")).said == CALL.replace(
        "look", "look_up"
    )


def test_a_marker_in_a_tools_name_is_no_marker(harmony: tuple[Pairs, Grammars]) -> None:
    tokenizer, grammars = harmony
    spec = grammars.tool_calls([{"function": {"name": "f<|end|>", "parameters": NUMBER}}], required=True)
    reply = Reply(tokenizer, spec).spell("<|channel|>")
    reply._say(tokenizer.encode("commentary to=functions.f<|end|> ", control_tokens=False))
    assert reply.said.endswith("f<|end|> ")
    assert reply.markers == {"<|constrain|>"}


def test_a_call_that_is_not_required_leaves_the_answer_free_and_the_arguments_held(
    harmony: tuple[Pairs, Grammars],
) -> None:
    tokenizer, grammars = harmony
    spec = grammars.tool_calls(TOOLS, required=False)
    free = Reply(tokenizer, spec).spell("<|channel|>final<|message|>").say("It is {late}.")
    assert free.said.endswith("It is {late}.")
    assert free.markers == {"<|return|>"}
    assert Reply(tokenizer, spec).spell(CALL).say('{"y').said.endswith('{"')
    assert Reply(tokenizer, spec).spell(ANALYSIS).markers == {"<|end|>", "<|return|>"}, "nothing is demanded"


def test_an_answer_and_calls_may_be_held_at_once(harmony: tuple[Pairs, Grammars]) -> None:
    tokenizer, grammars = harmony
    answer, calls = grammars.json_schema(SCHEMA, strict=True), grammars.tool_calls(TOOLS, required=False)
    for spec in (answer | calls, calls | answer):
        final = Reply(tokenizer, spec).spell("<|channel|>final<|message|>").say("Hello")
        assert final.said.endswith("<|message|>")
        assert Reply(tokenizer, spec).spell(CALL).say('{"x": 1}').markers == {"<|call|>"}
        preamble = Reply(tokenizer, spec).spell("<|channel|>commentary<|message|>").say("I will look.")
        preamble.spell("<|end|><|start|>assistant<|channel|>final")
        assert preamble.said.endswith("<|channel|>"), "content in front of the JSON would spoil it"
    required = answer | grammars.tool_calls(TOOLS, required=True)
    assert Reply(tokenizer, required).spell("<|channel|>final").said == "<|channel|>"


def test_an_answer_that_was_begun_where_a_call_is_required_is_closed_for_it(
    harmony: tuple[Pairs, Grammars],
) -> None:
    tokenizer, grammars = harmony
    reply = Reply(tokenizer, grammars.tool_calls(TOOLS, required=True), Channel.FINAL, "Let me")
    reply.say(" look.").spell("<|end|><|start|>assistant" + CALL).say('{"x": 1}<|call|>')
    assert reply.said.endswith('{"x": 1}<|call|>')


# -- blocks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("opens_in", "text"),
    [
        (None, '<think>free {"</think>\n\n{"a": 1}<|im_end|>'),
        (None, '{"a": 1}<|endoftext|>'),
        (Channel.ANALYSIS, 'and so on</think>{"a": 1}<|im_end|>'),
        (Channel.FINAL, '{"a": 1}<|im_end|>'),
    ],
)
def test_what_stands_in_a_think_block_is_free(
    think: tuple[Pairs, Grammars], opens_in: Channel | None, text: str
) -> None:
    tokenizer, grammars = think
    reply = Reply(tokenizer, grammars.json_schema(SCHEMA, strict=True), opens_in)
    assert reply.say(text).said == text
    assert reply.markers == {"<|im_end|>", "<|endoftext|>"}
    assert reply.only_markers


@pytest.mark.parametrize(
    ("text", "lawful"),
    [
        ("\n{", ""),
        ("<think>x<|im_end|>", "<think>x"),
        ("<think>x</think>\n\n\n{", "<think>x</think>\n\n"),
        ("<think>x</think><think>", "<think>x</think>"),
        ("<tool_call>", ""),
        ('{"a": 1}<think>', '{"a": 1}'),
        ("{<think>", "{"),
    ],
)
def test_blocks_and_line_breaks_stand_only_where_they_belong(
    think: tuple[Pairs, Grammars], text: str, lawful: str
) -> None:
    tokenizer, grammars = think
    assert Reply(tokenizer, grammars.json_schema(SCHEMA, strict=True)).say(text).said == lawful


BLOCK = '<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>'


def test_required_calls_are_blocks_of_json_and_as_many_as_are_wanted(think: tuple[Pairs, Grammars]) -> None:
    tokenizer, grammars = think
    several = grammars.tool_calls(TOOLS, required=True)
    text = (
        "<think>x</think>\n"
        + BLOCK
        + "\n"
        + BLOCK.replace("look", "look_up").replace("\n", "")
        + "<|im_end|>"
    )
    assert Reply(tokenizer, several).say(text).said == text
    assert Reply(tokenizer, several).say("Hello").said == ""
    assert Reply(tokenizer, several).say('<tool_call>{"name": "other').said.endswith('"name": "')
    one = grammars.tool_calls(TOOLS, required=True, parallel=False)
    reply = Reply(tokenizer, one).say(BLOCK)
    assert reply.markers == {"<|im_end|>", "<|endoftext|>"}
    assert reply.only_markers


def test_a_block_that_is_not_required_is_held_once_it_begins(think: tuple[Pairs, Grammars]) -> None:
    tokenizer, grammars = think
    free = grammars.tool_calls(TOOLS, required=False)
    text = f"<think>x</think>Let me see. {BLOCK}<|im_end|>"
    assert Reply(tokenizer, free).say(text).said == text
    assert Reply(tokenizer, free).say("Hi <tool_call>nonsense").said == "Hi <tool_call>"
    both = grammars.json_schema(SCHEMA, strict=True) | free
    for text in (BLOCK + "<|im_end|>", '<think>x</think>{"a": 1}<|im_end|>'):
        assert Reply(tokenizer, both).say(text).said == text
    assert Reply(tokenizer, both).say("Hi").said == ""


def test_markers_that_are_no_tokens_are_spelt_and_found_in_the_text() -> None:
    tokenizer = Pairs(("<|im_end|>",), "<think> <tool_call>")
    grammars = Grammars(tokenizer, DIALECTS["think"])
    spec = grammars.json_schema(SCHEMA, strict=True)
    reply = Reply(tokenizer, spec).spell("<think>").say('a </thi </think>\n\n{"a": 1}<|im_end|>')
    assert reply.said == '<think>a </thi </think>\n\n{"a": 1}<|im_end|>'
    assert Reply(tokenizer, spec, Channel.ANALYSIS).spell("odd</think>x").said == "odd</think", (
        "nothing past its end"
    )
    calls = grammars.tool_calls(TOOLS, required=True)
    text = "\n" + BLOCK.removeprefix("<tool_call>\n") + "\n" + BLOCK + "<|im_end|>"
    assert Reply(tokenizer, calls).spell("<tool_call>").say(text).said == "<tool_call>" + text
    begun = Reply(tokenizer, calls, Channel.FINAL, "Let me").say(" look: " + BLOCK + "<|im_end|>")
    assert begun.said == " look: " + BLOCK + "<|im_end|>"


def test_a_plain_model_is_held_from_its_first_token() -> None:
    tokenizer = Pairs(("<s>", "</s>"), None)
    grammars = Grammars(tokenizer, DIALECTS["plain"])
    reply = Reply(tokenizer, grammars.choice(["yes", "yes, indeed"])).say("yes")
    assert reply.markers == {"</s>"}
    assert reply.say(", indeed!").said == "yes, indeed"
    with pytest.raises(GrammarError, match="its output has no form for them"):
        grammars.tool_calls(TOOLS, required=True)


def test_the_end_tokens_of_the_engine_are_taken_where_they_are_given() -> None:
    tokenizer = Pairs(("<stop>", "</s>"), None)
    [stop, _] = tokenizer.special_tokens
    spec = Grammars(tokenizer, DIALECTS["plain"], end_tokens=[stop]).choice(["a"])
    assert Reply(tokenizer, spec).say("a").markers == {"<stop>"}


# -- models that cannot be held -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokenizer", "dialect", "words"),
    [
        (ScriptedTokenizer(), "harmony", "vocabulary of 16843017 tokens is larger than"),
        (Pairs((), None), "plain", "names no control token"),
        (Pairs(("<x>",), None), "plain", "not known which token ends its turn"),
        (Pairs(("<|end|>", "<|start|>"), None), "harmony", r"has no <\|call\|>, <\|channel\|>"),
    ],
    ids=["huge", "no-markers", "no-end", "not-harmony"],
)
def test_a_model_that_cannot_be_held_says_why(tokenizer: ScriptedTokenizer, dialect: str, words: str) -> None:
    spec = Grammars(tokenizer, DIALECTS[dialect]).json_object()
    with pytest.raises(GrammarError, match=words):
        spec.start()


def test_what_the_grammar_has_no_place_for_is_refused_when_it_is_said(
    harmony: tuple[Pairs, Grammars],
) -> None:
    tokenizer, grammars = harmony
    for said in ("<|return|>", "x"):
        constraint = grammars.json_object().start(Channel.FINAL)
        [token] = tokenizer.encode(said, control_tokens=True)
        with pytest.raises(GrammarError, match=f"The model wrote '{re.escape(said)}' where"):
            constraint.advance(token)


# -- any model, however it babbles --------------------------------------------------------------------------

BABBLED: list[dict[str, Any]] = [
    SCHEMA,
    {"type": "array", "items": {"enum": ["a", "é", "\n", 1, None, True]}, "minItems": 1, "maxItems": 4},
    {"anyOf": [{"type": "string", "pattern": "^[a-z]{2,5}(-[0-9]{2})?$"}, {"type": "boolean"}]},
    {"properties": {"d": {"type": "string", "format": "date"}, "s": {"type": "string", "maxLength": 4}}},
    {"type": "number", "minimum": -5, "exclusiveMaximum": 12.5, "multipleOf": 0.25},
    {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"left": {"$ref": "#/$defs/leaf"}},
                "required": ["left"],
            },
            "leaf": {
                "type": "array",
                "prefixItems": [{"const": {"k": [1, "z"]}}, {"type": "null"}],
                "items": False,
            },
        },
    },
]


def babble(tokenizer: Pairs, constraint: Constraint, chance: random.Random) -> list[int]:
    """Speak as a model without any sense: whatever is allowed, though seldom two bytes at once."""
    said: list[int] = []
    ends = {"<|return|>", "<|call|>", "<|im_end|>", "<|endoftext|>"}
    while tokenizer.special_tokens.get(said[-1] if said else -1) not in ends:
        allowed = choices(constraint)
        assert allowed, tokenizer.decode(said)
        special = [token for token in allowed if token in tokenizer.special_tokens]
        single = [token for token in allowed if token < 256]
        few = special if special and (not single or chance.random() < 0.3) else single or allowed
        said.append(chance.choice(allowed if chance.random() < 0.05 else few))
        constraint.advance(said[-1])
        assert len(said) < 5_000
    return said


def message_of(tokenizer: Pairs, dialect: str, said: Sequence[int], tools: Collection[str] = ()) -> Message:
    parser = ChannelParser(dialect, tools=tools, special_tokens=tokenizer.special_tokens)
    characters = codecs.getincrementaldecoder("utf-8")("replace")
    events = []
    for token in said:
        marker = tokenizer.special_tokens.get(token)
        if marker:
            characters.reset()
        events += parser.feed(marker or characters.decode(tokenizer.bytes_of(token)), token)
    return fold([*events, *parser.close()])


@pytest.mark.parametrize("dialect", ["harmony", "think"])
@pytest.mark.parametrize("schema", BABBLED, ids=range(len(BABBLED)))
def test_however_a_model_babbles_a_token_is_allowed_and_its_answer_is_json(
    harmony: tuple[Pairs, Grammars], think: tuple[Pairs, Grammars], dialect: str, schema: dict[str, Any]
) -> None:
    tokenizer, grammars = harmony if dialect == "harmony" else think
    spec = grammars.json_schema(schema, strict=True)
    for seed in range(8):
        message = message_of(tokenizer, dialect, babble(tokenizer, spec.start(), random.Random(seed)))
        json.loads(message.content)
        assert not message.tool_calls


@pytest.mark.parametrize("dialect", ["harmony", "think"])
def test_however_a_model_babbles_its_required_call_can_be_read(
    harmony: tuple[Pairs, Grammars], think: tuple[Pairs, Grammars], dialect: str
) -> None:
    tokenizer, grammars = harmony if dialect == "harmony" else think
    spec = grammars.tool_calls(TOOLS, required=True, parallel=False)
    for seed in range(8):
        said = babble(tokenizer, spec.start(), random.Random(seed))
        message = message_of(tokenizer, dialect, said, ["look", "look_up"])
        [call] = message.tool_calls
        assert call.name in ("look", "look_up")
        assert list(json.loads(call.arguments)) == ["x"]
        assert message.finish == "tool_calls"
