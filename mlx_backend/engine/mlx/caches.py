"""Prompt prefixes that need not be read again.

The KV cache of a model with sliding windows (gpt-oss) cannot be cut back to an earlier position, so whole
caches are kept as they stood at a checkpoint: the end of the system part, of the history, of the prompt, of
the answer. One rule for every model: the longest kept prefix of a prompt is reused, never a part of one. What
is kept is never changed; a batch copies it when it takes it in. The bytes are bounded, and the least recently
used goes first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class _Kept:
    layers: list[Any]
    nbytes: int


class PrefixCache:
    """Token prefixes and the KV caches that hold them."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._nbytes = 0
        # By the prefix's tokens, written as bytes: comparing two prefixes is then one memcmp.
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """What is kept, in bytes."""
        return self._nbytes

    @property
    def enabled(self) -> bool:
        """Whether anything is ever kept."""
        return self._max_bytes > 0

    def longest(self, prompt: Sequence[int]) -> tuple[int, list[Any] | None]:
        """Find the longest kept prefix that leaves at least the last token to be read."""
        tokens = _as_bytes(prompt[:-1])
        best = max((key for key in self._kept if tokens.startswith(key)), key=len, default=None)
        if best is None:
            return 0, None
        self._kept.move_to_end(best)
        return len(best) // 4, self._kept[best].layers

    def has(self, tokens: Sequence[int]) -> bool:
        """Whether exactly this prefix is kept; it then counts as used."""
        key = _as_bytes(tokens)
        if key in self._kept:
            self._kept.move_to_end(key)
            return True
        return False

    def keep(self, tokens: Sequence[int], layers: list[Any]) -> None:
        """Keep the KV cache of a prefix, unless it alone is too large."""
        nbytes = sum(layer.nbytes for layer in layers)
        if nbytes > self._max_bytes:
            return
        # Evaluated now, or it would hold on to the whole batch it was cut from.
        mx.eval([layer.state for layer in layers])
        key = _as_bytes(tokens)
        replaced = self._kept.pop(key, None)
        self._nbytes += nbytes - (replaced.nbytes if replaced else 0)
        self._kept[key] = _Kept(layers, nbytes)
        while self._nbytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._nbytes -= oldest.nbytes

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self._nbytes = 0


def _as_bytes(tokens: Sequence[int]) -> bytes:
    return array("I", tokens).tobytes()
