"""What a budget makes of a turn, token by token, whatever the model wanted to say."""

import random
import re
from collections.abc import Collection
from typing import Any

import pytest
from scripted_engine import HARMONY_MARKERS, ScriptedEngine, ScriptedTokenizer

from mlx_backend.constraints.machines import machine_of
from mlx_backend.constraints.reasoning_budget import REOPENED_TOKENS, ReasoningBudget, ReasoningBudgets
from mlx_backend.conversation.dialects import DIALECTS, Dialect
from mlx_backend.conversation.events import Channel, Message
from mlx_backend.conversation.parser import ChannelParser, fold
from mlx_backend.engine.base import Finished, GenerationRequest, TokenDelta

# The scripted vocabulary has three bytes to a token; a marker is one.
THOUGHT = "abcdefghijklmnopqrstuvwxyz, and so on."
THOUGHT_TOKENS = 13
TO_FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"
HARMONY = f"<|channel|>analysis<|message|>{THOUGHT}{TO_FINAL}Paris.<|return|>"
CALL = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
BLOCK_MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>")
BLOCKS = f"<think>\n{THOUGHT}\n</think>\n\nParis.<|im_end|>"


def tokenizer(dialect: str, markers: tuple[str, ...] | None = None) -> ScriptedTokenizer:
    return ScriptedTokenizer(markers or (HARMONY_MARKERS if dialect == "harmony" else BLOCK_MARKERS))


def budget(
    words: ScriptedTokenizer,
    dialect: str,
    *,
    tokens: int | None = None,
    reserve: int | None = None,
    room: int = 1000,
    tools: Collection[str] = (),
    opens_in: Channel | None = None,
    prompt: str = "hello",
    message: str = "",
) -> ReasoningBudget | None:
    asked = words.encode(prompt, control_tokens=True)
    return ReasoningBudgets(words, DIALECTS[dialect]).start(
        asked, opens_in, room=room, tokens=tokens, reserve=reserve, tools=tools, message=message
    )


def said(
    wanted: str,
    dialect: str = "harmony",
    *,
    tokens: int | None = None,
    reserve: int | None = None,
    room: int = 1000,
    tools: Collection[str] = (),
    opens_in: Channel | None = None,
    markers: tuple[str, ...] | None = None,
    prompt: str = "hello",
    message: str = "",
) -> str:
    """Say what a model says that wants to say something."""
    words = tokenizer(dialect, markers)
    held = budget(
        words,
        dialect,
        tokens=tokens,
        reserve=reserve,
        room=room,
        tools=tools,
        opens_in=opens_in,
        prompt=prompt,
        message=message,
    )
    with ScriptedEngine([wanted], markers=markers or tuple(words.special_tokens.values())) as engine:
        asked = words.encode(prompt, control_tokens=True)
        *items, last = engine.generate(GenerationRequest(prompt=asked, max_tokens=room, constraint=held))
        assert isinstance(last, Finished)
        return "".join(item.text for item in items if isinstance(item, TokenDelta))


def read(text: str, dialect: str = "harmony", opens_in: Channel | None = None) -> Message:
    parser = ChannelParser(dialect, opens_in=opens_in)
    return fold([*parser.feed(text), *parser.close()])


# -- Harmony ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", range(THOUGHT_TOKENS + 3))
def test_reasoning_has_its_tokens_and_no_more_and_the_answer_is_whole(tokens: int) -> None:
    text = said(HARMONY, tokens=tokens)
    if tokens == 0:
        assert text == "<|channel|>final<|message|>Paris.<|return|>"
    else:
        assert text == HARMONY.replace(THOUGHT, THOUGHT[: 3 * tokens])


@pytest.mark.parametrize("reserve", [1, 2, 7])
@pytest.mark.parametrize("room", range(1, 40))
def test_what_is_kept_for_the_answer_is_there_for_it(room: int, reserve: int) -> None:
    words = tokenizer("harmony")
    endless = f"<|channel|>analysis<|message|>{THOUGHT * 20}{TO_FINAL}{'Paris. ' * 20}"
    text = said(endless, room=room, reserve=reserve)
    spoken = words.encode(text, control_tokens=True)
    assert len(spoken) == room, "nothing is lost, and nothing is forced behind the end"
    header, _, answer = text.rpartition("final<|message|>")
    answered = len(words.encode(answer, control_tokens=True)) if header else 0
    assert answered == min(reserve, room - 4) or not header or "analysis" not in header
    if room >= reserve + 4:  # a header of four tokens; after it there is the answer
        assert answered >= reserve
    if "analysis" not in text:
        assert text.startswith("<|channel|>final<|message|>"[: len(text)])


