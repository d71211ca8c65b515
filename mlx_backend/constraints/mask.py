"""Masks over the next token: 32 tokens to a word, the lowest bit first, a set bit for a token that is allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

type Mask = memoryview[int]


def only(size: int, tokens: Iterable[int]) -> Mask:
    """Return the mask of these tokens and no others."""
    return _mask(size, tokens, allowed=True)


def all_but(size: int, tokens: Iterable[int]) -> Mask:
    """Return the mask of all tokens but these."""
    return _mask(size, tokens, allowed=False)


def _mask(size: int, tokens: Iterable[int], *, allowed: bool) -> Mask:
    bits = bytearray((b"\x00" if allowed else b"\xff") * ((size + 31) // 32 * 4))
    for token in tokens:
        bits[token >> 3] ^= 1 << (token & 7)
    return memoryview(bytes(bits)).cast("I")


def bits_of(mask: Sequence[int]) -> int:
    """Return a mask as one number, whose lowest bit is token 0."""
    if isinstance(mask, memoryview):
        return int.from_bytes(mask.cast("B"), "little")
    return sum(word << 32 * at for at, word in enumerate(mask))
