"""Guesses at the next tokens, for a decoder to check: from the text itself, or from a smaller model.

A guess costs time and can change nothing (decoding.py). Knows nothing of batches or requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

if TYPE_CHECKING:
    from collections.abc import Sequence


class Drafter(Protocol):
    """Drafts for one reply."""

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Guess what follows `tokens`, the prompt and the reply so far: at most so many, none if it has no idea."""
        ...


class TextDrafter:
    """What followed the last tokens when they stood in the text before (prompt lookup, Saxena 2023).

    Answers that quote (code that is edited, tool results, summaries) are full of such places.
    """

    LENGTH = 3

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}  # the last place behind each run of LENGTH tokens
        self._read = 0

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Guess from the text."""
        length = self.LENGTH
        for end in range(max(self._read, length), len(tokens)):
            self._after[tuple(tokens[end - length : end])] = end
        self._read = len(tokens)
        if len(tokens) < length:
            return []
        found = self._after.get(tuple(tokens[-length:]))
        return [] if found is None else list(tokens[found : found + most])


class ModelDrafter:
    """What a smaller model with the same vocabulary would say, greedily; it knows no ids from `tokens_known` up."""

    CHUNK = 512

    def __init__(self, network: Any, tokens_known: int) -> None:
        self._network = network
        self._tokens_known = tokens_known
        self._layers = draft_layers(network)
        self._read: list[int] = []  # the tokens in its cache

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Guess with the model; reads what it does not know yet, and for that alone it may need some calls."""
        same = _common(self._read, tokens[:-1])
        if excess := len(self._read) - same:
            for layer in self._layers:
                layer.trim(excess)
            del self._read[same:]
        fresh = list(tokens[same:])
        if max(fresh) >= self._tokens_known:
            return []
        if len(fresh) > self.CHUNK:
            piece = fresh[: self.CHUNK]
            self._network(mx.array([piece]), cache=self._layers)
            mx.eval([layer.state for layer in self._layers])
            self._read += piece
            return []
        drafts: list[mx.array] = []
        inputs = mx.array([fresh])
        for _ in range(most):
            logits = self._network(inputs, cache=self._layers)[:, -1, : self._tokens_known]
            token = mx.argmax(logits, axis=-1)
            drafts.append(token)
            inputs = token[:, None]
        guessed: list[int] = mx.concatenate(drafts).tolist()  # type: ignore[assignment]
        self._read += fresh + guessed[:-1]
        return guessed


def draft_layers(network: Any) -> list[Any]:
    """Make a draft model's caches. Windows are kept whole: it is small, and so they can be rewound anywhere."""
    return [
        KVCache() if isinstance(layer, RotatingKVCache) else layer for layer in make_prompt_cache(network)
    ]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))