def test_room_for_everything_changes_nothing() -> None:
    assert said(HARMONY, reserve=5, tokens=500) == HARMONY


def test_reasoning_that_the_prompt_has_opened_is_closed_too() -> None:
    text = said(f"{THOUGHT}{TO_FINAL}Paris.<|return|>", tokens=2, opens_in=Channel.ANALYSIS)
    assert text == f"{THOUGHT[:6]}{TO_FINAL}Paris.<|return|>"


def test_an_answer_that_the_prompt_has_begun_is_left_alone() -> None:
    assert said("is.<|return|>", tokens=0, reserve=900, room=20, opens_in=Channel.FINAL) == "is.<|return|>"


@pytest.mark.parametrize("tokens", range(THOUGHT_TOKENS + 2))
def test_a_tool_can_still_be_called_and_its_call_is_never_cut(tokens: int) -> None:
    wanted = f"<|channel|>analysis<|message|>{THOUGHT}<|end|>{CALL}"
    text = said(wanted, tokens=tokens, tools=["f"])
    message = read(text)
    assert message.reasoning == THOUGHT[: 3 * tokens]
    assert [(call.name, call.arguments, call.complete) for call in message.tool_calls] == [
        ("f", '{"a": 1}', True)
    ]


def test_with_tools_the_model_may_also_answer() -> None:
    assert read(said(HARMONY, tokens=1, tools=["f"])).content == "Paris."
    assert read(said(HARMONY, tokens=0, tools=["f"])).content == "Paris."


def test_a_call_may_be_as_long_as_it_is_though_the_room_for_an_answer_shrinks() -> None:
    call = CALL.replace("1", "1" * 90).removeprefix("<|start|>assistant")
    [made] = read(said(call, reserve=30, room=60, tools=["f"])).tool_calls
    assert made.arguments == '{"a": ' + "1" * 90 + "}"


def test_reasoning_is_not_begun_again_once_it_is_spent() -> None:
    preamble = "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    again = "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
    wanted = f"<|channel|>analysis<|message|>{THOUGHT}<|end|>{preamble}{again}{CALL}"
    message = read(said(wanted, tokens=3, tools=["f"]))
    assert (message.reasoning, message.content) == (THOUGHT[:9], "I look.")
    assert len(message.tool_calls) == 1
    assert read(said(wanted, tokens=30, tools=["f"])).reasoning == f"{THOUGHT}Hm."


def test_reasoning_behind_an_answer_is_closed_soon() -> None:
    more = f"<|end|><|start|>assistant<|channel|>analysis<|message|>{THOUGHT * 3}{TO_FINAL}Rome.<|return|>"
    message = read(said(HARMONY.replace("<|return|>", more), tokens=2))
    assert message.reasoning == THOUGHT[:6] + THOUGHT[: 3 * REOPENED_TOKENS]
    assert message.content == "Paris.Rome."


# -- blocks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 2, 5])
def test_a_block_that_the_model_has_opened_is_closed(tokens: int) -> None:
    text = said(BLOCKS, "think", tokens=tokens)
    message = read(text, "think")
    assert THOUGHT.startswith(message.reasoning)
    assert len(message.reasoning) <= 3 * tokens
    assert message.content == "Paris."


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_a_marker_that_is_no_token_is_spelt(tokens: int) -> None:
    wanted = f"<think>\n\n{THOUGHT}"  # cut into pieces of three
    text = said(wanted, "think", tokens=tokens, markers=("<|im_end|>",))
    assert text.startswith(f"<think>\n\n{THOUGHT[: 3 * tokens]}\n</think>\n\n")
    assert read(text, "think").reasoning == THOUGHT[: 3 * tokens]


