"""A model's tokens as a grammar sees them: what each one spells, which of them steer, and masks over them.

A mask has one bit for every token, 32 to a word, lowest bit first, and is handed out as a memoryview of words:
a sequence of ints that can also be read as a buffer, without a copy. Masks that do not change are made once
and stay the same object.
"""

from __future__ import annotations

from functools import cached_property
from threading import RLock
from typing import TYPE_CHECKING

from mlx_backend.constraints.errors import GrammarError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from llguidance import LLTokenizer

    from mlx_backend.engine.base import Tokenizer

type Words = memoryview[int]

MAX_TOKENS = 1_000_000  # models have up to 262,144; what is made for each token takes memory
MAX_BREAKS = 2


class Vocabulary:
    """The tokens of one model. Everything large is made when it is first asked for, and once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.special: Mapping[int, str] = tokenizer.special_tokens
        self.ids = {text: token for token, text in self.special.items() if text}
        self._lock = RLock()
        self._masks: dict[frozenset[int], Words] = {}

    def build(self) -> None:
        """Make what is large, unless it is there. Takes a second for 200,000 tokens."""
        with self._lock:
            _ = self.tokens, self._text, self.breaks, self.grammar_tokenizer

    @property
    def built(self) -> bool:
        """Whether that was made."""
        return "grammar_tokenizer" in vars(self)

    def encode(self, text: str) -> list[int]:
        """Tokenise text in which markers are the dialect's own."""
        return self.tokenizer.encode(text, control_tokens=True)

    def spell(self, text: str) -> list[int]:
        """Tokenise text that people wrote: a marker in it is text."""
        return self.tokenizer.encode(text, control_tokens=False)

    def only(self, tokens: Iterable[int]) -> Words:
        """Return the mask of these tokens and no others."""
        return self._words(self._with(bytearray(self._size), tokens))

    def text_and(self, tokens: Iterable[int]) -> Words:
        """Return the mask of all text and of these control tokens: the same object for the same tokens."""
        key = frozenset(tokens)
        mask = self._masks.get(key)
        if mask is None:
            mask = self._words(self._with(bytearray(self._text), key))
            self._masks[key] = mask
        return mask

    def without(self, mask: Words, tokens: Iterable[int]) -> Words:
        """Return a mask without these tokens."""
        bits = bytearray(mask.cast("B"))
        for token in tokens:
            bits[token >> 3] &= ~(1 << (token & 7))
        return self._words(bits)

    def text_of(self, mask: bytes) -> bytes:
        """Return what is text of a mask."""
        both = int.from_bytes(mask, "little") & int.from_bytes(self._text, "little")
        return both.to_bytes(self._size, "little")

    @property
    def end(self) -> int:
        """The token that stands for the end in llguidance's masks, whatever ends a reply here."""
        return next(iter(self.special))

    @cached_property
    def tokens(self) -> Sequence[bytes]:
        """What every token spells."""
        size = self.tokenizer.vocabulary_size
        if size > MAX_TOKENS:
            raise GrammarError(
                f"Replies cannot be held to a grammar with this model: its vocabulary of {size} tokens is larger "
                f"than {MAX_TOKENS}."
            )
        if not self.special:
            raise GrammarError(
                "Replies cannot be held to a grammar with this model: its tokenizer names no control token, so "
                "the end of a reply cannot be told from text."
            )
        return [self.tokenizer.bytes_of(token) for token in range(size)]

    @cached_property
    def breaks(self) -> Mapping[int, int]:
        """The tokens that are line breaks and nothing else, and how many."""
        return {
            token: len(text)
            for token, text in enumerate(self.tokens)
            if text and len(text) <= MAX_BREAKS and not text.strip(b"\n")
        }

    @cached_property
    def grammar_tokenizer(self) -> LLTokenizer:
        """The tokens as llguidance wants them."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Tokens(self)))

    @property
    def _size(self) -> int:
        return (self.tokenizer.vocabulary_size + 31) // 32 * 4

    @cached_property
    def _text(self) -> bytes:
        bits = bytearray(self._size)
        tokens = enumerate(self.tokens)
        return bytes(
            self._with(bits, (token for token, text in tokens if text and token not in self.special))
        )

    @staticmethod
    def _with(bits: bytearray, tokens: Iterable[int]) -> bytearray:
        for token in tokens:
            bits[token >> 3] |= 1 << (token & 7)
        return bits

    @staticmethod
    def _words(bits: bytearray) -> Words:
        return memoryview(bytes(bits)).cast("I")


class _Tokens:
    """What llguidance asks of a tokenizer. It is called to spell forced text only, which is switched off."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = list(vocabulary.special)
        self.eos_token_id = vocabulary.end
        self._spell = vocabulary.spell

    def __call__(self, text: str) -> list[int]:
        return self._spell(text)
