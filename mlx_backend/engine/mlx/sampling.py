"""Sampling: one token for every sequence of a batch, from its logits and its request's `Sampling`.

Sequences with equal sampler parameters are sampled in one call, each with a random key of its own. A key is a
function of the request's seed and the token's index in the reply, and of nothing else. So a seed gives the same
text alone, in a batch and after preemption (as far as the logits are the same: many devices round them differently
in another batch), and a draft can be checked against what *would* have been sampled:
speculative decoding is exact for sampled replies as well as for greedy ones. A draft model's tokens are chosen from its
logits in the same way and with the same keys. With the same noise, two models choose the same token about as often as
they agree about its probability.

What belongs to one request (penalties, biases, constraints) is guarded: an exception is stored on that request's
sampler and its sequence goes on with unprocessed logits until the batch drops it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_backend.engine.base import UNBOUNDED_TOKENS, Logprobs, Sampling
from mlx_backend.engine.mlx.arrays import as_floats

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from mlx_backend.engine.base import GenerationRequest

MIN_TEMPERATURE = 1e-4
"""Below it sampling is greedy: dividing by less overflows before it changes a choice."""

# splitmix64: its increment and its two multipliers (Steele et al., 2014).
_SPREAD = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = 2**64 - 1


def drawn_by(sampling: Sampling) -> Sampling | None:
    """Return what of a request's sampling says how a token is drawn from its logits; None is greedy.

    Sequences for which that is equal are sampled together.
    """
    if sampling.temperature < MIN_TEMPERATURE or sampling.top_p == 0 or sampling.top_k == 1:
        return None
    neutral = Sampling()
    return replace(
        sampling,
        seed=neutral.seed,
        repetition_penalty=neutral.repetition_penalty,
        presence_penalty=neutral.presence_penalty,
        frequency_penalty=neutral.frequency_penalty,
        logit_bias=neutral.logit_bias,
    )


@dataclass(slots=True)
class PenaltyState:
    """What penalties need to know of a sequence, as arrays over the vocabulary.

    `seen` is 1 for each token of the prompt or the reply, `counts` says how often the reply has each token. The
    arrays are replaced and never changed in place, so an earlier state stays valid.
    """

    seen: mx.array
    counts: mx.array

    def with_token(self, token: mx.array) -> PenaltyState:
        """Return the state after one more token of the reply (shape [1])."""
        return PenaltyState(self.seen.at[token].maximum(1.0), self.counts.at[token].add(1.0))


class RequestSampler:
    """Samples for one request, and holds the first exception that this raised.

    `text_mask` is 1 for text tokens and 0 for control tokens (`text_token_mask`).
    """

    def __init__(self, request: GenerationRequest, text_mask: mx.array) -> None:
        sampling = request.sampling
        self.params = drawn_by(sampling)
        self.logprobs = request.logprobs
        self.constraint = request.constraint
        self.error: Exception | None = None
        self.num_seen = 0  # tokens by which the constraint was advanced
        self.text_mask = text_mask
        self._seed = (sampling.seed or 0) & _MASK
        self._bias: tuple[mx.array, mx.array] | None = None
        if sampling.logit_bias:
            biases = dict(sampling.logit_bias)
            self._bias = mx.array(list(biases)), mx.array(list(biases.values()))
        self._repetition = sampling.repetition_penalty
        self._presence, self._frequency = sampling.presence_penalty, sampling.frequency_penalty
        self._prompt = request.prompt

    def penalty_state(self, reply: Sequence[int]) -> PenaltyState | None:
        """Return the penalties' state after the prompt and the reply so far; None if the request has no penalties."""
        if self._repetition == 1.0 and not self._presence and not self._frequency:
            return None
        zeros = mx.zeros(self.text_mask.shape)
        counts = zeros.at[mx.array(list(reply))].add(1.0) if reply else zeros
        return PenaltyState(zeros.at[mx.array([*self._prompt, *reply])].maximum(1.0), counts)

    def leaves_logits(self, *, is_draft: bool = False) -> bool:
        """Whether the model's logits are used as they are, penalties aside."""
        is_masked = self.constraint is not None and not is_draft and self.unconstrained_tokens() == 0
        return self._bias is None and not is_masked

    def unconstrained_tokens(self) -> int:
        """Return how many tokens from the next one on are certainly not masked. Never raises."""
        if self.constraint is None or self.error is not None:
            return UNBOUNDED_TOKENS
        try:
            return self.constraint.unconstrained_tokens()
        except Exception as error:
            self.error = error
            return UNBOUNDED_TOKENS

    def random_key(self, index: int) -> tuple[int, int]:
        """Return the random key for the token at this index of the reply."""
        value = (self._seed + (index + 1) * _SPREAD) & _MASK
        for shift, factor in zip((30, 27), _MIX, strict=True):
            value = ((value ^ (value >> shift)) * factor) & _MASK
        value ^= value >> 31
        return value >> 32, value & 0xFFFFFFFF

    def process(
        self, logits: mx.array, penalties: PenaltyState | None, *, is_draft: bool = False
    ) -> mx.array:
        """Apply the request's bias, penalties and constraint to its logits ([1, vocabulary]). Never raises.

        A draft is not constrained: the tokens before it are not known yet.
        """
        if self.error is None:
            try:
                return self._process(logits, penalties, is_draft=is_draft)
            except Exception as error:
                self.error = error
        return logits

    def advance(self, token: int) -> None:
        """Advance the constraint by a token. Never raises."""
        if self.constraint is not None and self.error is None:
            try:
                self.constraint.advance(token)
                self.num_seen += 1
            except Exception as error:
                self.error = error

    def _process(self, logits: mx.array, penalties: PenaltyState | None, *, is_draft: bool) -> mx.array:
        if self._bias is not None:
            tokens, values = self._bias
            logits = logits.at[:, tokens].add(values.astype(logits.dtype))
        if penalties is not None:
            logits = self._penalise(logits, penalties)
        words = self.constraint.allowed_mask() if self.constraint is not None and not is_draft else None
        if words is not None:
            logits = apply_mask(logits, words)
        return logits

    def _penalise(self, logits: mx.array, state: PenaltyState) -> mx.array:
        # Control tokens are exempt: a model that is penalised for closing a message never closes the next.
        if self._repetition != 1.0:  # Keskar et al., 2019
            scaled = mx.where(logits < 0, logits * self._repetition, logits / self._repetition)
            logits = mx.where(state.seen * self.text_mask > 0, scaled, logits)
        counts = state.counts * self.text_mask
        penalties = counts * self._frequency + (counts > 0) * self._presence  # OpenAI's two
        return (logits - penalties).astype(logits.dtype)


