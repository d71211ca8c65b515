"""Which dialect a model speaks, what its prompt has opened, and how a begun answer is written."""

from __future__ import annotations

import pytest

from mlx_backend.conversation.dialects import DIALECTS, detect
from mlx_backend.conversation.events import Channel
from mlx_backend.conversation.parser import ChannelParser, fold

CHANNELS = (None, Channel.ANALYSIS, Channel.FINAL)


@pytest.mark.parametrize(
    ("template", "tokens", "dialect"),
    [
        (None, ["<|start|>", "<|channel|>", "<|message|>"], "harmony"),
        ("…<|channel|>analysis<|message|>…", [], "harmony"),
        ("{{ '<think>\\n' }}", ["<|im_end|>"], "think"),
        (None, ["<think>", "</think>"], "think"),
        ("…<tool_call>…", [], "think"),
        ("{% if m.content.startswith('[THINK]') %}", [], "think"),
        ("{{ message.content }}", ["<eos>"], "plain"),
        (None, [], "plain"),
    ],
)
def test_a_dialect_is_told_by_template_and_control_tokens(
    template: str | None, tokens: list[str], dialect: str
) -> None:
    assert detect(template, tokens) is DIALECTS[dialect]


@pytest.mark.parametrize(
    ("dialect", "prompt", "channel"),
    [
        ("harmony", "…<|end|><|start|>assistant", None),
        ("harmony", "<|start|>assistant<|channel|>analysis<|message|>", Channel.ANALYSIS),
        ("harmony", "<|start|>assistant<|channel|>analysis<|message|>So far\n", Channel.ANALYSIS),
        ("harmony", "<|start|>assistant<|channel|>final<|message|>", Channel.FINAL),
        ("harmony", "<|channel|>analysis<|message|>x<|end|><|start|>assistant", None),
        ("harmony", "<|start|>user<|message|>a question", None),
        ("think", "<|im_start|>assistant\n<think>\n", Channel.ANALYSIS),
        ("think", "<|im_start|>assistant\n<think>\n\n</think>\n\n", Channel.FINAL),
        ("think", "<|im_start|>assistant\n", None),
        ("plain", "assistant: <think>", None),
    ],
)
def test_a_prompt_tells_what_it_has_opened(dialect: str, prompt: str, channel: Channel | None) -> None:
    assert DIALECTS[dialect].opens_in(prompt) == channel


@pytest.mark.parametrize("opened", [None, Channel.ANALYSIS])
@pytest.mark.parametrize("content", ["", "Four"])
@pytest.mark.parametrize("reasoning", ["", "Two and two"])
@pytest.mark.parametrize("dialect", ["harmony", "think"])
def test_a_begun_answer_reads_as_what_it_continues(
    dialect: str, reasoning: str, content: str, opened: Channel | None
) -> None:
    """What is written after the prompt, read back, is the begun answer, and leaves us where it says."""
    written = DIALECTS[dialect].continuation(reasoning, content, opened=opened)
    parser = ChannelParser(dialect, opens_in=opened)
    events = [event for piece in written.pieces for event in parser.feed(piece.text)]
    assert written.opens_in == (Channel.FINAL if content else Channel.ANALYSIS if reasoning else opened)
    more = ChannelParser(dialect, opens_in=written.opens_in).feed("!") if written.opens_in else []
    message = fold([*events, *more])
    assert message.content == content + ("!" if written.opens_in is Channel.FINAL else "")
    assert message.reasoning == reasoning + ("!" if written.opens_in is Channel.ANALYSIS else "")


@pytest.mark.parametrize("opened", [None, Channel.ANALYSIS])
@pytest.mark.parametrize("dialect", ["harmony", "think"])
def test_reasoning_that_is_over_is_closed_and_anything_may_follow(
    dialect: str, opened: Channel | None
) -> None:
    written = DIALECTS[dialect].continuation("Two and two", "", opened=opened, closes_reasoning=True)
    parser = ChannelParser(dialect, opens_in=opened)
    message = fold([event for piece in written.pieces for event in parser.feed(piece.text)])
    assert (message.reasoning, message.content) == ("Two and two", "")
    assert written.opens_in is None
    assert DIALECTS[dialect].continuation("Two", "Four", closes_reasoning=True).opens_in is not None


def test_text_of_a_begun_answer_is_no_marker() -> None:
    written = DIALECTS["harmony"].continuation("", "<|end|>")
    assert [piece.text for piece in written.pieces if piece.marker] == ["<|channel|>", "<|message|>"]


def test_a_begun_plain_answer_is_its_text() -> None:
    assert [piece.text for piece in DIALECTS["plain"].continuation("", "Four").pieces] == ["Four"]


@pytest.mark.parametrize("opens_in", CHANNELS)
@pytest.mark.parametrize("dialect", sorted(DIALECTS))
def test_an_empty_turn_is_an_empty_message(dialect: str, opens_in: Channel | None) -> None:
    message = fold(ChannelParser(dialect, opens_in=opens_in).close())
    assert (message.reasoning, message.content, message.tool_calls, message.finish) == ("", "", (), "stop")
