"""What a budget allows is what the usage reports: never more, in any dialect, however its markers are written."""

import codecs
import random

import pytest
from byte_tokenizer import ByteTokenizer
from scripted_engine import HARMONY_MARKERS
from test_reasoning_closers import OPENED

from mlx_backend.constraints.reasoning_budget import ReasoningBudgets
from mlx_backend.constraints.reasoning_count import ReasoningCount
from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.conversation.events import Channel, ReasoningDelta
from mlx_backend.conversation.parser import ChannelParser

HARMONY = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>")
REASONING = [dialect for dialect in DIALECTS.values() if dialect.blocks or dialect.name == "harmony"]
PIECES = ("abc", "de ", "日本語", "😀", "\n", "\n\n", "<", "</", "é", ". ", "<b>", "[", "analysis")
END = "<|im_end|>"


class PairTokenizer(ByteTokenizer):
    """Tokens are of two bytes: they begin and end in the middle of characters and of markers that are no tokens."""

    PIECE = 2
    _SIZES = (256, 256**2)  # type: ignore[assignment]  # a vocabulary with pieces of two lengths


def reported(
    dialect: str, tokenizer: type[ByteTokenizer], budget: int, chance: random.Random
) -> tuple[int, int]:
    """Return how many tokens of reasoning the usage reports of a random thought, and how many it had at most."""
    opener, closer = (
        HARMONY if dialect == "harmony" else OPENED.get(DIALECTS[dialect].name, ("<think>\n", "</think>"))
    )
    markers = tuple(dict.fromkeys((opener.strip(), closer.strip(), END)))
    if dialect == "harmony":
        markers = (*HARMONY_MARKERS, END)
    elif chance.random() < 0.5:
        markers = (END,)  # the others are spelt
    words = tokenizer(markers)
    is_opened = chance.random() < 0.5
    prompt = words.encode("assistant\n" + opener * is_opened, control_tokens=True)
    opens_in = Channel.ANALYSIS if is_opened else None
    thought = "".join(chance.choices(PIECES, k=chance.randrange(15)))
    text = opener * (not is_opened) + thought + chance.choice(("", "\n")) + closer
    script = words.encode(text + END, control_tokens=True)
    held = ReasoningBudgets(words, DIALECTS[dialect]).start(prompt, opens_in, room=400, tokens=budget)
    assert held is not None
    parser = ChannelParser(dialect, opens_in=opens_in, special_tokens=words.special_tokens)
    count = ReasoningCount(words.special_tokens)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for _ in range(400):
        mask = held.allowed_mask()
        if not script or parser.ended:
            break
        token = script[0]
        if mask is None or mask[token // 32] >> token % 32 & 1:
            script.pop(0)
        else:
            at, word = next((at, word) for at, word in enumerate(mask) if word)
            token = 32 * at + (word & -word).bit_length() - 1
        piece = words.special_tokens.get(token) or decoder.decode(words.bytes_of(token))
        if token in words.special_tokens:
            decoder.reset()
        was_reasoning = parser.is_reasoning
        events = parser.feed(piece, token)
        count.add(token, piece, events, was_reasoning=was_reasoning, is_reasoning=parser.is_reasoning)
        held.advance(token)
    count.close(is_reasoning=parser.is_reasoning)
    return count.counted, len(words.encode(thought, control_tokens=True))


@pytest.mark.parametrize("tokenizer", [ByteTokenizer, PairTokenizer])
@pytest.mark.parametrize("dialect", [dialect.name for dialect in REASONING])
def test_never_more_tokens_are_reported_than_the_budget_allows(
    dialect: str, tokenizer: type[ByteTokenizer]
) -> None:
    chance = random.Random(dialect)
    spent = 0
    for budget in (0, 1, 2, 3, 6) * 4:
        counted, thought = reported(dialect, tokenizer, budget, chance)
        assert counted <= budget
        spent += counted == budget and thought > budget
    assert spent, "some have been cut"


def count_of(*tokens: tuple[str, str], closes: bool = False) -> int:
    """Count tokens of open reasoning, each with its text and what was shown of the reasoning with it."""
    count = ReasoningCount({})
    for at, (text, shown) in enumerate(tokens):
        events = [ReasoningDelta(shown)] if shown else []
        is_last = closes and at == len(tokens) - 1
        count.add(1, text, events, was_reasoning=True, is_reasoning=not is_last)
    count.close(is_reasoning=not closes)
    return count.counted


def test_a_token_counts_once_any_of_its_text_is_reasoning() -> None:
    assert count_of(("a", "a"), ("b", "b")) == 2
    assert count_of(("a<", "a"), ("b", "<b")) == 2
    assert count_of(("<", ""), ("/", ""), ("b", "</b")) == 3


def test_what_closes_reasoning_does_not_count() -> None:
    assert count_of(("a", "a"), ("\n", ""), ("</", ""), ("think>", ""), closes=True) == 1
    assert count_of(("a<", "a"), ("\n", "<"), ("</think>", ""), closes=True) == 1
    assert count_of(("", ""), ("\ufffd\n", "\ufffd"), ("</think>", ""), closes=True) == 1


def test_the_tokens_of_a_character_that_is_cut_count() -> None:
    assert count_of(("a", "a"), ("", ""), ("", "")) == 3
    assert count_of(("", ""), ("", ""), ("日", "日")) == 3
