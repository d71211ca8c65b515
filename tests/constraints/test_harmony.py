"""Constrained replies in Harmony: what is free, what is forced, and where a reply may end."""

import pytest
from constraint_replies import NUMBER, SCHEMA, TOOLS, PairTokenizer, Reply
from scripted_engine import HARMONY_MARKERS

from mlx_backend.constraints import GrammarError, Grammars
from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.conversation.events import Channel


@pytest.fixture(scope="module")
def harmony() -> tuple[PairTokenizer, Grammars]:
    tokenizer = PairTokenizer(HARMONY_MARKERS, None)
    return tokenizer, Grammars(tokenizer, DIALECTS["harmony"])


ANALYSIS = "<|channel|>analysis<|message|>"
ANSWER = "<|start|>assistant<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"


def test_reasoning_is_free_and_the_answer_behind_it_is_not(harmony: tuple[PairTokenizer, Grammars]) -> None:
    tokenizer, grammars = harmony
    reply = Reply(tokenizer, grammars.json_schema(SCHEMA, strict=True))
    assert reply.markers == {"<|channel|>"}
    reply.write_encoded(ANALYSIS).write('anything { at all: "<think>", 思考')
    assert reply.markers == {"<|end|>"}, "it can neither end here nor leave the answer out"
    reply.write_encoded("<|end|>" + ANSWER).write('{"a": no')
    assert reply.written.endswith('{"a": ')
    reply.write("-12}")
    assert reply.markers == {"<|return|>"}
    assert reply.allows_only_markers
    reply.write_encoded("<|return|>")
    assert reply.markers == {"<|return|>"}, "and nothing comes behind the end"


def test_an_answer_may_come_without_reasoning_but_reasoning_comes_only_once(
    harmony: tuple[PairTokenizer, Grammars],
) -> None:
    tokenizer, grammars = harmony
    spec = grammars.json_object()
    assert Reply(tokenizer, spec).write_encoded("<|channel|>final<|message|>").write("{}").markers == {
        "<|return|>"
    }
    twice = (
        Reply(tokenizer, spec)
        .write_encoded(ANALYSIS)
        .write("hm")
        .write_encoded("<|end|><|start|>assistant" + ANALYSIS)
    )
    assert twice.written.endswith("<|start|>assistant<|channel|>")
    assert (
        Reply(tokenizer, spec).write_encoded("<|channel|>commentary<|message|>").written == "<|channel|>"
    ), "no preamble"


@pytest.mark.parametrize(
    ("opens_in", "rest"),
    [
        (Channel.ANALYSIS, "and so on<|end|>" + ANSWER),
        (Channel.COMMENTARY, "I will answer.<|end|>" + ANSWER),
        (Channel.FINAL, ""),
    ],
)
def test_a_reply_that_the_prompt_has_begun_is_constrained_from_there(
    harmony: tuple[PairTokenizer, Grammars], opens_in: Channel, rest: str
) -> None:
    tokenizer, grammars = harmony
    reply = Reply(tokenizer, grammars.json_schema(SCHEMA, strict=True), opens_in)
    text, marker, header = rest.partition("<|end|>")
    reply.write(text).write_encoded(marker + header).write('{"a": 1}<|return|>')
    assert reply.written == rest + '{"a": 1}<|return|>'


def test_an_answer_that_is_continued_is_constrained_from_its_beginning(
    harmony: tuple[PairTokenizer, Grammars],
) -> None:
    tokenizer, grammars = harmony
    spec = grammars.json_schema(SCHEMA, strict=True)
    assert Reply(tokenizer, spec, Channel.FINAL, '{"a": 4').write("2}x").written == "2}"
    with pytest.raises(GrammarError, match="does not fit what the reply is constrained to: it begins 'Sure"):
        spec.start(Channel.FINAL, begun="Sure, here is")