def apply_mask(logits: mx.array, words: Sequence[int]) -> mx.array:
    """Set the logits of the tokens whose bit is 0 to -inf (bit i of word w is token 32 w + i)."""
    bits = mx.array(_as_array(words), dtype=mx.uint32)[:, None] >> mx.arange(32, dtype=mx.uint32)
    allowed = (bits & 1).reshape(-1)[: logits.shape[-1]] > 0
    if allowed.shape[0] < logits.shape[-1]:  # ids that pad the vocabulary are never allowed
        allowed = mx.pad(allowed, (0, logits.shape[-1] - allowed.shape[0]))
    return mx.where(allowed, logits, -mx.inf)


def _as_array(words: Sequence[int]) -> Any:
    """Pass a buffer on as it is: converting a list of thousands of numbers takes longer than the step."""
    return words if isinstance(words, memoryview) else list(words)


@dataclass(frozen=True, slots=True)
class SamplePosition:
    """A token to sample: its request's sampler, its index in the reply, and the penalties' state before it."""

    sampler: RequestSampler
    index: int
    penalties: PenaltyState | None
    is_draft: bool = False

    def after(self, token: mx.array) -> SamplePosition:
        """Return the position that follows when this token (shape [1]) was chosen here."""
        penalties = self.penalties.with_token(token) if self.penalties is not None else None
        return SamplePosition(self.sampler, self.index + 1, penalties, self.is_draft)


