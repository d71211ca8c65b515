"""How a request's next token is chosen: `Sampling` to the callables that a batch runs.

Two things decide the shape of this module. A batch whose rows share one sampler *object* is sampled in one
call, so requests with equal parameters and no seed get the same object. And an exception inside a batch
corrupts everybody in it, so every callable is guarded: what it raises is kept for its own request.

Randomness comes from keys of our own, split for every draw: MLX's global random state belongs to a thread and
starts with the same numbers in each.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ..base import Sampling

    type Sampler = Callable[[mx.array], mx.array]
    type Processor = Callable[[mx.array, mx.array], mx.array]

GREEDY_BELOW = 1e-4  # a temperature so low that the division overflows before it changes a choice


class Guard[**P]:
    """A callable that never raises.

    The first error is kept and `otherwise` answers from then on (a sampler chooses greedily, a processor
    changes nothing), until the batch has dropped the request.
    """

    def __init__(self, call: Callable[P, mx.array], otherwise: Callable[P, mx.array]) -> None:
        self._call = call
        self._otherwise = otherwise
        self.error: Exception | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> mx.array:
        """Answer, whatever happens."""
        if self.error is None:
            try:
                return self._call(*args, **kwargs)
            except Exception as error:
                self.error = error
        return self._otherwise(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a batch needs to choose one request's tokens."""

    sampler: Guard[[mx.array]]
    processors: tuple[Guard[[mx.array, mx.array]], ...] = ()

    @property
    def error(self) -> Exception | None:
        """What went wrong while choosing, if anything did."""
        errors = [self.sampler.error, *(guard.error for guard in self.processors)]
        return next((error for error in errors if error is not None), None)


def greedy(logprobs: mx.array) -> mx.array:
    """Choose the likeliest."""
    return mx.argmax(logprobs, axis=-1)


def unchanged(_tokens: mx.array, logits: mx.array) -> mx.array:
    """Process nothing."""
    return logits


class Chooser:
    """Makes choices for one engine; lives on the engine thread, where its keys live."""

    def __init__(self, vocabulary_size: int, special: Collection[int]) -> None:
        text = mx.ones(vocabulary_size)
        if inside := [token for token in special if token < vocabulary_size]:
            text[mx.array(inside)] = 0.0
        self._text = text  # 1 for text, 0 for control tokens
        mx.eval(text)
        self._shared = lru_cache(maxsize=64)(self._make_shared)

    def __call__(self, sampling: Sampling, prompt_length: int) -> Choice:
        """Make the choice for a request whose output begins after `prompt_length` tokens."""
        if sampling.temperature < GREEDY_BELOW or sampling.top_p == 0:
            sampler = self._shared(0.0, 1.0, 0, 0.0)
        elif sampling.seed is None:
            sampler = self._shared(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
        else:
            key = mx.random.key(sampling.seed % 2**64)
            draw = Draw(key, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
            sampler = Guard(draw, greedy)
        processors = self._processors(sampling, prompt_length)
        return Choice(sampler, tuple(Guard(each, unchanged) for each in processors))

    def _make_shared(self, temperature: float, top_p: float, top_k: int, min_p: float) -> Guard[[mx.array]]:
        if temperature == 0:
            return Guard(greedy, greedy)
        key = mx.random.key(int.from_bytes(os.urandom(8)))
        return Guard(Draw(key, temperature, top_p, top_k, min_p), greedy)

    def _processors(self, sampling: Sampling, prompt_length: int) -> list[Processor]:
        processors: list[Processor] = []
        if sampling.logit_bias:
            processors.append(bias(dict(sampling.logit_bias)))
        if sampling.repetition_penalty != 1.0:
            processors.append(repetition(sampling.repetition_penalty, self._text))
        if sampling.presence_penalty or sampling.frequency_penalty:
            presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
            processors.append(presence_and_frequency(presence, frequency, prompt_length, self._text))
        return processors


class Draw:
    """Draw from what top_p, min_p and top_k leave; the temperature comes last, as in mlx-lm."""

    def __init__(self, key: mx.array, temperature: float, top_p: float, top_k: int, min_p: float) -> None:
        self._key = key
        self._temperature = temperature
        self._top_p = top_p
        self._top_k = top_k
        self._min_p = min_p

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Draw one token for every row."""
        self._key, key = mx.random.split(self._key)
        logprobs = logprobs.astype(mx.float32)
        if self._top_p < 1:
            logprobs = keep_top_p(logprobs, self._top_p)
        if self._min_p > 0:
            logprobs = keep_min_p(logprobs, self._min_p)
        if 0 < self._top_k < logprobs.shape[-1]:
            logprobs = keep_top_k(logprobs, self._top_k)
        return mx.random.categorical(logprobs / self._temperature, key=key)


def keep_top_p(logprobs: mx.array, top_p: float) -> mx.array:
    """Keep the likeliest tokens until their probabilities add up to top_p; always at least one."""
    ascending = mx.sort(logprobs, axis=-1)
    probabilities = mx.exp(ascending)
    above = mx.cumsum(probabilities, axis=-1, reverse=True, inclusive=False)
    dropped = mx.sum(above >= top_p, axis=-1, keepdims=True)
    dropped = mx.minimum(dropped, logprobs.shape[-1] - 1)
    return keep_from(logprobs, mx.take_along_axis(ascending, dropped, axis=-1))


def keep_min_p(logprobs: mx.array, min_p: float) -> mx.array:
    """Keep the tokens at least min_p times as likely as the likeliest."""
    return keep_from(logprobs, mx.max(logprobs, axis=-1, keepdims=True) + mx.log(mx.array(min_p)))


def keep_top_k(logprobs: mx.array, top_k: int) -> mx.array:
    """Keep the k likeliest tokens (and those just as likely as the last of them)."""
    least = mx.min(mx.topk(logprobs, top_k, axis=-1), axis=-1, keepdims=True)
    return keep_from(logprobs, least)


def keep_from(logprobs: mx.array, threshold: mx.array) -> mx.array:
    """Rule out everything less likely than the threshold."""
    return mx.where(logprobs < threshold, -mx.inf, logprobs)


def bias(biases: dict[int, float]) -> Processor:
    """Add to the logits of single tokens; 100 all but forces a token, -100 bans it."""
    tokens, values = mx.array(list(biases)), mx.array(list(biases.values()))

    def processor(_tokens: mx.array, logits: mx.array) -> mx.array:
        return logits.at[:, tokens].add(values.astype(logits.dtype))

    return processor


def repetition(penalty: float, text: mx.array) -> Processor:
    """Make every text token of prompt and output less likely, by a factor (Keskar et al., 2019)."""

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        seen = mx.zeros(logits.shape[-1]).at[tokens].maximum(1.0) * text > 0
        return mx.where(seen, mx.where(logits < 0, logits * penalty, logits / penalty), logits)

    return processor


def presence_and_frequency(presence: float, frequency: float, start: int, text: mx.array) -> Processor:
    """OpenAI's penalties: for having been said at all, and for every time it was said, in the output so far.

    Control tokens are exempt here and above: a model punished for closing a message never closes the next.
    """

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        counts = mx.zeros(logits.shape[-1]).at[tokens[start:]].add(1.0) * text
        penalties = counts * frequency + (counts > 0) * presence
        return (logits - penalties).astype(logits.dtype)

    return processor
