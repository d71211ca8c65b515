"""How the next token of every row is chosen: `Sampling` to one batched choice.

Rows that draw in the same way are drawn in one call, each with a key of its own; rows that differ never mix.
The key of a draw is a function of the request's seed and of the token's place in the reply, of nothing else.
So a seed gives the same text alone, in a crowd and after an interruption, and a draft may be checked against
what *would* have been drawn: speculation is exact for sampled replies as for greedy ones.

What concerns one request alone (penalties, biases, grammars) runs guarded: what it raises is kept for its own
request, whose row goes on unchanged until the batch has dropped it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_backend.engine.base import UNBOUNDED_TOKENS, Logprobs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from mlx_backend.engine.base import GenerationRequest, Sampling

MIN_TEMPERATURE = 1e-4  # a temperature so low that the division overflows before it changes a choice

_SPREAD = 0x9E3779B97F4A7C15  # splitmix64: its increment and its two multipliers (Steele et al., 2014)
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplerParams:
    """How a token is drawn; rows of equal ways are drawn together."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    xtc_probability: float
    xtc_threshold: float

    @classmethod
    def of(cls, sampling: Sampling) -> SamplerParams | None:
        """Read it from a request; None is greedy."""
        if sampling.temperature < MIN_TEMPERATURE or sampling.top_p == 0 or sampling.top_k == 1:
            return None
        return cls(
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            sampling.min_p,
            sampling.xtc_probability,
            sampling.xtc_threshold,
        )


@dataclass(slots=True)
class PenaltyState:
    """What penalties know of a row's text: per token of the vocabulary, 1 if it was seen, and how often said.

    The arrays are never changed, only replaced: an earlier memory stays what it was.
    """

    seen: mx.array
    said: mx.array

    def after(self, token: mx.array) -> PenaltyState:
        """Return the memory of a text that is longer by a token (shape [1]) of the reply."""
        return PenaltyState(self.seen.at[token].maximum(1.0), self.said.at[token].add(1.0))


class RequestSampler:
    """How one request's tokens are chosen, and what went wrong while doing so."""

    def __init__(self, request: GenerationRequest, text: mx.array) -> None:
        sampling = request.sampling
        self.way = SamplerParams.of(sampling)
        self.logprobs = request.logprobs
        self.constraint = request.constraint
        self.error: Exception | None = None
        self._seed = (sampling.seed or 0) & _MASK
        self.text = text
        self._bias: tuple[mx.array, mx.array] | None = None
        if sampling.logit_bias:
            biases = dict(sampling.logit_bias)
            self._bias = mx.array(list(biases)), mx.array(list(biases.values()))
        self._repetition = sampling.repetition_penalty
        self._presence, self._frequency = sampling.presence_penalty, sampling.frequency_penalty
        self._prompt = request.prompt

    def penalty_state(self, reply: Sequence[int]) -> PenaltyState | None:
        """Return what penalties know of the prompt and such a reply; None if there are none."""
        if self._repetition == 1.0 and not self._presence and not self._frequency:
            return None
        nothing = mx.zeros(self.text.shape)
        said = nothing.at[mx.array(list(reply))].add(1.0) if reply else nothing
        return PenaltyState(nothing.at[mx.array([*self._prompt, *reply])].maximum(1.0), said)

    @property
    def plain(self) -> bool:
        """Whether the model's logits are drawn from as they are, penalties aside."""
        return self._bias is None and self.unconstrained_tokens() > 0

    def unconstrained_tokens(self) -> int:
        """Return how many tokens from the next one on are not masked, as far as that is certain. Never raises."""
        if self.constraint is None or self.error is not None:
            return UNBOUNDED_TOKENS
        try:
            return self.constraint.unconstrained_tokens()
        except Exception as error:
            self.error = error
            return UNBOUNDED_TOKENS

    def key(self, place: int) -> tuple[int, int]:
        """Return the key of the draw at this place of the reply."""
        value = (self._seed + (place + 1) * _SPREAD) & _MASK
        for shift, factor in zip((30, 27), _MIX, strict=True):
            value = ((value ^ (value >> shift)) * factor) & _MASK
        value ^= value >> 31
        return value >> 32, value & 0xFFFFFFFF

    def processed(self, logits: mx.array, memory: PenaltyState | None) -> mx.array:
        """Apply what this request asks for to its logits ([1, vocabulary]). Never raises."""
        if self.error is None:
            try:
                return self._processed(logits, memory)
            except Exception as error:
                self.error = error
        return logits

    def advance(self, token: int) -> None:
        """Let the grammar read a token. Never raises."""
        if self.constraint is not None and self.error is None:
            try:
                self.constraint.advance(token)
            except Exception as error:
                self.error = error

    def _processed(self, logits: mx.array, memory: PenaltyState | None) -> mx.array:
        if self._bias is not None:
            tokens, values = self._bias
            logits = logits.at[:, tokens].add(values.astype(logits.dtype))
        if memory is not None:
            logits = self._penalised(logits, memory)
        if self.constraint is not None and (words := self.constraint.allowed_mask()) is not None:
            logits = only(logits, words)
        return logits

    def _penalised(self, logits: mx.array, memory: PenaltyState) -> mx.array:
        # Control tokens are exempt: a model punished for closing a message never closes the next.
        if self._repetition != 1.0:  # Keskar et al., 2019
            scaled = mx.where(logits < 0, logits * self._repetition, logits / self._repetition)
            logits = mx.where(memory.seen * self.text > 0, scaled, logits)
        said = memory.said * self.text
        penalties = said * self._frequency + (said > 0) * self._presence  # OpenAI's two
        return (logits - penalties).astype(logits.dtype)


