"""Decoding: one step gives every sequence of one network its next token, or several tokens with speculation.

A sequence alone is decoded on the model's own caches, which is fastest; several are decoded on caches merged from
theirs. Caches are merged when a second sequence joins and extracted when one is left, so no caller has to choose
between the two. Sequences whose caches turn out not to fit those of others get decoders of their own. A step is a
pipeline: while one token is handled here, the device computes the next.

Prefilled sequences bring the last chunk of their prompts. It runs together with the next tokens of the others, or
by itself where the network cannot be run packed (packed_forward.py), and samples their first tokens.

With a drafter, a sequence alone is decoded several tokens at a time: its drafts are run through the model in one
step and compared with what the model samples after each of them, and the caches are rewound to where the two part.
A sampled token depends on nothing but text, seed and position, so drafts never change a reply.

A constraint has to see a token before it can mask the next one. So a constrained sequence is sampled for only when
the token before is known, and gets no drafts, unless its constraint has promised not to mask the next tokens.

Knows nothing of queues, the prefix cache, or how prompts are prefilled up to their last chunk.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_backend.engine.mlx.kv_cache import alias, merged, select_rows
from mlx_backend.engine.mlx.mlx_lm_patches import RewindableRotatingKVCache
from mlx_backend.engine.mlx.packed_forward import ForwardError, Segment, run_packed
from mlx_backend.engine.mlx.sampling import sample

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from mlx_backend.engine.mlx.kv_cache import LayerCaches
    from mlx_backend.engine.mlx.sampling import SamplePosition
    from mlx_backend.engine.mlx.sequences import DecodingSequence, GeneratedToken, PrefilledSequence


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Admitted:
    """Sequences whose caches are not merged yet, and the first token sampled for each."""

    prefilled: Sequence[PrefilledSequence]
    first_tokens: mx.array

    @property
    def sequences(self) -> list[DecodingSequence]:
        return [each.sequence for each in self.prefilled]

    def keep(self, rows: list[int]) -> _Admitted | None:
        """Return it with some of its sequences."""
        if len(rows) == len(self.prefilled):
            return self
        return (
            _Admitted([self.prefilled[row] for row in rows], self.first_tokens[mx.array(rows)])
            if rows
            else None
        )


class BatchError(Exception):
    """A batch could not be stepped after a sequence joined it. Its sequences are as they were: `Decoder.split`."""


class Decoder:
    """The sequences of one network.

    `can_pack` says whether the network can be run packed, `max_drafts` how many tokens a drafter may propose at
    once. `agree` replaces the sampled tokens by those that all processes that share the model use.
    """

    def __init__(
        self,
        network: Any,
        *,
        can_pack: bool = False,
        max_drafts: int = 0,
        agree: Callable[[mx.array], mx.array] | None = None,
    ) -> None:
        self.sequences: list[DecodingSequence] = []  # whose caches are merged
        self._network = network
        self._can_pack = can_pack
        self._max_drafts = max_drafts
        self._agree = agree
        self._layers: LayerCaches = []
        self._next: mx.array | None = None  # the token sampled last for each sequence, being computed
        self._admitted: _Admitted | None = None  # in the last step
        self._is_untried = False  # whether there was no step since sequences joined others

    @property
    def all_sequences(self) -> list[DecodingSequence]:
        """The sequences being decoded, those admitted in the last step included."""
        return [*self.sequences, *(self._admitted.sequences if self._admitted is not None else ())]

    def admit(self, prefilled: Sequence[PrefilledSequence]) -> None:
        """Admit sequences in a run of their own. After a ForwardError the others are as they were.

        Those admitted before have to be merged first.
        """
        assert self._admitted is None
        sequences = [each.sequence for each in prefilled]
        logits = self._forward((), prefilled)
        first_tokens = self._sample(logits, sequences, [sequence.next_position() for sequence in sequences])
        self._admitted = _Admitted(prefilled, first_tokens)
        self._start_computing(sequences, first_tokens)

    def emit_first_tokens(self) -> list[GeneratedToken]:
        """Wait for the first tokens of the sequences admitted last, and emit them before they are fed.

        A sequence whose reply ends with its first token is removed.
        """
        if self._admitted is None:
            return []
        sequences, first_tokens = self._admitted.sequences, self._admitted.first_tokens
        if not any(sequence.has_pending_token for sequence in sequences):
            return []
        generated = [
            sequence.emit(token, sequence.logprobs)
            for sequence, token in zip(sequences, _as_list(first_tokens), strict=True)
        ]
        staying = [
            index
            for index, each in enumerate(generated)
            if each.finish_reason is None or sequences[index].sampler.error is not None
        ]
        self._admitted = self._admitted.keep(staying)
        return generated

    def merge_admitted(self) -> list[Decoder]:
        """Merge the caches of the sequences admitted last with the others'.

        If they do not fit each other, the others are as they were, and decoders of those admitted last are returned.
        """
        admitted, self._admitted = self._admitted, None
        if admitted is None:
            return []
        before = [alias(layer) for layer in self._layers]
        try:
            self._layers = self._merged([each.layers for each in admitted.prefilled])
        except Exception as error:
            log.warning(
                "The caches of replies could not be merged; they are decoded by themselves: %r", error
            )
            self._layers = before
            return [
                self._split_off(each.sequence, each.layers, admitted.first_tokens[row : row + 1])
                for row, each in enumerate(admitted.prefilled)
            ]
        first = admitted.first_tokens
        self._next = first if self._next is None else mx.concatenate([self._next, first])
        self.sequences = [*self.sequences, *admitted.sequences]
        self._is_untried = len(self.sequences) > 1
        return []

    def split(self) -> list[Decoder]:
        """Return a decoder for each of several sequences; this one is left without any."""
        assert self._next is not None
        decoders = [
            self._split_off(
                sequence, [layer.extract(row) for layer in self._layers], self._next[row : row + 1]
            )
            for row, sequence in enumerate(self.sequences)
        ]
        self.sequences, self._layers, self._next = [], [], None
        return decoders

    def step(self, prefilled: Sequence[PrefilledSequence] = ()) -> list[GeneratedToken]:
        """Admit sequences, emit the tokens that were sampled last, and sample the next.

        Those admitted before have to be merged first. A sequence that ends stays until it is removed. After a
        ForwardError in a step with `prefilled`, and after a BatchError, all sequences are as they were.
        """
        assert self._admitted is None
        if prefilled:
            return self._advance(prefilled)
        if all(sequence.num_sampled == sequence.request.max_tokens for sequence in self.sequences):
            return self._emit_last_tokens()
        if len(self.sequences) == 1 and self._max_drafts:
            [sequence] = self.sequences
            # The token sampled last is unconstrained already; one more is sampled after it and after every draft.
            unconstrained = self._unconstrained_tokens(sequence) - 2
            if sequence.drafter is not None and unconstrained > 0:
                assert self._next is not None
                [token] = _as_list(self._next)
                known = [*sequence.tokens, token] if sequence.has_pending_token else sequence.tokens
                left = sequence.request.max_tokens - (len(known) - len(sequence.request.prompt))
                max_drafts = min(self._max_drafts, left, unconstrained)
                drafts = sequence.drafter.propose(known, max_drafts) if max_drafts > 0 else []
                if drafts:
                    return self._verify(sequence, token, drafts)
        return self._advance()

    def remove(
        self, leaving: Collection[DecodingSequence], keep_caches: Collection[DecodingSequence] = ()
    ) -> dict[int, LayerCaches]:
        """Remove sequences; return the caches of those named in `keep_caches`, by their keys."""
        caches: dict[int, LayerCaches] = {}
        if self._admitted is not None:
            staying_rows = []
            for row, each in enumerate(self._admitted.prefilled):
                if each.sequence not in leaving:
                    staying_rows.append(row)
                elif each.sequence in keep_caches:
                    caches[each.sequence.key] = each.layers
            self._admitted = self._admitted.keep(staying_rows)
        index = {sequence.key: row for row, sequence in enumerate(self.sequences)}
        staying = [sequence for sequence in self.sequences if sequence not in leaving]
        for sequence in self.sequences:
            if sequence in leaving and sequence in keep_caches:
                row = index[sequence.key]
                is_alone = len(self.sequences) == 1
                caches[sequence.key] = (
                    self._layers if is_alone else [layer.extract(row) for layer in self._layers]
                )
        if not staying:
            self._layers, self._next = [], None
        elif len(staying) < len(self.sequences):
            rows = [index[sequence.key] for sequence in staying]
            assert self._next is not None
            self._next = self._next[mx.array(rows)]
            self._layers = select_rows(rows, self._layers)
        self.sequences = staying
        return caches

    def _advance(self, prefilled: Sequence[PrefilledSequence] = ()) -> list[GeneratedToken]:
        fed, sequences = self._next, self.sequences
        pending = [sequence.has_pending_token for sequence in sequences]
        logprobs = [sequence.logprobs for sequence in sequences]
        logits = self._forward(sequences, prefilled)
        tokens: list[int] | None = None
        if any(self._unconstrained_tokens(sequence) < 2 for sequence in sequences):
            mx.async_eval(logits)  # type: ignore[no-untyped-call]  # the network runs while the tokens are read
            tokens = self._advance_constraints(fed)
        positions = [
            sequence.position_after(fed, row) for row, sequence in enumerate(sequences) if fed is not None
        ]
        positions += [each.sequence.next_position() for each in prefilled]
        all_sequences = [*sequences, *(each.sequence for each in prefilled)]
        sampled = self._sample(logits, all_sequences, positions)
        self._start_computing(all_sequences, sampled)
        if prefilled:
            self._admitted = _Admitted(prefilled, sampled[len(sequences) :])
            sampled = sampled[: len(sequences)]
        self._next = sampled if sequences else None
        if tokens is None:
            tokens = self._advance_constraints(fed)
        return [
            sequence.emit(token, own_logprobs)
            for sequence, token, own_logprobs, is_pending in zip(
                sequences, tokens, logprobs, pending, strict=True
            )
            if is_pending
        ]

    def _emit_last_tokens(self) -> list[GeneratedToken]:
        """Emit the tokens sampled last, where no reply may be longer."""
        assert self._next is not None
        return [
            sequence.emit(token, sequence.logprobs)
            for sequence, token in zip(self.sequences, _as_list(self._next), strict=True)
            if sequence.has_pending_token
        ]

    def _forward(
        self, sequences: Sequence[DecodingSequence], prefilled: Sequence[PrefilledSequence]
    ) -> mx.array:
        """Run the tokens sampled last and the last chunks of prompts; return the next logits ([sequences, vocabulary]).

        Raises ForwardError only if there are prefilled sequences, and BatchError if there are none but one joined.
        """
        segments: list[Segment] = []
        if sequences:
            assert self._next is not None
            segments.append(Segment(self._next[:, None], self._layers))
        if not prefilled:
            return self._forward_replies(segments[0])
        segments += [Segment(mx.array([list(each.last_chunk)]), each.layers) for each in prefilled]
        every = run_packed(self._network, segments)
        ends = list(accumulate((len(each.last_chunk) for each in prefilled), initial=len(sequences) - 1))[1:]
        return every[mx.array([*range(len(sequences)), *ends])]

    def _forward_replies(self, replies: Segment) -> mx.array:
        before = [alias(layer) for layer in self._layers] if self._is_untried else []
        try:
            if self._can_pack:
                logits = run_packed(self._network, [replies])
            else:
                logits = self._network(replies.tokens, cache=replies.layers)[:, -1]
        except Exception as error:
            cause = (error.__cause__ or error) if isinstance(error, ForwardError) else error
            if not before or self._agree is not None:  # other processes would not split theirs
                raise cause from None
            self._layers = before
            raise BatchError from cause
        self._is_untried = False
        return logits

    def _merged(self, caches: Sequence[LayerCaches]) -> LayerCaches:
        """Return the caches of all sequences with those of others."""
        if len(self.sequences) > 1:
            for ours, theirs in zip(self._layers, merged(caches), strict=True):
                ours.extend(theirs)
            return self._layers
        every = [self._layers, *caches] if self.sequences else list(caches)
        return merged(every) if len(every) > 1 else every[0]

    def _split_off(self, sequence: DecodingSequence, layers: LayerCaches, sampled: mx.array) -> Decoder:
        """Return a decoder of a sequence alone, for which a token is sampled already."""
        decoder = Decoder(
            self._network, can_pack=self._can_pack, max_drafts=self._max_drafts, agree=self._agree
        )
        decoder.sequences, decoder._layers, decoder._next = [sequence], layers, sampled
        return decoder

    def _unconstrained_tokens(self, sequence: DecodingSequence) -> int:
        """Return how many tokens may be sampled before the sequence's constraint has to be asked."""
        if self._agree is not None and sequence.sampler.constraint is not None:
            return 0  # the other processes have no constraint to ask, and must take the same steps
        return sequence.sampler.unconstrained_tokens()

    def _verify(self, sequence: DecodingSequence, token: int, drafts: Sequence[int]) -> list[GeneratedToken]:
        """Feed the token sampled last and the drafts after it; emit the drafts that the model samples too."""
        fed = [token, *drafts]
        tokens = mx.array(fed)
        self._layers = [RewindableRotatingKVCache.of(layer) for layer in self._layers]
        logits = self._network(tokens[None], cache=self._layers)[0]
        num_sampled, is_pending = sequence.num_sampled, sequence.has_pending_token
        logprobs = sequence.logprobs
        positions = [sequence.position_after(tokens, index) for index in range(len(fed))]
        sampled = self._sample(logits, [sequence] * len(fed), positions)
        self._start_computing([sequence], sampled)
        choices = _as_list(sampled)
        agreed = 0
        while agreed < len(drafts) and choices[agreed] == drafts[agreed]:
            agreed += 1
        step = sequence.logprobs[0] if sequence.logprobs is not None else None
        generated = [sequence.emit(token, logprobs)] if is_pending else []
        accepted = 1  # of the tokens that were fed
        while accepted <= agreed and not (generated and generated[-1].finish_reason):
            row = (step, accepted - 1) if step is not None else None
            generated.append(sequence.emit(drafts[accepted - 1], row))
            accepted += 1
        for fed_token in fed[:accepted]:
            sequence.advance_constraint(fed_token)
        if rejected := len(fed) - accepted:
            for layer in self._layers:
                layer.trim(rejected)
        sequence.num_sampled = num_sampled + accepted
        sequence.penalties = positions[accepted - 1].penalties
        sequence.logprobs = (step, accepted - 1) if step is not None else None
        self._next = sampled[accepted - 1 : accepted]
        return generated

    def _advance_constraints(self, fed: mx.array | None) -> list[int]:
        """Wait for the tokens that are fed, advance the sequences' constraints by them, and return them."""
        tokens = _as_list(fed) if fed is not None else []
        for sequence, token in zip(self.sequences, tokens, strict=True):
            sequence.advance_constraint(token)
        return tokens

    def _sample(
        self, logits: mx.array, sequences: Sequence[DecodingSequence], positions: Sequence[SamplePosition]
    ) -> mx.array:
        sampled, logprobs = sample(logits, positions)
        if self._agree is not None:
            sampled = self._agree(sampled)
        for row, sequence in enumerate(sequences):
            is_asked = sequence.sampler.logprobs is not None
            sequence.logprobs = (logprobs, row) if logprobs is not None and is_asked else None
        return sampled

    def _start_computing(self, sequences: Sequence[DecodingSequence], sampled: mx.array) -> None:
        """Start computing the tokens, and all that would otherwise pile up uncomputed."""
        steps = {
            id(sequence.logprobs[0]): sequence.logprobs[0]
            for sequence in sequences
            if sequence.logprobs is not None
        }
        penalties = [
            (sequence.penalties.seen, sequence.penalties.counts)
            for sequence in sequences
            if sequence.penalties is not None
        ]
        mx.async_eval(sampled, [step.arrays for step in steps.values()], penalties)  # type: ignore[no-untyped-call]


def _as_list(tokens: mx.array) -> list[int]:
    """Wait for the tokens and return them."""
    return tokens.tolist()  # type: ignore[return-value]
