"""A model's tokens as a grammar sees them: what each one spells, which are control tokens, and masks over them.

A mask has one bit for every token, 32 to a word, lowest bit first, and is handed out as a memoryview of words:
a sequence of ints that can also be used as a buffer, without a copy. Masks that do not change are made once
and stay the same object.
"""

from __future__ import annotations

import re
from functools import cached_property
from threading import RLock
from typing import TYPE_CHECKING

from mlx_backend.constraints.errors import GrammarError
from mlx_backend.constraints.mask import including, only
from mlx_backend.conversation.dialects.base import END_MARKERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence, Set

    from llguidance import LLTokenizer

    from mlx_backend.constraints.mask import Mask
    from mlx_backend.conversation.dialects.base import Piece
    from mlx_backend.engine.base import Tokenizer

MAX_TOKENS = 1_000_000
"""Tokens of a vocabulary: models have up to 262,144, and what is made for each takes memory."""
MAX_LINE_BREAKS = 2
"""Line breaks in a row, between two parts of a reply."""
_SUFFIX = re.compile(r":[^<>:]+>\Z")


def without_suffix(marker: str) -> str:
    """Return `<think>` for `<think:suffix>`."""
    return _SUFFIX.sub(">", marker)


class Vocabulary:
    """The tokens of one model. Everything large is made once, when it is first needed.

    `ends` are the control tokens that end its family's turns, as those of the model's files do. `has_suffixes`: its
    markers may have a suffix, and `<think>` stands for the token `<think:suffix>` wherever the family's own is meant.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, ends: Set[str] = frozenset(), has_suffixes: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self.special: Mapping[int, str] = tokenizer.special_tokens
        ids = {text: token for token, text in self.special.items() if text}
        self._suffixed = {}
        if has_suffixes:
            self._suffixed = {marker: text for text in ids if (marker := without_suffix(text)) not in ids}
        self.ids = ids | {marker: ids[text] for marker, text in self._suffixed.items()}
        own_ends = {self.special[token] for token in tokenizer.end_tokens if token in self.special}
        self.ends = frozenset((END_MARKERS | ends | own_ends) & ids.keys())
        """The control tokens that end a turn."""
        self._lock = RLock()
        self._masks: dict[frozenset[int], Mask] = {}

    def build(self) -> None:
        """Make everything large, unless it is there. Takes a second for 200,000 tokens."""
        with self._lock:
            _ = self.tokens, self._text, self.line_breaks, self.grammar_tokenizer

    def encode(self, text: str) -> list[int]:
        """Tokenise text in which markers are the dialect's own."""
        for marker, suffixed in self._suffixed.items():
            text = text.replace(marker, suffixed)
        return self.tokenizer.encode(text, control_tokens=True)

    def encode_text(self, text: str) -> list[int]:
        """Tokenise text that people wrote: a marker in it is text."""
        return self.tokenizer.encode(text, control_tokens=False)

    def encode_pieces(self, pieces: Iterable[Piece]) -> list[int]:
        """Tokenise what a dialect writes. Its markers have to be control tokens here."""
        tokens: list[int] = []
        for piece in pieces:
            tokens += [self.ids[piece.text]] if piece.marker else self.encode_text(piece.text)
        return tokens

    def mask_of(self, tokens: Iterable[int]) -> Mask:
        """Return the mask of these tokens and no others."""
        return only(self.tokenizer.vocabulary_size, tokens)

    def text_and(self, tokens: Iterable[int]) -> Mask:
        """Return the mask of all text and of these control tokens: the same object for the same tokens."""
        key = frozenset(tokens)
        mask = self._masks.get(key)
        if mask is None:
            mask = self._masks[key] = including(self._text, key)
        return mask

    @cached_property
    def end_token(self) -> int:
        """The token that stands for the end in llguidance's masks: one that no grammar holds, if there is one."""
        ends = (token for token, text in self.special.items() if text in self.ends)
        return next(ends, next(iter(self.special)))

    @cached_property
    def tokens(self) -> Sequence[bytes]:
        """What every token spells."""
        size = self.tokenizer.vocabulary_size
        if size > MAX_TOKENS:
            raise GrammarError(
                f"Replies of this model cannot be constrained to a grammar: its vocabulary of {size} tokens is larger "
                f"than {MAX_TOKENS}."
            )
        if not self.special:
            raise GrammarError(
                "Replies of this model cannot be constrained to a grammar: its tokenizer names no control token, so "
                "the end of a reply cannot be told from text."
            )
        return [self.tokenizer.bytes_of(token) for token in range(size)]

    @cached_property
    def line_breaks(self) -> Mapping[int, int]:
        """The tokens that are line breaks and nothing else, and how many each has."""
        return {
            token: len(text)
            for token, text in enumerate(self.tokens)
            if text and len(text) <= MAX_LINE_BREAKS and not text.strip(b"\n")
        }

    @cached_property
    def grammar_tokenizer(self) -> LLTokenizer:
        """The tokens as llguidance wants them."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Tokens(self)))

    @cached_property
    def _text(self) -> Mask:
        tokens = enumerate(self.tokens)
        return self.mask_of(token for token, text in tokens if text and token not in self.special)


class _Tokens:
    """The tokenizer that llguidance wants. It is called only to tokenise forced text, which is switched off."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        # llguidance spells control tokens with the byte 255, which no text holds: a token of it is none of them.
        self.tokens = [b"" if b"\xff" in text else text for text in vocabulary.tokens]
        self.special_token_ids = list(vocabulary.special)
        self.eos_token_id = vocabulary.end_token
        self._encode = vocabulary.encode_text

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)