def test_a_required_call_is_forced_and_its_arguments_fit_the_parameters(
    harmony: tuple[PairTokenizer, Grammars],
) -> None:
    tokenizer, grammars = harmony
    spec = grammars.tool_calls(TOOLS, required=True)
    reply = Reply(tokenizer, spec).write_encoded(ANALYSIS).write("I need it.")
    assert reply.markers == {"<|end|>"}
    reply.write_encoded("<|end|>" + ANSWER)
    assert reply.written.endswith("<|channel|>"), "no answer"
    reply.write_encoded(CALL.removeprefix("<|channel|>")).write('{"x": "no')
    assert reply.written.endswith('{"x": ')
    assert reply.write("7}").markers == {"<|call|>"}
    preamble = Reply(tokenizer, spec).write_encoded("<|channel|>commentary<|message|>").write("I will look.")
    assert (
        preamble.write_encoded("<|end|><|start|>assistant" + CALL).write("{").written.endswith("<|message|>{")
    )


def test_the_model_chooses_among_tools_whose_names_begin_alike(
    harmony: tuple[PairTokenizer, Grammars],
) -> None:
    tokenizer, grammars = harmony
    spec = grammars.tool_calls(TOOLS, required=True)
    for header in (CALL, CALL.replace("look", "look_up")):
        assert Reply(tokenizer, spec).write_encoded(header).written == header
    named = grammars.tool_calls(TOOLS, required=False, name="look_up")
    assert Reply(tokenizer, named).write_encoded(CALL).written != CALL
    assert Reply(tokenizer, named).write_encoded(CALL.replace("look", "look_up")).written == CALL.replace(
        "look", "look_up"
    )


def test_a_marker_in_a_tools_name_is_no_marker(harmony: tuple[PairTokenizer, Grammars]) -> None:
    tokenizer, grammars = harmony
    spec = grammars.tool_calls([{"function": {"name": "f<|end|>", "parameters": NUMBER}}], required=True)
    reply = Reply(tokenizer, spec).write_encoded("<|channel|>")
    reply._advance(tokenizer.encode("commentary to=functions.f<|end|> ", control_tokens=False))
    assert reply.written.endswith("f<|end|> ")
    assert reply.markers == {"<|constrain|>"}


def test_a_call_that_is_not_required_leaves_the_answer_free_and_the_arguments_constrained(
    harmony: tuple[PairTokenizer, Grammars],
) -> None:
    tokenizer, grammars = harmony
    spec = grammars.tool_calls(TOOLS, required=False)
    free = Reply(tokenizer, spec).write_encoded("<|channel|>final<|message|>").write("It is {late}.")
    assert free.written.endswith("It is {late}.")
    assert free.markers == {"<|return|>"}
    assert Reply(tokenizer, spec).write_encoded(CALL).write('{"y').written.endswith('{"')
    assert Reply(tokenizer, spec).write_encoded(ANALYSIS).markers == {"<|end|>", "<|return|>"}, (
        "nothing is demanded"
    )


def test_an_answer_and_calls_may_be_constrained_at_once(harmony: tuple[PairTokenizer, Grammars]) -> None:
    tokenizer, grammars = harmony
    answer, calls = grammars.json_schema(SCHEMA, strict=True), grammars.tool_calls(TOOLS, required=False)
    for spec in (answer | calls, calls | answer):
        final = Reply(tokenizer, spec).write_encoded("<|channel|>final<|message|>").write("Hello")
        assert final.written.endswith("<|message|>")
        assert Reply(tokenizer, spec).write_encoded(CALL).write('{"x": 1}').markers == {"<|call|>"}
        preamble = (
            Reply(tokenizer, spec).write_encoded("<|channel|>commentary<|message|>").write("I will look.")
        )
        preamble.write_encoded("<|end|><|start|>assistant<|channel|>final")
        assert preamble.written.endswith("<|channel|>"), "content in front of the JSON would spoil it"
    required = answer | grammars.tool_calls(TOOLS, required=True)
    assert Reply(tokenizer, required).write_encoded("<|channel|>final").written == "<|channel|>"


def test_an_answer_that_was_begun_where_a_call_is_required_is_closed_for_it(
    harmony: tuple[PairTokenizer, Grammars],
) -> None:
    tokenizer, grammars = harmony
    reply = Reply(tokenizer, grammars.tool_calls(TOOLS, required=True), Channel.FINAL, "Let me")
    reply.write(" look.").write_encoded("<|end|><|start|>assistant" + CALL).write('{"x": 1}<|call|>')
    assert reply.written.endswith('{"x": 1}<|call|>')