class TokenRows:
    """The log probabilities of a token for each row of logits, and of the likeliest there, once they are computed.

    Of the logits ([rows, vocabulary]) nothing else is held.
    """

    def __init__(self, logits: mx.array, tokens: mx.array, max_count: int) -> None:
        logits = logits.astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        self._chosen = mx.take_along_axis(logprobs, tokens[:, None].astype(mx.int32), axis=-1)[:, 0]
        self._top: tuple[mx.array, mx.array] | None = None  # the likeliest tokens, and their values
        if max_count:
            tokens = mx.argpartition(-logprobs, kth=max_count - 1, axis=-1)[:, :max_count]
            values = mx.take_along_axis(logprobs, tokens, axis=-1)
            order = mx.argsort(-values, axis=-1)
            self._top = mx.take_along_axis(tokens, order, axis=-1), mx.take_along_axis(values, order, axis=-1)

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays that are still to be computed."""
        return [self._chosen, *(self._top or ())]

    def of(self, row: int, count: int) -> Logprobs:
        """Return a row's log probabilities, with the `count` likeliest tokens."""
        [found] = self.rows(row, row + 1, count)
        return found

    def rows(self, start: int, end: int | None, count: int) -> list[Logprobs]:
        """Return those of several rows, by default to the last one."""
        chosen = as_floats(self._chosen[start:end])
        if self._top is None or not count:
            return [Logprobs(value) for value in chosen]
        tokens, values = (array[start:end, :count].tolist() for array in self._top)
        pairs = zip(chosen, tokens, values, strict=True)  # type: ignore[arg-type]  # lists of lists
        return [Logprobs(value, tuple(zip(*top, strict=True))) for value, *top in pairs]


class StepLogprobs(TokenRows):
    """Those of the tokens sampled in one step, for the rows whose requests ask for them."""

    def __init__(self, logits: mx.array, sampled: mx.array, positions: Sequence[SamplePosition]) -> None:
        wanted = [row for row, position in enumerate(positions) if position.sampler.logprobs is not None]
        self._index = {row: index for index, row in enumerate(wanted)}
        max_count = max(position.sampler.logprobs or 0 for position in positions)
        rows = mx.array(wanted)
        super().__init__(logits[rows], sampled[rows], max_count)

    def of(self, row: int, count: int) -> Logprobs:
        """Return those of a row of the step."""
        return super().of(self._index[row], count)


def sample(logits: mx.array, positions: Sequence[SamplePosition]) -> tuple[mx.array, StepLogprobs | None]:
    """Sample a token for every row of `logits` ([rows, vocabulary]), without waiting for the computation.

    Returns the tokens ([rows]) and the step's log probabilities if any request asked for them.
    """
    sampled = choose(logits, positions)
    logprobs = None
    if any(position.sampler.logprobs is not None for position in positions):
        logprobs = StepLogprobs(logits, sampled, positions)
    return sampled, logprobs


def choose(logits: mx.array, positions: Sequence[SamplePosition]) -> mx.array:
    """Choose a token ([rows]) for every row of a model's logits ([rows, vocabulary])."""
    if not all(
        position.penalties is None and position.sampler.leaves_logits(is_draft=position.is_draft)
        for position in positions
    ):
        logits = mx.concatenate(
            [
                position.sampler.process(
                    logits[row : row + 1], position.penalties, is_draft=position.is_draft
                )
                for row, position in enumerate(positions)
            ]
        )
    groups: dict[Sampling | None, list[int]] = {}
    for row, position in enumerate(positions):
        groups.setdefault(position.sampler.params, []).append(row)
    if len(groups) == 1:
        [params] = groups
        return draw(logits, params, positions)
    parts = [
        draw(logits[mx.array(rows)], params, [positions[row] for row in rows])
        for params, rows in groups.items()
    ]
    order = [row for rows in groups.values() for row in rows]
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return mx.concatenate(parts)[mx.array(inverse)]


