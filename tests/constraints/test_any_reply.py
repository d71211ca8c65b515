"""Whatever a model writes, some token is allowed, and the reply is what was promised."""

import codecs
import json
import random
import re
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from constraint_replies import SCHEMA, THINK_MARKERS, TOOLS, PairTokenizer, choices
from scripted_engine import HARMONY_MARKERS, ScriptedTokenizer

from mlx_backend.constraints import GrammarError, Grammars
from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.conversation.events import Channel, Message
from mlx_backend.conversation.parser import ChannelParser, fold
from mlx_backend.engine.base import Constraint


@pytest.fixture(scope="module")
def harmony() -> tuple[PairTokenizer, Grammars]:
    tokenizer = PairTokenizer(HARMONY_MARKERS, None)
    return tokenizer, Grammars(tokenizer, DIALECTS["harmony"])


@pytest.fixture(scope="module")
def think() -> tuple[PairTokenizer, Grammars]:
    tokenizer = PairTokenizer(THINK_MARKERS, None)
    return tokenizer, Grammars(tokenizer, DIALECTS["think"])


@pytest.mark.parametrize(
    ("tokenizer", "dialect", "words"),
    [
        (ScriptedTokenizer(), "harmony", "vocabulary of 16843017 tokens is larger than"),
        (PairTokenizer((), None), "plain", "names no control token"),
        (PairTokenizer(("<x>",), None), "plain", "not known which token ends its turn"),
        (PairTokenizer(("<|end|>", "<|start|>"), None), "harmony", r"has no <\|call\|>, <\|channel\|>"),
    ],
    ids=["huge", "no-markers", "no-end", "not-harmony"],
)
def test_a_model_that_cannot_be_constrained_says_why(
    tokenizer: ScriptedTokenizer, dialect: str, words: str
) -> None:
    spec = Grammars(tokenizer, DIALECTS[dialect]).json_object()
    with pytest.raises(GrammarError, match=words):
        spec.start()


def test_a_token_that_the_grammar_does_not_allow_is_refused(
    harmony: tuple[PairTokenizer, Grammars],
) -> None:
    tokenizer, grammars = harmony
    for written in ("<|return|>", "x"):
        constraint = grammars.json_object().start(Channel.FINAL)
        [token] = tokenizer.encode(written, control_tokens=True)
        with pytest.raises(GrammarError, match=f"The model wrote '{re.escape(written)}' where"):
            constraint.advance(token)


SCHEMAS: list[dict[str, Any]] = [
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


def random_reply(tokenizer: PairTokenizer, constraint: Constraint, rng: random.Random) -> list[int]:
    """Write a reply of random allowed tokens, seldom of two bytes."""
    written: list[int] = []
    ends = {"<|return|>", "<|call|>", "<|im_end|>", "<|endoftext|>"}
    while tokenizer.special_tokens.get(written[-1] if written else -1) not in ends:
        allowed = choices(constraint)
        assert allowed, tokenizer.decode(written)
        special = [token for token in allowed if token in tokenizer.special_tokens]
        single = [token for token in allowed if token < 256]
        likely = special if special and (not single or rng.random() < 0.3) else single or allowed
        written.append(rng.choice(allowed if rng.random() < 0.05 else likely))
        constraint.advance(written[-1])
        assert len(written) < 5_000
    return written


def message_of(
    tokenizer: PairTokenizer, dialect: str, written: Sequence[int], tools: Collection[str] = ()
) -> Message:
    parser = ChannelParser(dialect, tools=tools, special_tokens=tokenizer.special_tokens)
    characters = codecs.getincrementaldecoder("utf-8")("replace")
    events = []
    for token in written:
        marker = tokenizer.special_tokens.get(token)
        if marker:
            characters.reset()
        events += parser.feed(marker or characters.decode(tokenizer.bytes_of(token)), token)
    return fold([*events, *parser.close()])


@pytest.mark.parametrize("dialect", ["harmony", "think"])
@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_whatever_a_model_writes_a_token_is_allowed_and_its_answer_is_json(
    harmony: tuple[PairTokenizer, Grammars],
    think: tuple[PairTokenizer, Grammars],
    dialect: str,
    schema: dict[str, Any],
) -> None:
    tokenizer, grammars = harmony if dialect == "harmony" else think
    spec = grammars.json_schema(schema, strict=True)
    for seed in range(8):
        message = message_of(tokenizer, dialect, random_reply(tokenizer, spec.start(), random.Random(seed)))
        json.loads(message.content)
        assert not message.tool_calls


@pytest.mark.parametrize("dialect", ["harmony", "think"])
def test_whatever_a_model_writes_its_required_call_can_be_parsed(
    harmony: tuple[PairTokenizer, Grammars], think: tuple[PairTokenizer, Grammars], dialect: str
) -> None:
    tokenizer, grammars = harmony if dialect == "harmony" else think
    spec = grammars.tool_calls(TOOLS, required=True, parallel=False)
    for seed in range(8):
        written = random_reply(tokenizer, spec.start(), random.Random(seed))
        message = message_of(tokenizer, dialect, written, ["look", "look_up"])
        [call] = message.tool_calls
        assert call.name in ("look", "look_up")
        assert list(json.loads(call.arguments)) == ["x"]
        assert message.finish == "tool_calls"