@pytest.mark.parametrize(("opener", "closer"), [("<think>", "</think>"), ("[THINK]", "[/THINK]")])
def test_a_block_that_the_prompt_has_opened_is_closed_with_its_own_marker(opener: str, closer: str) -> None:
    wanted = f"{THOUGHT}\n{closer}Paris.<|im_end|>"
    markers = (*BLOCK_MARKERS, "[THINK]", "[/THINK]")
    text = said(
        wanted,
        "think",
        tokens=2,
        markers=markers,
        opens_in=Channel.ANALYSIS,
        prompt=f"<think>old</think>{opener}\n",
    )
    assert text == f"{THOUGHT[:6]}\n{closer}\n\nParis.<|im_end|>"


def test_no_budget_closes_an_opened_block_at_once() -> None:
    text = said(
        f"{THOUGHT}</think>Paris.<|im_end|>",
        "think",
        tokens=0,
        opens_in=Channel.ANALYSIS,
        prompt="hello<think>\n",
    )
    assert text == "\n</think>\n\nParis.<|im_end|>"


def test_another_block_is_not_opened_behind_one_that_was_closed() -> None:
    wanted = f"<think>{THOUGHT}</think>\n\n<think>again</think>\n\nParis.<|im_end|>"
    message = read(said(wanted, "think", tokens=2), "think")
    assert "again" not in message.reasoning
    assert message.content.endswith("Paris.")


def test_a_block_in_the_middle_of_an_answer_is_counted_and_closed_soon() -> None:
    wanted = BLOCKS.replace("<|im_end|>", f" <think>{THOUGHT * 3}</think>Rome.<|im_end|>")
    message = read(said(wanted, "think", tokens=2), "think")
    before, _, more = message.reasoning.partition("\n\n")
    assert THOUGHT.startswith(before)
    assert more == THOUGHT[: 3 * REOPENED_TOKENS]
    assert message.content.startswith("Paris. ")
    assert message.content.endswith("Rome.")
    assert "think" not in message.content


def test_an_answer_that_the_prompt_has_begun_may_reason_a_little() -> None:
    wanted = f"<think>{THOUGHT * 3}</think>Rome.<|im_end|>"
    text = said(wanted, "think", tokens=0, opens_in=Channel.FINAL)
    message = read(text, "think", Channel.FINAL)
    assert message.reasoning == THOUGHT[: 3 * REOPENED_TOKENS]
    assert message.content.endswith("Rome.")


def test_a_call_in_a_block_of_its_own_is_left_alone() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    message = read(
        said(f"<think>{THOUGHT}</think>\n\n{call}<|im_end|>", "think", tokens=1, tools=["f"]), "think"
    )
    assert [call.name for call in message.tool_calls] == ["f"]


def test_a_model_that_does_not_reason_is_not_held() -> None:
    assert budget(tokenizer("think"), "plain", tokens=0) is None
    assert budget(tokenizer("harmony"), "harmony") is None


# -- a message ----------------------------------------------------------------------------------------------


def _has_closer(dialect: Dialect) -> bool:
    return machine_of(dialect).closer is not None


ENOUGH = "Enough: I answer now."  # eight tokens with the two line breaks before it


@pytest.mark.parametrize("tokens", [1, 4, THOUGHT_TOKENS - 1])
@pytest.mark.parametrize(("dialect", "wanted"), [("harmony", HARMONY), ("think", BLOCKS)])
def test_the_message_ends_the_reasoning_and_the_answer_follows(
    dialect: str, wanted: str, tokens: int
) -> None:
    message = read(said(wanted, dialect, tokens=tokens, message=f" {ENOUGH}\n"), dialect)
    own, _, rest = message.reasoning.partition("\n\n")
    assert (THOUGHT.startswith(own), rest.strip(), message.content) == (True, ENOUGH, "Paris.")


@pytest.mark.parametrize(("dialect", "wanted"), [("harmony", HARMONY), ("think", BLOCKS)])
@pytest.mark.parametrize(
    "limits", [{"tokens": 0}, {"tokens": 500}, {"tokens": 0, "reserve": 3}, {"reserve": 3}]
)
def test_nothing_is_said_where_nothing_is_cut_short(dialect: str, wanted: str, limits: Any) -> None:
    assert said(wanted, dialect, **limits, message=ENOUGH) == said(wanted, dialect, **limits)