def draw(logits: mx.array, params: Sampling | None, positions: Sequence[SamplePosition]) -> mx.array:
    """Draw a token ([rows]) for every row of processed logits ([rows, vocabulary]); greedily if `params` is None."""
    if params is None:
        return mx.argmax(logits, axis=-1)
    keys = mx.array([position.sampler.random_key(position.index) for position in positions], dtype=mx.uint32)
    logits = logits.astype(mx.float32)
    if params.top_p < 1 or params.min_p > 0 or params.xtc_probability > 0:
        logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    if params.top_p < 1:
        logits = keep_top_p(logits, params.top_p)
    if params.min_p > 0:
        logits = keep_min_p(logits, params.min_p)
    if params.xtc_probability > 0:
        logits = exclude_top_choices(logits, params, keys, positions[0].sampler.text_mask)
    if 0 < params.top_k < logits.shape[-1]:
        logits = keep_top_k(logits, params.top_k)
    # The Gumbel trick: the argmax of logits plus Gumbel noise is a draw from their softmax.
    uniform = _uniform(logits.shape[-1])(keys)
    return mx.argmax(logits / params.temperature - mx.log(-mx.log(uniform)), axis=-1)


def _uniform(count: int) -> Callable[[mx.array], mx.array]:
    """Return a function from random keys ([rows, 2]) to uniform numbers ([rows, count])."""
    uniform: Callable[[mx.array], mx.array] = mx.vmap(lambda key: mx.random.uniform(shape=(count,), key=key))
    return uniform


def keep_top_p(logprobs: mx.array, top_p: float) -> mx.array:
    """Keep the likeliest tokens until their probabilities add up to top_p; always at least one."""
    ascending = mx.sort(logprobs, axis=-1)
    probabilities = mx.exp(ascending)
    above = mx.cumsum(probabilities, axis=-1, reverse=True, inclusive=False)
    dropped = mx.sum(above >= top_p, axis=-1, keepdims=True)
    dropped = mx.minimum(dropped, logprobs.shape[-1] - 1)
    return keep_at_least(logprobs, mx.take_along_axis(ascending, dropped, axis=-1))


def keep_min_p(logprobs: mx.array, min_p: float) -> mx.array:
    """Keep the tokens at least min_p times as likely as the likeliest."""
    return keep_at_least(logprobs, mx.max(logprobs, axis=-1, keepdims=True) + mx.log(mx.array(min_p)))


def keep_top_k(logprobs: mx.array, top_k: int) -> mx.array:
    """Keep the k likeliest tokens, and those exactly as likely as the last of them."""
    threshold = mx.min(mx.topk(logprobs, top_k, axis=-1), axis=-1, keepdims=True)
    return keep_at_least(logprobs, threshold)


def exclude_top_choices(
    logprobs: mx.array, params: Sampling, keys: mx.array, text_mask: mx.array
) -> mx.array:
    """XTC: with xtc_probability, drop every token of at least xtc_threshold except the least likely of them.

    Control tokens are never dropped: a reply that cannot end is no more creative.
    """
    likely = mx.logical_and(logprobs >= mx.log(mx.array(params.xtc_threshold)), text_mask > 0)
    least = mx.min(mx.where(likely, logprobs, mx.inf), axis=-1, keepdims=True)
    excluded = mx.where(mx.logical_and(likely, logprobs > least), -mx.inf, logprobs)
    uniform = _uniform(1)(keys ^ mx.array(0x55555555, dtype=mx.uint32))
    return mx.where(uniform < params.xtc_probability, excluded, logprobs)


def keep_at_least(logprobs: mx.array, threshold: mx.array) -> mx.array:
    """Drop every token less likely than the threshold."""
    return mx.where(logprobs < threshold, -mx.inf, logprobs)


def text_token_mask(vocabulary_size: int, special: Collection[int]) -> mx.array:
    """Return 1 for every text token and 0 for every control token ([vocabulary])."""
    mask: Any = array("f", [1.0]) * vocabulary_size
    for token in special:
        if token < vocabulary_size:
            mask[token] = 0.0
    return mx.array(mask)  # not made on the device: for that CUDA would take ten seconds to compile a kernel
