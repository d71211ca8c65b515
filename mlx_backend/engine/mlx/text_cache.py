"""The tokens of texts seen before, so that a conversation's next turn tokenises what is new in it.

Tokenising 65,000 tokens took 0.12 seconds of a processor, many times what a decode step takes. A text may be cut in
front of a control token: tokenizers split there before they do anything else, so both parts have the tokens that they
have together. Knows no requests. Safe to use from several threads.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_backend.engine.mlx.common_prefix import common_prefix_length

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MIN_LENGTH = 4096  # characters of a text that is worth remembering
MAX_CHARACTERS = 4 << 20  # of all texts together; their tokens take up to ten times as much
MAX_TEXTS = 32


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    text: str
    tokens: list[int]
    starts: list[int]  # of the control tokens' markers in the text, ascending
    positions: list[int]  # of those control tokens among the tokens


class TextCache:
    """Tokenises texts with `encode`. `control_tokens` are their ids by their markers; without any nothing is cached."""

    def __init__(self, encode: Callable[[str], list[int]], control_tokens: Mapping[str, int]) -> None:
        self._encode = encode
        self._control_tokens = control_tokens
        self._ids = frozenset(control_tokens.values())
        markers = sorted(control_tokens, key=len, reverse=True)
        self._longest = len(markers[0]) if markers else 0
        self._pattern = re.compile("|".join(map(re.escape, markers)))
        self._lock = threading.Lock()
        self._known: list[_Known] = []  # the least recently used first

    def encode(self, text: str) -> list[int]:
        """Return a text's tokens."""
        if not self._control_tokens or len(text) < MIN_LENGTH:
            return self._encode(text)
        with self._lock:
            every = list(self._known)
        known: _Known | None = None  # a text that begins alike,
        count = 0  # and how many of its control tokens can be taken over
        for each in every:
            # Behind a marker, what is in common has to go on for long enough that it cannot be part of a longer one.
            common = common_prefix_length(each.text, text) - self._longest
            if (found := bisect_right(each.starts, common)) > count:
                known, count = each, found
        if known is None:
            tokens = self._encode(text)
            self._remember(_Known(text, tokens, [], []), 0, 0)
        else:
            start, position = known.starts[count - 1], known.positions[count - 1]
            tokens = known.tokens[:position] + self._encode(text[start:])
            shared = _Known(text, tokens, known.starts[: count - 1], known.positions[: count - 1])
            self._remember(shared, start, position, known)
        return tokens.copy()

    def _remember(self, known: _Known, start: int, position: int, continued: _Known | None = None) -> None:
        """Cache a text once its control tokens are found; those before `start`, or `position`, are already."""
        matches = list(self._pattern.finditer(known.text, start))
        tokens = known.tokens
        found = [at for at in range(position, len(tokens)) if tokens[at] in self._ids]
        if [self._control_tokens[match.group()] for match in matches] != [tokens[at] for at in found]:
            return  # the tokenizer finds others than are written, so they cannot be matched
        known.starts.extend(match.start() for match in matches)
        known.positions.extend(found)
        with self._lock:
            if continued is not None and continued in self._known and known.text.startswith(continued.text):
                self._known.remove(continued)  # it is not needed beside what continues it
            self._known.append(known)
            while (
                sum(len(each.text) for each in self._known) > MAX_CHARACTERS or len(self._known) > MAX_TEXTS
            ):
                self._known.pop(0)
