"""What closes open reasoning in each family: what a budget, or effort none, writes, and what the reader makes of it.

The table is written by hand from the families' own templates: the marker alone, on a line of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mlx_backend.conversation.dialects import DIALECTS, Dialect
from mlx_backend.conversation.events import Channel
from mlx_backend.conversation.parser import ChannelParser, fold

if TYPE_CHECKING:
    from mlx_backend.conversation.events import EndedBy

OPENED = {
    **dict.fromkeys(("mistral", "mistral-list", "mistral-ids"), ("[THINK]", "[/THINK]")),
    "kimi-k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "minimax-m3": ("<mm:think>", "</mm:think>"),
    "seed-oss": ("<seed:think>", "</seed:think>"),
    "longcat": ("<longcat_think>\n", "</longcat_think>"),
    "k2-horizon": ("<ifm|think_fast>", "</ifm|think_fast>"),
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "granite": ("<|thinking|>", "<|/thinking|>"),
    "solar-open": ("<|think|>", "<|end|>"),
}
REASONING = [dialect for dialect in DIALECTS.values() if dialect.blocks]


def _markers(dialect: Dialect) -> tuple[str, str]:
    return OPENED.get(dialect.name, ("<think>\n", "</think>"))


@pytest.mark.parametrize("dialect", REASONING, ids=lambda dialect: dialect.name)
def test_reasoning_that_the_prompt_opened_is_closed_by_its_own_marker(dialect: Dialect) -> None:
    opener, closer = _markers(dialect)
    parser = ChannelParser(dialect, opens_in=dialect.opens_in(f"assistant\n{opener}"))
    events = parser.feed("A thought")
    written = parser.reasoning_closer(f"assistant\n{opener}")
    assert written == ("\n", closer, "\n\n")
    events += [event for text in written for event in parser.feed(text)]
    assert not parser.is_reasoning
    message = fold([*events, *parser.feed("An answer."), *parser.close()])
    assert (message.reasoning, message.content) == ("A thought", "An answer.")


@pytest.mark.parametrize("dialect", REASONING, ids=lambda dialect: dialect.name)
def test_reasoning_that_the_model_opened_is_closed_by_the_marker_that_fits(dialect: Dialect) -> None:
    opener, closer = _markers(dialect)
    parser = ChannelParser(dialect)
    parser.feed(f"{opener}A thought")
    assert parser.reasoning_closer("assistant\n")[1] == closer


@pytest.mark.parametrize("ended_by", ["stop", "length"])
@pytest.mark.parametrize("dialect", REASONING, ids=lambda dialect: dialect.name)
def test_what_a_limit_or_a_stop_ends_in_the_middle_is_kept_where_it_was(
    dialect: Dialect, ended_by: EndedBy
) -> None:
    opener, closer = _markers(dialect)
    for text, meant in (
        (f"{opener}A thought", ("A thought", "")),
        (f"{opener}A thought\n{closer}", ("A thought", "")),
        (f"{opener}A thought\n{closer}\n\nAn ans", ("A thought", "An ans")),
    ):
        parser = ChannelParser(dialect)
        message = fold([*parser.feed(text), *parser.close(ended_by)])
        assert (message.reasoning, message.content, message.finish) == (*meant, ended_by)


def test_a_suffix_of_the_vocabulary_is_part_of_the_closer() -> None:
    tokens = {1: "<think:opensource>", 2: "</think:opensource>"}
    parser = ChannelParser("hunyuan", opens_in=Channel.ANALYSIS, special_tokens=tokens)
    assert parser.reasoning_closer("assistant<think:opensource>") == ("\n", "</think:opensource>", "\n\n")
