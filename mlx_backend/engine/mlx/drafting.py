"""Drafts for the sequences of one decoder: which get some, what is drafted, and how many tokens of it are accepted.

Knows nothing of how caches are kept, of running the network, or of sampling from its logits.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_backend.engine.mlx.draft_pacer import MAX_REPLIES, MIN_PREFILL, Step
from mlx_backend.engine.mlx.rewinding import RewindPoint
from mlx_backend.engine.mlx.speculative import DraftTask, num_to_prefill, propose

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from mlx_backend.engine.mlx.batch_caches import BatchCaches
    from mlx_backend.engine.mlx.draft_pacer import DraftPacer
    from mlx_backend.engine.mlx.packed_forward import Segment
    from mlx_backend.engine.mlx.sampling import SamplePosition
    from mlx_backend.engine.mlx.sequences import DecodingSequence, GeneratedToken

log = logging.getLogger(__name__)

MAX_REPLAY = 16
"""Tokens that may run again in a step with drafts.

If one of its drafts is wrong, they all run once more, together with this step's drafts that were right.
"""


class Drafting:
    """Drafts for a decoder's sequences. The pacer may be shared with other decoders."""

    def __init__(self, pacer: DraftPacer) -> None:
        self._pacer = pacer
        self._is_broken = False
        self._is_drafting = False  # in the last step
        self._plain_steps = 2  # in a row; none had drafts before that would still be waited for
        self._is_ahead = True  # whether the device still computes a token when a step has ended
        self._last_step: tuple[int, float] | None = None  # of how many sequences, and when it ended
        self._num_interruptions = 0  # by then
        self._num_replayed = 0  # tokens that run again in this step
        self._num_replayed_before = 0  # and in the last one

    def is_drafting(self, sequences: Sequence[DecodingSequence]) -> bool:
        """Whether drafts are being used, and these sequences may get some in their next step together."""
        records = [sequence.drafts for sequence in sequences]
        return self._is_drafting and self._pacer.can_draft(records, _context(sequences))

    def plan(self, sequences: Sequence[DecodingSequence], unconstrained_tokens: Sequence[int]) -> list[int]:
        """Return how many tokens to draft for each sequence, at most.

        `unconstrained_tokens` says for how many tokens each constraint has promised not to mask any.
        """
        self._is_drafting = False
        self._num_replayed_before = self._num_replayed
        self._num_replayed = sum(sequence.num_to_replay for sequence in sequences)
        if self._is_broken or len(sequences) > MAX_REPLIES:
            return [0] * len(sequences)
        was_drafting = self._plain_steps == 0
        limits = []
        for sequence, unconstrained in zip(sequences, unconstrained_tokens, strict=True):
            record, drafter = sequence.drafts, sequence.drafter
            record.to_replay = sequence.num_to_replay
            if drafter is None or sequence.num_to_replay > MAX_REPLAY:
                limits.append(0)
                continue
            # The token sampled last is unconstrained already; one more is sampled after it and after every draft.
            limits.append(max(0, min(sequence.request.max_tokens - sequence.num_sampled, unconstrained - 2)))
            record.of_all = self._pacer.of_all[sequence.request.sampling.temperature > 0]
            record.is_rehearsed = drafter.can_rehearse
            record.length, record.to_prefill = sequence.num_sampled, drafter.num_to_prefill(sequence.tokens)
            if (outcome := drafter.rehearse(sequence.tokens, self._pacer.max_drafts)) is not None:
                record.learn(*outcome)
        records = [sequence.drafts for sequence in sequences]
        counts = self._pacer.plan(records, limits, _context(sequences), is_drafting=was_drafting)
        self._is_drafting = any(counts)
        return counts

    def copy(self) -> Drafting:
        """Return what drafts for another decoder in the same way."""
        return Drafting(self._pacer)

    def propose(self, sequences: Sequence[DecodingSequence], max_drafts: Sequence[int]) -> list[list[int]]:
        """Draft what follows the sequences, where any may be drafted."""
        rows = [row for row, count in enumerate(max_drafts) if count]
        drafts: list[list[int]] = [[] for _ in sequences]
        tasks = []
        for row in rows:
            drafter = sequences[row].drafter
            assert drafter is not None
            tasks.append(DraftTask(drafter, sequences[row].tokens, max_drafts[row]))
        clock = self._pacer.clock
        started, to_prefill = clock() if clock is not None else 0.0, num_to_prefill(tasks)
        try:
            proposed = propose(tasks)
        except Exception as error:
            self.give_up(error)
            return drafts
        for row, own in zip(rows, proposed, strict=True):
            if own is not None:
                drafts[row] = own
                if not own:
                    sequences[row].drafts.record(0, 0)
        if clock is not None and to_prefill > MIN_PREFILL:
            seconds = clock() - started
            self._pacer.record_prefill(to_prefill - num_to_prefill(tasks), seconds)
            if self._last_step is not None:  # so this step is like no other
                self._last_step = 0, self._last_step[1] + seconds
        return drafts

    def give_up(self, error: BaseException | None) -> None:
        """Draft no more: replies go on without."""
        self._is_broken = True
        log.warning("Drafting failed; replies go on without drafts: %r", error)

    def on_step(
        self, sequences: Sequence[DecodingSequence], num_drafted: int | None, num_accepted: int = 0
    ) -> None:
        """Measure a step in which `num_drafted` tokens were drafted; None: in which nothing was to be drafted.

        `num_accepted` is how many of them were accepted.
        """
        follows_ahead, self._is_ahead = self._is_ahead, not num_drafted
        self._plain_steps = self._plain_steps + 1 if num_drafted is None else 0
        clock = self._pacer.clock
        if clock is None:
            return
        now, number, interruptions = clock(), len(sequences), self._pacer.num_interruptions
        is_interrupted, self._num_interruptions = interruptions != self._num_interruptions, interruptions
        if is_interrupted:  # the next step may have to wait for that too
            self.forget_last_step()
            return
        # A step is as long as the time since the last one: each waits for what the one before started.
        if self._last_step is not None:
            number_before, then = self._last_step
            step = Step(
                number,
                _context(sequences),
                num_drafted,
                # A step that verifies no drafts waits for the run of the step before.
                self._num_replayed if num_drafted else self._num_replayed_before,
                num_accepted,
                self._plain_steps,
                number_before,
                follows_ahead,
            )
            self._pacer.record(step, now - then)
        self._last_step = number, now

    def forget_last_step(self) -> None:
        """Note that the next step cannot be measured: there was something else to do meanwhile."""
        self._last_step = None