def only(logits: mx.array, words: Sequence[int]) -> mx.array:
    """Rule out the tokens whose bit is 0 (bit i of word w is token 32 w + i)."""
    bits = mx.array(_as_array(words), dtype=mx.uint32)[:, None] >> mx.arange(32, dtype=mx.uint32)
    allowed = (bits & 1).reshape(-1)[: logits.shape[-1]] > 0
    if allowed.shape[0] < logits.shape[-1]:  # ids that pad the vocabulary are never allowed
        allowed = mx.pad(allowed, (0, logits.shape[-1] - allowed.shape[0]))
    return mx.where(allowed, logits, -mx.inf)


def _as_array(words: Sequence[int]) -> Any:
    """Hand a buffer over as it is: a list of thousands of numbers takes longer than the step."""
    return words if isinstance(words, memoryview) else list(words)


@dataclass(frozen=True, slots=True)
class SamplePosition:
    """One token to be chosen: for whom, where in the reply, and what is known of the text before it."""

    choice: RequestSampler
    at: int
    memory: PenaltyState | None


class StepLogprobs:
    """The log probabilities of one step, for the rows that asked; read once the step has been computed."""

    def __init__(self, logits: mx.array, chosen: mx.array, places: Sequence[SamplePosition]) -> None:
        self._rows = {
            row: at for at, row in enumerate(r for r, p in enumerate(places) if p.choice.logprobs is not None)
        }
        rows = mx.array(list(self._rows))
        logits = logits[rows].astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        self._chosen = mx.take_along_axis(logprobs, chosen[rows][:, None].astype(mx.int32), axis=-1)[:, 0]
        most = max(place.choice.logprobs or 0 for place in places)
        self._tokens: mx.array | None = None
        if most:
            tokens = mx.argpartition(-logprobs, kth=most - 1, axis=-1)[:, :most]
            values = mx.take_along_axis(logprobs, tokens, axis=-1)
            order = mx.argsort(-values, axis=-1)
            self._tokens = mx.take_along_axis(tokens, order, axis=-1)
            self._values = mx.take_along_axis(values, order, axis=-1)

    @property
    def arrays(self) -> list[mx.array]:
        """What is still to be computed."""
        return [self._chosen, *([self._tokens, self._values] if self._tokens is not None else [])]

    def of(self, row: int, count: int) -> Logprobs:
        """Return what one row asked for."""
        at = self._rows[row]
        chosen: float = self._chosen[at].item()  # type: ignore[assignment]
        if self._tokens is None or not count:
            return Logprobs(chosen)
        tokens: list[int] = self._tokens[at, :count].tolist()  # type: ignore[assignment]
        values: list[float] = self._values[at, :count].tolist()  # type: ignore[assignment]
        return Logprobs(chosen, tuple(zip(tokens, values, strict=True)))


