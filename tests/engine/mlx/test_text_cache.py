"""Texts that continue others are tokenised from where they part, and get the tokens that they would get whole."""

import gc
import random
import tracemalloc
from collections.abc import Callable

import pytest
from engine_models import byte_level, sentencepiece, words_and_markers
from tokenizers import Tokenizer

from mlx_backend.byte_cache import CacheBudget
from mlx_backend.common_prefix import common_prefix_length
from mlx_backend.engine.mlx import tokenizer
from mlx_backend.engine.mlx.tokenizer import TextCache

KINDS: list[Callable[[], Tokenizer]] = [byte_level, sentencepiece, words_and_markers]


@pytest.fixture(autouse=True)
def short_texts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "MIN_LENGTH", 1)


class Counted:
    """Tokenises, and counts characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.characters = 0
        self.markers = {each.content: at for at, each in tokenizer.get_added_tokens_decoder().items()}

    def __call__(self, text: str) -> list[int]:
        self.characters += len(text)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def conversation(markers: list[str], rng: random.Random) -> str:
    pieces = [*markers, "hello", " world", "  ", "\n", "é", "日本", "<|", "|>", "<|st", "12"]
    return "".join(rng.choices(pieces, k=rng.randrange(1, 40)))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_same_wherever_two_texts_part(kind: Callable[[], Tokenizer]) -> None:
    plain, counted = Counted(kind()), Counted(kind())
    markers, rng = sorted(plain.markers), random.Random(1)
    cache = TextCache(counted, counted.markers)
    for _ in range(60):
        text, other = conversation(markers, rng), conversation(markers, rng)
        cache.encode(text)
        for cut in range(0, len(text) + 1, 3):
            changed = text[:cut] + other
            assert cache.encode(changed) == plain(changed)
            assert cache.encode(changed) == plain(changed)


def test_the_next_turn_tokenises_what_is_new() -> None:
    counted = Counted(byte_level())
    marker = max(counted.markers, key=len)
    cache = TextCache(counted, counted.markers)
    history = ""
    for turn in range(20):
        history += f"{marker}a turn of some words, number {turn} of many"
        before = counted.characters
        cache.encode(history)
        assert counted.characters - before <= 2 * (len(marker) + 50)
    before = counted.characters
    cache.encode(history[:300] + marker)
    assert counted.characters - before < 150, "an edit is tokenised from where it is"


def test_what_is_remembered_is_bounded_and_cannot_be_changed_from_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizer, "MAX_TEXTS", 3)
    counted, budget = Counted(byte_level()), CacheBudget(20_000)
    marker = max(counted.markers, key=len)
    cache = TextCache(counted, counted.markers, budget)
    for size in (10, 20, 30, 40, 400, 700, 2000):
        text = f"{size}{marker}" * size
        cache.encode(text).clear()
        assert cache.encode(text) == counted(text)
        assert len(cache._known) <= 3
        assert budget.nbytes <= 10_000


def test_a_long_text_is_remembered_in_a_few_bytes_for_each_token() -> None:
    """A list of integers would take forty for each, and a long conversation leave no room for others."""
    counted, budget = Counted(byte_level()), CacheBudget(1 << 30)
    marker = max(counted.markers, key=len)
    cache = TextCache(counted, counted.markers, budget)
    text = "".join(f"{marker}some words of turn {number} " * 50 for number in range(200))
    tracemalloc.start()
    try:
        tokens = len(cache.encode(text))
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert tokens > 100_000
    assert held < 6 * tokens, "the text itself was there before"
    assert budget.nbytes == pytest.approx(held + len(text), rel=0.2)


def test_common_lengths() -> None:
    for one, other, length in (("", "a", 0), ("abc", "abd", 2), ("ab", "abcd", 2), ("日本語", "日本", 2)):
        assert common_prefix_length(one, other) == length


@pytest.mark.parametrize("end", ["", "other", "other" * 1000], ids=["a beginning", "parts", "parts early"])
def test_common_lengths_of_every_size(end: str) -> None:
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 500)))
    for length in range(len(text) + 1):
        assert common_prefix_length(text, text[:length] + end) == length
        assert common_prefix_length((text[:length] + end).encode(), text.encode()) == 3 * length