def _context(sequences: Sequence[DecodingSequence]) -> int:
    return sum(len(sequence.tokens) for sequence in sequences)


class DraftedRows:
    """A step in which sequences are fed the token sampled last and the drafts after it; each may have none.

    `ended` are the keys of the sequences whose replies end with the token sampled last.
    """

    def __init__(
        self,
        sequences: Sequence[DecodingSequence],
        tokens: Sequence[int],
        drafts: Sequence[Sequence[int]],
        ended: Collection[int],
    ) -> None:
        self._sequences = sequences
        self._fed = [[token, *own] for token, own in zip(tokens, drafts, strict=True)]
        self._replayed = [sequence.to_replay for sequence in sequences]  # run first, not sampled after
        self._points: list[RewindPoint] = []
        self._arrays = [mx.array(row) for row in self._fed]
        self._ended = ended
        self._positions: list[list[SamplePosition]] = []

    @property
    def owners(self) -> list[DecodingSequence]:
        """The sequence that each of all tokens belongs to."""
        return [sequence for sequence, row in zip(self._sequences, self._fed, strict=True) for _ in row]

    def segments(self, caches: BatchCaches) -> list[Segment]:
        """Return what is to be run, on caches that are not merged."""
        segments = []
        for row, (sequence, tokens) in enumerate(zip(self._sequences, self._arrays, strict=True)):
            segment = caches.rewindable_segment(row, tokens, sequence.images.shift)
            self._points.append(RewindPoint(segment.layers))
            segments.append(segment.after(self._replayed[row]) if self._replayed[row] else segment)
        return segments

    def logits(self, every: mx.array) -> mx.array:
        """Return those logits to sample from ([tokens, vocabulary]), of the logits of every token that was run."""
        if not any(self._replayed):
            return every
        sampled, start = list[int](), 0
        for replayed, fed in zip(self._replayed, self._fed, strict=True):
            start += len(replayed)
            sampled += range(start, start + len(fed))
            start += len(fed)
        return every[mx.array(sampled)]

    def next_positions(self) -> list[SamplePosition]:
        """Return the position to sample at after each of all tokens."""
        for sequence, row in zip(self._sequences, self._fed, strict=True):
            if len(row) == 1:  # its constraint may have promised nothing, and has to see the token first
                sequence.advance_constraint(row[0])
        self._positions = [
            [sequence.position_after(tokens, index) for index in range(tokens.size)]
            for sequence, tokens in zip(self._sequences, self._arrays, strict=True)
        ]
        return [position for own in self._positions for position in own]

    def accept(self, sampled: Sequence[int]) -> tuple[list[GeneratedToken], list[int]]:
        """Emit the drafts that were sampled too, and take back the others.

        `sampled` is what the model samples after each of all tokens. Returns what was emitted, and which of these are
        the tokens sampled last for each sequence.
        """
        generated: list[GeneratedToken] = []
        last: list[int] = []
        start = 0
        for row, (sequence, fed) in enumerate(zip(self._sequences, self._fed, strict=True)):
            emitted = self._accept_row(row, sampled[start : start + len(fed)], start)
            rejected, num_run = len(fed) - 1 - len(emitted), len(self._replayed[row]) + len(fed)
            sequence.num_to_replay = self._points[row].rewind(rejected, num_run)
            generated += emitted
            last.append(start + len(emitted))
            if len(fed) > 1:
                sequence.drafts.record(len(fed) - 1, len(emitted))
                for token in fed[: 1 + len(emitted)]:
                    sequence.advance_constraint(token)
            start += len(fed)
        return generated, last

    def _accept_row(self, row: int, sampled: Sequence[int], start: int) -> list[GeneratedToken]:
        sequence, fed, positions = self._sequences[row], self._fed[row], self._positions[row]
        step = sequence.logprobs[0] if sequence.logprobs is not None else None
        emitted: list[GeneratedToken] = []
        is_ended = sequence.key in self._ended
        for index, draft in enumerate(fed[1:]):
            if is_ended or sampled[index] != draft:
                break
            emitted.append(sequence.emit(draft, (step, start + index) if step is not None else None))
            is_ended = emitted[-1].finish_reason is not None
        sequence.num_sampled = positions[0].index + 1 + len(emitted)
        sequence.penalties = positions[len(emitted)].penalties
        sequence.logprobs = (step, start + len(emitted)) if step is not None else None
        return emitted