def test_the_message_is_said_once_and_not_after_an_answer_has_begun() -> None:
    more = f"<|end|><|start|>assistant<|channel|>analysis<|message|>{THOUGHT * 3}{TO_FINAL}Rome.<|return|>"
    wanted = HARMONY.replace("<|return|>", more)
    assert read(said(wanted, tokens=2, message=ENOUGH)).reasoning.count(ENOUGH) == 1
    assert ENOUGH not in read(said(wanted, tokens=THOUGHT_TOKENS + 1, message=ENOUGH)).reasoning


def test_with_tools_a_call_may_follow_the_message() -> None:
    message = read(
        said(f"<|channel|>analysis<|message|>{THOUGHT}<|end|>{CALL}", tokens=2, tools=["f"], message=ENOUGH)
    )
    assert message.reasoning == f"{THOUGHT[:6]}\n\n{ENOUGH}"
    assert [call.name for call in message.tool_calls] == ["f"]


@pytest.mark.parametrize("dialect", ["harmony", "think"])
@pytest.mark.parametrize("room", range(1, 45))
def test_what_is_kept_for_the_answer_is_kept_from_the_message_too(dialect: str, room: int) -> None:
    words = tokenizer(dialect)
    endless = (HARMONY if dialect == "harmony" else BLOCKS).replace(THOUGHT, THOUGHT * 20)
    reply = read(
        said(endless.replace("Paris.", "Paris. " * 9), dialect, room=room, reserve=7, message=ENOUGH), dialect
    )
    if room >= 7 + 8:  # with what opens a block and closes it
        assert len(words.encode(reply.content, control_tokens=True)) >= 6
    if room >= 7 + 8 + 16:
        assert reply.reasoning.strip().endswith(ENOUGH)


@pytest.mark.parametrize("name", [name for name, dialect in DIALECTS.items() if _has_closer(dialect)])
def test_the_message_is_said_in_every_family(name: str) -> None:
    closing = ChannelParser(name, opens_in=Channel.ANALYSIS).reasoning_closer("")
    markers = {part for text in closing for part in re.findall(r"<[^<>]+>|\[[^\[\]]+\]", text)}
    text = said(
        f"{THOUGHT}{''.join(closing)}Paris.",
        name,
        tokens=4,
        opens_in=Channel.ANALYSIS,
        markers=tuple(markers),
        message=ENOUGH,
    )
    message = read(text, name, Channel.ANALYSIS)
    assert message.reasoning.strip() == f"{THOUGHT[:12]}\n\n{ENOUGH}"
    assert message.content == "Paris."


def test_markers_in_the_message_are_text() -> None:
    message = read(said(HARMONY, tokens=2, message="No <|end|>, <|channel|>."))
    assert message.content == "Paris."


# -- what the engine may rely on ----------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["harmony", "think"])
@pytest.mark.parametrize("tools", [(), ("f",)], ids=["alone", "tools"])
@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_said_a_promise_to_leave_tokens_alone_is_kept(
    dialect: str, tools: tuple[str, ...], seed: int
) -> None:
    chance = random.Random(seed)
    words = tokenizer(dialect)
    pieces = [
        *words.special_tokens.values(),
        *("analysis", "commentary", "final", "assistant", " to=functions.f", "abc", "\n", "日本", "\n\n"),
    ]
    tokens, reserve = chance.choice([None, 0, 3, 9]), chance.choice([None, 1, 10])
    held = budget(words, dialect, tokens=tokens, reserve=reserve, room=120, tools=tools)
    reader = ChannelParser(dialect, tools=tools, special_tokens=words.special_tokens)
    reasoned, promised = 0, 0
    for _ in range(120):
        if held is None or reader.ended:
            break
        mask, free = held.allowed_mask(), held.unconstrained_tokens()
        assert (mask is None) == (free > 0)
        assert free >= promised - 1, "it may promise more than before, and never less"
        promised = free
        [token, *_] = words.encode(chance.choice(pieces), control_tokens=True)
        if mask is not None and not mask[token // 32] >> token % 32 & 1:
            at, word = next((at, word) for at, word in enumerate(mask) if word)
            token = 32 * at + (word & -word).bit_length() - 1
        before = reader.is_reasoning
        reader.feed(words.decode([token]), token)
        reasoned += before and reader.is_reasoning and words.decode([token]) not in ("\n", "\n\n")
        held.advance(token)
    if tokens is not None:
        assert reasoned <= tokens + REOPENED_TOKENS
