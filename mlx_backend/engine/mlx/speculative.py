"""Drafters for speculative decoding: they guess the next tokens from the text itself, or with a smaller model.

A guess costs time and can never change a reply: decode.py verifies it. Knows nothing of batches or requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

if TYPE_CHECKING:
    from collections.abc import Sequence


class Drafter(Protocol):
    """Drafts for one reply."""

    def propose(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        """Guess what follows `tokens`, the prompt and the reply so far; return at most `max_drafts` tokens."""
        ...


class TextDrafter:
    """Prompt lookup (Saxena 2023): what followed the last tokens where they stood in the text before.

    Answers that quote (code that is edited, tool results, summaries) have many such passages.
    """

    NGRAM = 3

    def __init__(self) -> None:
        self._end_of: dict[tuple[int, ...], int] = {}  # the last position after each n-gram
        self._indexed = 0

    def propose(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        """Guess from the text."""
        length = self.NGRAM
        for end in range(max(self._indexed, length), len(tokens)):
            self._end_of[tuple(tokens[end - length : end])] = end
        self._indexed = len(tokens)
        if len(tokens) < length:
            return []
        end_before = self._end_of.get(tuple(tokens[-length:]))
        return [] if end_before is None else list(tokens[end_before : end_before + max_drafts])


class ModelDrafter:
    """What a smaller model with the same vocabulary generates greedily. It knows the ids below `num_tokens`."""

    CHUNK = 512

    def __init__(self, network: Any, num_tokens: int) -> None:
        self._network = network
        self._num_tokens = num_tokens
        self._layers = draft_layers(network)
        self._cached: list[int] = []  # the tokens in its caches

    def propose(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        """Guess with the model. While it still has to prefill the text, a chunk in each call, it proposes nothing."""
        same = _common_prefix_length(self._cached, tokens[:-1])
        if excess := len(self._cached) - same:
            for layer in self._layers:
                layer.trim(excess)
            del self._cached[same:]
        fresh = list(tokens[same:])
        if max(fresh) >= self._num_tokens:
            return []
        if len(fresh) > self.CHUNK:
            chunk = fresh[: self.CHUNK]
            self._network(mx.array([chunk]), cache=self._layers)
            mx.eval([layer.state for layer in self._layers])
            self._cached += chunk
            return []
        drafts: list[mx.array] = []
        inputs = mx.array([fresh])
        for _ in range(max_drafts):
            logits = self._network(inputs, cache=self._layers)[:, -1, : self._num_tokens]
            token = mx.argmax(logits, axis=-1)
            drafts.append(token)
            inputs = token[:, None]
        guessed: list[int] = mx.concatenate(drafts).tolist()  # type: ignore[assignment]
        self._cached += fresh + guessed[:-1]
        return guessed


def draft_layers(network: Any) -> list[Any]:
    """Return empty caches for a draft model. It is small, so windows are kept whole and can be rewound anywhere."""
    return [
        KVCache() if isinstance(layer, RotatingKVCache) else layer for layer in make_prompt_cache(network)
    ]


def _common_prefix_length(one: Sequence[int], other: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))
