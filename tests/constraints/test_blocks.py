"""Constrained replies of answer and blocks, and of plain models: what is free, and where a reply may end."""

import dataclasses

import pytest
from constraint_replies import SCHEMA, THINK_MARKERS, TOOLS, PairTokenizer, Reply

from mlx_backend.constraints import GrammarError, Grammars, can_require_calls
from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.conversation.events import Channel


@pytest.fixture(scope="module")
def think() -> tuple[PairTokenizer, Grammars]:
    tokenizer = PairTokenizer(THINK_MARKERS, None)
    return tokenizer, Grammars(tokenizer, DIALECTS["think"])


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
    think: tuple[PairTokenizer, Grammars], opens_in: Channel | None, text: str
) -> None:
    tokenizer, grammars = think
    reply = Reply(tokenizer, grammars.json_schema(SCHEMA, strict=True), opens_in)
    assert reply.write(text).written == text
    assert reply.markers == {"<|im_end|>", "<|endoftext|>"}
    assert reply.allows_only_markers


@pytest.mark.parametrize(
    ("text", "allowed"),
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
    think: tuple[PairTokenizer, Grammars], text: str, allowed: str
) -> None:
    tokenizer, grammars = think
    assert Reply(tokenizer, grammars.json_schema(SCHEMA, strict=True)).write(text).written == allowed


BLOCK = '<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>'


def test_required_calls_are_blocks_of_json_one_or_several(think: tuple[PairTokenizer, Grammars]) -> None:
    tokenizer, grammars = think
    several = grammars.tool_calls(TOOLS, required=True)
    text = (
        "<think>x</think>\n"
        + BLOCK
        + "\n"
        + BLOCK.replace("look", "look_up").replace("\n", "")
        + "<|im_end|>"
    )
    assert Reply(tokenizer, several).write(text).written == text
    assert Reply(tokenizer, several).write("Hello").written == ""
    assert Reply(tokenizer, several).write('<tool_call>{"name": "other').written.endswith('"name": "')
    one = grammars.tool_calls(TOOLS, required=True, parallel=False)
    reply = Reply(tokenizer, one).write(BLOCK)
    assert reply.markers == {"<|im_end|>", "<|endoftext|>"}
    assert reply.allows_only_markers


def test_a_call_block_that_is_not_required_is_constrained_once_it_begins(
    think: tuple[PairTokenizer, Grammars],
) -> None:
    tokenizer, grammars = think
    free = grammars.tool_calls(TOOLS, required=False)
    text = f"<think>x</think>Let me see. {BLOCK}<|im_end|>"
    assert Reply(tokenizer, free).write(text).written == text
    assert Reply(tokenizer, free).write("Hi <tool_call>nonsense").written == "Hi <tool_call>"
    both = grammars.json_schema(SCHEMA, strict=True) | free
    for text in (BLOCK + "<|im_end|>", '<think>x</think>{"a": 1}<|im_end|>'):
        assert Reply(tokenizer, both).write(text).written == text
    assert Reply(tokenizer, both).write("Hi").written == ""


def test_markers_that_are_no_tokens_are_spelt_and_found_in_the_text() -> None:
    tokenizer = PairTokenizer(("<|im_end|>",), "<think> <tool_call>")
    grammars = Grammars(tokenizer, DIALECTS["think"])
    spec = grammars.json_schema(SCHEMA, strict=True)
    reply = Reply(tokenizer, spec).write_encoded("<think>").write('a </thi </think>\n\n{"a": 1}<|im_end|>')
    assert reply.written == '<think>a </thi </think>\n\n{"a": 1}<|im_end|>'
    assert Reply(tokenizer, spec, Channel.ANALYSIS).write_encoded("odd</think>x").written == "odd</think", (
        "nothing past its end"
    )
    calls = grammars.tool_calls(TOOLS, required=True)
    text = "\n" + BLOCK.removeprefix("<tool_call>\n") + "\n" + BLOCK + "<|im_end|>"
    assert Reply(tokenizer, calls).write_encoded("<tool_call>").write(text).written == "<tool_call>" + text
    begun = Reply(tokenizer, calls, Channel.FINAL, "Let me").write(" look: " + BLOCK + "<|im_end|>")
    assert begun.written == " look: " + BLOCK + "<|im_end|>"


def test_a_plain_model_is_constrained_from_its_first_token() -> None:
    tokenizer = PairTokenizer(("<s>", "</s>"), None)
    grammars = Grammars(tokenizer, DIALECTS["plain"])
    reply = Reply(tokenizer, grammars.choice(["yes", "yes, indeed"])).write("yes")
    assert reply.markers == {"</s>"}
    assert reply.write(", indeed!").written == "yes, indeed"


def test_a_model_whose_response_template_has_no_calls_cannot_be_made_to_call() -> None:
    dialect = dataclasses.replace(DIALECTS["plain"], calls=None, is_from_response_template=True)
    assert not can_require_calls(dialect)
    grammars = Grammars(PairTokenizer(("<s>", "</s>"), None), dialect)
    with pytest.raises(GrammarError, match="its output has no form for them"):
        grammars.tool_calls(TOOLS, required=True)


def test_a_reply_may_end_with_the_tokens_that_the_models_files_name() -> None:
    class Stopping(PairTokenizer):
        @property
        def end_tokens(self) -> frozenset[int]:
            return frozenset(token for token, marker in self.special_tokens.items() if marker == "<stop>")

    tokenizer = Stopping(("<stop>", "<other>"), None)
    spec = Grammars(tokenizer, DIALECTS["plain"]).choice(["a"])
    assert Reply(tokenizer, spec).write("a").markers == {"<stop>"}


def test_a_model_without_any_known_end_token_cannot_be_constrained() -> None:
    spec = Grammars(PairTokenizer(("<other>",), None), DIALECTS["plain"]).choice(["a"])
    with pytest.raises(GrammarError, match="not known which token ends its turn"):
        spec.start()
