"""Masks over the next token, and what a reasoning budget asks of a dialect: closing reasoning, and keeping it closed.

A mask has 32 tokens to a word, the lowest bit first, a set bit for a token that is allowed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

type Mask = memoryview[int]


def only(size: int, tokens: Iterable[int]) -> Mask:
    """Return the mask of these tokens and no others, in a vocabulary of this size."""
    return including(bytes((size + 31) // 32 * 4), tokens)


def all_but(size: int, tokens: Iterable[int]) -> Mask:
    """Return the mask of all tokens but these."""
    return excluding(b"\xff" * ((size + 31) // 32 * 4), tokens)


def including(mask: bytes | Mask, tokens: Iterable[int]) -> Mask:
    """Return a mask with these tokens."""
    bits = bytearray(mask)
    for token in tokens:
        bits[token >> 3] |= 1 << (token & 7)
    return memoryview(bytes(bits)).cast("I")


def excluding(mask: bytes | Mask, tokens: Iterable[int]) -> Mask:
    """Return a mask without these tokens."""
    bits = bytearray(mask)
    for token in tokens:
        bits[token >> 3] &= ~(1 << (token & 7))
    return memoryview(bytes(bits)).cast("I")


def bits_of(mask: Sequence[int]) -> int:
    """Return a mask as one number, whose lowest bit is token 0."""
    if isinstance(mask, memoryview):
        return int.from_bytes(mask.cast("B"), "little")
    return sum(word << 32 * at for at, word in enumerate(mask))


class ReasoningCloser(ABC):
    """Follows one reply. Every token of it goes through `advance`."""

    opening: Sequence[int] = ()
    """Tokens that begin an answer at the beginning of a turn."""
    cost: int
    """Tokens of the longest closing."""
    header = 0
    """Tokens with which reasoning is begun."""

    @abstractmethod
    def closing(self) -> Sequence[int]:
        """Return the tokens that close the open reasoning."""

    @abstractmethod
    def advance(self, token: int | None, *, exhausted: bool) -> None:
        """Take a token (None: the reply begins); `exhausted`: no more reasoning may follow."""

    @abstractmethod
    def allowed_mask(self) -> Mask | None:
        """Return the mask of what may come instead of reasoning, where it might begin; None: anything."""
