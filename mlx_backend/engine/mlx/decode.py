"""Decoding: one step gives every sequence of one network its next token, or several tokens with speculation.

A sequence alone is decoded on the model's own caches, which is fastest; several short ones are decoded on caches merged
from theirs (batch_caches.py). A step is a pipeline: while one token is handled here, the device computes the next.

Prefilled sequences bring the last chunk of their prompts. It runs together with the next tokens of the others, or
by itself where the network cannot be run packed (packed_forward.py), and samples their first tokens.

With drafters (drafting.py), a few sequences are decoded several tokens at a time, on caches of their own: the drafts of
all are run through the model in one packed run and compared with what the model samples after each of them, and each
sequence's caches are rewound to where the two part (rewinding.py). A sampled token depends on nothing but text, seed
and position, so drafts never change a reply.

A constraint has to see a token before it can mask the next one. So a constrained sequence is sampled for only when
the token before is known, unless its constraint has promised not to mask the next tokens. After drafts it is sampled
for token by token, for as long as those are the drafts: all of their logits are there.

A network or a cache may raise whatever it likes. Unless a method says otherwise, what the caches of this decoder hold
is not known then: its owner calls `drop` and has the prompts of those sequences prefilled again. Knows nothing of
queues, the prefix cache, or how prompts are prefilled up to their last chunk.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_backend.device.mlx import prepares_for_lengths
from mlx_backend.engine.base import UNBOUNDED_TOKENS
from mlx_backend.engine.mlx.arrays import as_ints, evaluate_async
from mlx_backend.engine.mlx.batch_caches import BatchCaches
from mlx_backend.engine.mlx.drafting import DraftedRow
from mlx_backend.engine.mlx.mtp import last_hidden
from mlx_backend.engine.mlx.packed_forward import (
    ForwardError,
    Segment,
    run_packed,
    run_rows,
    token_ids,
)
from mlx_backend.engine.mlx.sampling import sample
from mlx_backend.engine.mlx.sequences import start_computing
from mlx_backend.engine.mlx.speculative import HeadDrafter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from mlx_backend.engine.mlx.batch_trial import Abilities
    from mlx_backend.engine.mlx.drafting import Drafting
    from mlx_backend.engine.mlx.kv_cache import LayerCaches
    from mlx_backend.engine.mlx.sampling import SamplePosition
    from mlx_backend.engine.mlx.sequences import DecodingSequence, GeneratedToken, PrefilledSequence


class Decoder:
    """The sequences of one network, that of `adapter`: one alone, where `abilities` say that it cannot be run packed.

    `agree` replaces sampled tokens by those that all processes that share the model use.
    """

    def __init__(
        self,
        network: Any,
        abilities: Abilities,
        *,
        adapter: str = "",
        drafting: Drafting | None = None,
        agree: Callable[[mx.array], mx.array] | None = None,
    ) -> None:
        self.sequences: list[DecodingSequence] = []  # in the order of the rows of `_caches`
        self.adapter = adapter
        self._network = network
        self._abilities = abilities
        self._drafting = drafting
        self._agree = agree
        self._caches = BatchCaches(max_merged_length=abilities.max_merged_length)
        self._next: mx.array | None = None  # the token sampled last for each sequence, being computed
        self._was_drafting = False  # in the last step without prompts: rows have caches of their own then
        self._ran: Sequence[DecodingSequence] = ()  # in the last step; none, if prompts ran with them
        self._tried: Sequence[DecodingSequence] = ()
        """The sequences for which a token was last waited for, so that a step of just these is known to go well."""

    @property
    def is_untried(self) -> bool:
        """Whether it is not known yet that these sequences can be run together."""
        return len(self.sequences) > 1 and self._tried != self.sequences

    def admit(self, prefilled: Sequence[PrefilledSequence]) -> None:
        """Admit sequences in a run of their own. After a ForwardError the others are as they were."""
        sequences = [each.sequence for each in prefilled]
        logits = self._run_with_prompts((), prefilled)
        first = self._sample(logits, sequences, [sequence.next_position() for sequence in sequences])
        start_computing(sequences, first)
        self._add(prefilled)
        self._next = first if self._next is None else mx.concatenate([self._next, first])

    def emit_sampled(self, before: int = UNBOUNDED_TOKENS) -> list[GeneratedToken]:
        """Wait for the tokens sampled last, of replies of fewer than so many, and emit them before they are fed."""
        pending = [each.has_pending_token and each.num_emitted < before for each in self.sequences]
        if self._next is None or not any(pending):
            return []
        rows = zip(self.sequences, as_ints(self._next), pending, strict=True)
        self._tried = self._ran
        return [sequence.emit(token, sequence.logprobs) for sequence, token, is_due in rows if is_due]

    def drop(self) -> list[DecodingSequence]:
        """Let go of all sequences and of their caches; return them."""
        sequences, self.sequences, self._next = self.sequences, [], None
        self._caches = BatchCaches(max_merged_length=self._abilities.max_merged_length)
        return sequences

    def step(self, prefilled: Sequence[PrefilledSequence] = ()) -> list[GeneratedToken]:
        """Admit sequences, emit the tokens that were sampled last, and sample the next.

        A sequence that ends stays until it is removed. After a ForwardError in a step with `prefilled` all sequences
        are as they were.
        """
        if not prefilled:
            if all(sequence.num_sampled == sequence.request.max_tokens for sequence in self.sequences):
                return self.emit_sampled()
            if self._drafting is not None:
                return self._advance_with_drafts(self._drafting)
        if self._drafting is not None:
            self._drafting.forget_last_step()
        return self._advance(prefilled)

    def remove(
        self, leaving: Collection[DecodingSequence], keep_caches: Collection[DecodingSequence] = ()
    ) -> dict[int, LayerCaches]:
        """Remove sequences; return the caches of those named in `keep_caches`, by their keys, as far as possible."""
        caches: dict[int, LayerCaches] = {}
        index = {sequence.key: row for row, sequence in enumerate(self.sequences)}
        staying = [sequence for sequence in self.sequences if sequence not in leaving]
        for sequence in self.sequences:
            if sequence in leaving and sequence in keep_caches:
                with suppress(Exception):  # they would only have been cached
                    caches[sequence.key] = self._caches.extract(index[sequence.key])
        if len(staying) < len(self.sequences):
            rows = [index[sequence.key] for sequence in staying]
            assert self._next is not None
            self._caches.keep(rows)
            self._next = self._next[mx.array(rows)] if rows else None
        self.sequences = staying
        return caches

    def _add(self, prefilled: Sequence[PrefilledSequence]) -> None:
        """Add sequences, whose caches are merged with those of others in the next step: they may have ended by then."""
        self.sequences = [*self.sequences, *(each.sequence for each in prefilled)]
        self._caches.add([each.layers for each in prefilled])

    def _advance(self, prefilled: Sequence[PrefilledSequence] = ()) -> list[GeneratedToken]:
        if not self._was_drafting and not any(sequence.num_to_replay for sequence in self.sequences):
            self._caches.merge([sequence.cache_length for sequence in self.sequences])
        fed, sequences = self._next, self.sequences
        pending = [sequence.has_pending_token for sequence in sequences]
        logprobs = [sequence.logprobs for sequence in sequences]
        logits = self._forward(sequences, prefilled)
        tokens: list[int] | None = None
        constrained = [sequence for sequence in sequences if sequence.sampler.constraint is not None]
        if any(self._unconstrained_tokens(sequence) < 2 for sequence in constrained):
            evaluate_async(logits)  # the network runs while the tokens are read
            tokens = self._advance_constraints(fed)
        positions = [
            sequence.position_after(fed, row) for row, sequence in enumerate(sequences) if fed is not None
        ]
        positions += [each.sequence.next_position() for each in prefilled]
        all_sequences = [*sequences, *(each.sequence for each in prefilled)]
        sampled = self._sample(logits, all_sequences, positions)
        start_computing(all_sequences, sampled)
        if tokens is None:
            tokens = self._advance_constraints(fed)
        self._add(prefilled)
        self._next, self._ran = sampled, () if prefilled else sequences
        return [
            sequence.emit(token, own_logprobs)
            for sequence, token, own_logprobs, is_pending in zip(
                sequences, tokens, logprobs, pending, strict=True
            )
            if is_pending
        ]

    def _forward(
        self, sequences: Sequence[DecodingSequence], prefilled: Sequence[PrefilledSequence]
    ) -> mx.array:
        """Run the tokens sampled last and the last chunks of prompts; return the next logits ([sequences, vocabulary]).

        With prefilled sequences it raises ForwardError alone. Without, anything may be raised, and the caches are then
        in no defined state.
        """
        if prefilled:
            logits = self._run_with_prompts(sequences, prefilled)
        else:
            segments, positions = self._reply_segments()
            if self._caches.is_merged and len(segments) == 1 and not self._abilities.packs_replies:
                logits = run_rows(self._network, segments[0])
            else:
                logits = run_packed(self._network, segments, restore=False)
            if positions != list(range(logits.shape[0])):
                logits = logits[mx.array(positions)]
        for sequence in sequences:
            sequence.num_to_replay = 0
        return logits

    def _run_with_prompts(
        self, sequences: Sequence[DecodingSequence], prefilled: Sequence[PrefilledSequence]
    ) -> mx.array:
        """Run the last chunks of prompts in one packed run with the replies' tokens.

        After a ForwardError all caches are as they were, but for those of a prompt by itself, which fails.
        """
        segments, positions = self._reply_segments() if sequences else ([], [])
        last = sum(segment.tokens.size for segment in segments) - 1
        segments += [each.segment(self._network) for each in prefilled]
        every = run_packed(self._network, segments, restore=len(segments) > 1)
        ends = list(accumulate((len(each.last_chunk) for each in prefilled), initial=last))[1:]
        return every[mx.array([*positions, *ends])]

    def _reply_segments(self) -> tuple[list[Segment], list[int]]:
        """Return segments that run each sequence's last sampled token, and which of all their tokens that is.

        Tokens that were taken back from replies' caches (rewinding.py) run again in the same run. Those are not merged.
        """
        assert self._next is not None
        segments = self._caches.segments(self._next, [sequence.images.shift for sequence in self.sequences])
        replayed = [sequence.to_replay for sequence in self.sequences]
        if not any(replayed):
            return segments, self._caches.positions()
        segments = [
            segment.after(tokens) if tokens else segment
            for segment, tokens in zip(segments, replayed, strict=True)
        ]
        return segments, list(accumulate((segment.tokens.shape[1] for segment in segments), initial=-1))[1:]

    def _unconstrained_tokens(self, sequence: DecodingSequence) -> int:
        """Return how many tokens may be sampled before the sequence's constraint has to be asked."""
        if self._agree is not None and sequence.sampler.constraint is not None:
            return 0  # the other processes have no constraint to ask, and must take the same steps
        return sequence.sampler.unconstrained_tokens()

    def _advance_constraints(self, fed: mx.array | None) -> list[int]:
        """Wait for the tokens that are fed, advance the sequences' constraints by them, and return them."""
        tokens = as_ints(fed) if fed is not None else []
        self._tried = self._ran
        for sequence, token in zip(self.sequences, tokens, strict=True):
            if sequence.sampler.constraint is not None:
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

    # -- drafts ----------------------------------------------------------------------------------------------

    def _advance_with_drafts(self, drafting: Drafting) -> list[GeneratedToken]:
        """Take a step in which as much is drafted as pays; that may be nothing."""
        sequences = self.sequences
        # Other processes have no constraint to ask, and must take the same steps.
        limits = drafting.plan(sequences, constrained=self._agree is None)
        if not any(limits):
            self._was_drafting = False
            generated = self._advance()
            drafting.on_step(sequences, None)
            return generated
        self._was_drafting = True
        assert self._next is not None
        num_emitted = [sequence.num_emitted for sequence in sequences]
        generated = self.emit_sampled()
        tokens = as_ints(self._next)
        num_pending = len(generated)
        ended = {each.sequence.key for each in generated if each.finish_reason is not None}
        if len(ended) == len(sequences):
            return generated
        limits = [
            0 if sequence.key in ended else limit for sequence, limit in zip(sequences, limits, strict=True)
        ]
        drafts = drafting.propose(sequences, limits, self._caches.own)
        num_drafted = sum(map(len, drafts))
        try:
            if num_drafted:
                try:
                    generated += self._verify(tokens, drafts, ended)
                except ForwardError as error:
                    if self._agree is not None:  # other processes would not take this step
                        raise
                    drafting.give_up(error.__cause__)
                    drafts = []
            if not any(drafts):
                generated += self._advance()
        except Exception:
            for sequence, number in zip(sequences, num_emitted, strict=True):
                sequence.take_back(sequence.num_emitted - number)
            raise
        drafting.on_step(sequences, num_drafted, len(generated) - num_pending)
        return generated

    def _verify(
        self, tokens: Sequence[int], drafts: Sequence[Sequence[int]], ended: Collection[int]
    ) -> list[GeneratedToken]:
        """Feed the tokens sampled last and the drafts after them; emit the drafts that the model samples too.

        After a ForwardError all sequences are as they were.
        """
        self._caches.separate()
        rows, number = list[DraftedRow](), 0
        for sequence, token, own in zip(self.sequences, tokens, drafts, strict=True):
            number += sequence.num_to_replay
            rows.append(DraftedRow(sequence, token, own, number, ends=sequence.key in ended))
            number += 1 + len(own)
        segments = [row.segment(self._caches, at) for at, row in enumerate(rows)]
        singly = self._abilities.packs_replies and prepares_for_lengths()
        logits = run_packed(self._network, segments, single_queries=singly)
        if any(row.is_masked for row in rows):
            evaluate_async(logits)  # the network runs while masks are made
        while due := [(row, *each) for row in rows for each in row.next_positions().items()]:
            numbers, positions = [number for _, number, _ in due], [position for _, _, position in due]
            is_all = numbers == list(range(logits.shape[0]))
            own_logits = logits if is_all else logits[mx.array(numbers)]
            sampled = self._sample(own_logits, [row.sequence for row, _, _ in due], positions)
            start_computing(self.sequences, sampled)
            for at, (token, (row, _, _)) in enumerate(zip(as_ints(sampled), due, strict=True)):
                step = row.sequence.logprobs
                row.add(token, (step[0], at) if step is not None else None)
        generated: list[GeneratedToken] = []
        following: list[int] = []
        start = 0
        for row in rows:
            accepted, token = row.accept()
            if isinstance(drafter := row.sequence.drafter, HeadDrafter):
                right = start + len(row.replayed) + 1 + len(accepted)
                drafter.on_verified(last_hidden(self._network)[:, start:right])
            generated += accepted
            following.append(token)
            start += row.num_run
        self._next, self._ran = token_ids([following])[0], self.sequences
        return generated
