"""The tokens of texts seen before, so that a conversation's next turn tokenises what is new in it.

Tokenising 65,000 tokens took 0.12 seconds of a processor, many times what a decode step takes. A text may be cut in
front of a control token: tokenizers split there before they do anything else, so both parts have the tokens that they
have together. Knows no requests. Safe to use from several threads.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from dataclasses import dataclass
from sys import getsizeof
from typing import TYPE_CHECKING

from mlx_backend.byte_cache import ByteCache
from mlx_backend.common_prefix import common_prefix_length

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mlx_backend.byte_cache import CacheBudget

MIN_LENGTH = 4096  # characters of a text that is worth remembering
MAX_TEXTS = 32  # each is compared with every new one
_INT = "I"  # of 4 bytes; a list of integers takes ten times as much


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    text: str
    tokens: array[int]
    starts: array[int]  # of the control tokens' markers in the text, ascending
    positions: array[int]  # of those control tokens among the tokens

    @property
    def nbytes(self) -> int:
        return sum(map(getsizeof, (self.text, self.tokens, self.starts, self.positions)))


class TextCache:
    """Tokenises texts with `encode`. `control_tokens` are their ids by their markers; without any nothing is cached."""

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        control_tokens: Mapping[str, int],
        caches: CacheBudget | None = None,
    ) -> None:
        self._encode = encode
        self._control_tokens = control_tokens
        self._ids = frozenset(control_tokens.values())
        markers = sorted(control_tokens, key=len, reverse=True)
        self._longest = len(markers[0]) if markers else 0
        self._pattern = re.compile("|".join(map(re.escape, markers)))
        self._known: ByteCache[str, _Known] = ByteCache(caches)

    def encode(self, text: str) -> list[int]:
        """Return a text's tokens."""
        if not self._control_tokens or len(text) < MIN_LENGTH:
            return self._encode(text)
        known: _Known | None = None  # a text that begins alike,
        count = 0  # and how many of its control tokens can be taken over
        for each in self._known.values():
            # Behind a marker, what is in common has to go on for long enough that it cannot be part of a longer one.
            common = common_prefix_length(each.text, text) - self._longest
            if (found := bisect_right(each.starts, common)) > count:
                known, count = each, found
        if known is None:
            tokens = self._encode(text)
            self._remember(_Known(text, array(_INT, tokens), array(_INT), array(_INT)), tokens, 0, 0)
            return tokens
        start, position = known.starts[count - 1], known.positions[count - 1]
        before, new = known.tokens[:position], self._encode(text[start:])
        tokens = before.tolist() + new
        packed = before + array(_INT, new)  # packing all tokens once more would take milliseconds
        shared = _Known(text, packed, known.starts[: count - 1], known.positions[: count - 1])
        self._remember(shared, tokens, start, position)
        if text != known.text and text.startswith(known.text) and self._known.find(text) is not None:
            self._known.drop(known.text)  # it is not needed beside what continues it
        else:
            self._known.find(known.text)  # which counts as a use
        return tokens

    def _remember(self, known: _Known, tokens: list[int], start: int, position: int) -> None:
        """Cache a text once its control tokens are found; those before `start`, or `position`, are already."""
        matches = list(self._pattern.finditer(known.text, start))
        found = [at for at in range(position, len(tokens)) if tokens[at] in self._ids]
        if [self._control_tokens[match.group()] for match in matches] != [tokens[at] for at in found]:
            return  # the tokenizer finds others than are written, so they cannot be matched
        known.starts.extend(match.start() for match in matches)
        known.positions.extend(found)
        self._known.put(known.text, known, known.nbytes)
        for oldest in self._known.values()[:-MAX_TEXTS]:
            self._known.drop(oldest.text)