def choose(logits: mx.array, places: Sequence[SamplePosition]) -> tuple[mx.array, StepLogprobs | None]:
    """Choose a token for every row of `logits` ([rows, vocabulary]); nothing is computed yet."""
    raw = logits
    if not all(place.choice.plain and place.memory is None for place in places):
        logits = mx.concatenate(
            [place.choice.processed(logits[row : row + 1], place.memory) for row, place in enumerate(places)]
        )
    ways: dict[SamplerParams | None, list[int]] = {}
    for row, place in enumerate(places):
        ways.setdefault(place.choice.way, []).append(row)
    if len(ways) == 1:
        [way] = ways
        chosen = _drawn(logits, way, places)
    else:
        parts = [
            _drawn(logits[mx.array(rows)], way, [places[row] for row in rows]) for way, rows in ways.items()
        ]
        order = [row for rows in ways.values() for row in rows]
        back = sorted(range(len(order)), key=order.__getitem__)
        chosen = mx.concatenate(parts)[mx.array(back)]
    report = None
    if any(place.choice.logprobs is not None for place in places):
        report = StepLogprobs(raw, chosen, places)
    return chosen, report


def _drawn(logits: mx.array, way: SamplerParams | None, places: Sequence[SamplePosition]) -> mx.array:
    if way is None:
        return mx.argmax(logits, axis=-1)
    keys = mx.array([place.choice.key(place.at) for place in places], dtype=mx.uint32)
    logits = logits.astype(mx.float32)
    if way.top_p < 1 or way.min_p > 0 or way.xtc_probability > 0:
        logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    if way.top_p < 1:
        logits = keep_top_p(logits, way.top_p)
    if way.min_p > 0:
        logits = keep_min_p(logits, way.min_p)
    if way.xtc_probability > 0:
        logits = exclude_top(logits, way, keys, places[0].choice)
    if 0 < way.top_k < logits.shape[-1]:
        logits = keep_top_k(logits, way.top_k)
    # The Gumbel trick: the argmax of logits and such noise is a draw from their softmax.
    uniform = _uniform(logits.shape[-1])(keys)
    return mx.argmax(logits / way.temperature - mx.log(-mx.log(uniform)), axis=-1)


def _uniform(count: int) -> Callable[[mx.array], mx.array]:
    drawn: Callable[[mx.array], mx.array] = mx.vmap(lambda key: mx.random.uniform(shape=(count,), key=key))
    return drawn


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


def exclude_top(logprobs: mx.array, way: SamplerParams, keys: mx.array, choice: RequestSampler) -> mx.array:
    """With xtc_probability, drop all tokens of at least xtc_threshold but the least likely of them (XTC).

    Control tokens stay: a reply that cannot end is no more creative.
    """
    likely = mx.logical_and(logprobs >= mx.log(mx.array(way.xtc_threshold)), choice.text > 0)
    least = mx.min(mx.where(likely, logprobs, mx.inf), axis=-1, keepdims=True)
    dropped = mx.where(mx.logical_and(likely, logprobs > least), -mx.inf, logprobs)
    tossed = _uniform(1)(keys ^ mx.array(0x55555555, dtype=mx.uint32))
    return mx.where(tossed < way.xtc_probability, dropped, logprobs)


def keep_from(logprobs: mx.array, threshold: mx.array) -> mx.array:
    """Rule out everything less likely than the threshold."""
    return mx.where(logprobs < threshold, -mx.inf, logprobs)


def text_token_mask(vocabulary_size: int, special: Collection[int]) -> mx.array:
    """Return 1 for every token that is text and 0 for the control tokens."""
    text = mx.ones(vocabulary_size)
    if inside := [token for token in special if token < vocabulary_size]:
        text[mx.array(inside)] = 0.0
    mx.eval(text)
    return text
