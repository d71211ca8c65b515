"""Drafts for the sequences of one decoder: which get some, what is drafted, and how many tokens of it are accepted.

Knows nothing of how caches are kept, of running the network, or of sampling from its logits.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_backend.engine.mlx.draft_pacer import MAX_REPLIES, MIN_PREFILL, Step
from mlx_backend.engine.mlx.rewinding import RewindPoint
from mlx_backend.engine.mlx.speculative import DraftTask, HeadDrafter, TextDrafter, propose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mlx_backend.engine.mlx.batch_caches import BatchCaches
    from mlx_backend.engine.mlx.draft_pacer import DraftPacer
    from mlx_backend.engine.mlx.kv_cache import LayerCaches
    from mlx_backend.engine.mlx.packed_forward import Segment
    from mlx_backend.engine.mlx.sampling import SamplePosition, StepLogprobs
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
        self._had_drafts = False  # in the last step: else the device still computes what that has started
        self._plain_steps = 2  # in a row; none had drafts before that would still be waited for
        self._last_step: tuple[int, float] | None = None  # of how many sequences, and when it ended
        self._num_interruptions = 0  # by then
        self._num_replayed = 0  # tokens in this step
        self._prefilled = 0, 0.0  # tokens in it, and seconds

    def plan(self, sequences: Sequence[DecodingSequence], *, constrained: bool) -> list[int]:
        """Return how many tokens to draft for each sequence, at most: `constrained`, if it has a constraint too."""
        self._prefilled = 0, 0.0
        self._num_replayed = sum(sequence.num_to_replay for sequence in sequences)
        if self._is_broken or len(sequences) > MAX_REPLIES:
            return [0] * len(sequences)
        was_drafting = self._plain_steps == 0
        limits = []
        for sequence in sequences:
            record, drafter = sequence.drafts, sequence.drafter
            limit = sequence.request.max_tokens - sequence.num_sampled
            is_held = sequence.sampler.constraint is not None and not constrained
            if drafter is None or sequence.num_to_replay > MAX_REPLAY or is_held:
                limit = 0
            elif isinstance(drafter, TextDrafter):
                record.is_rehearsed = True
                record.learn(*drafter.rehearse(sequence.tokens, 1 + self._pacer.max_drafts))
                limit = min(limit, len(drafter.guess) - 1)  # the first is not known yet, but sampled
            limits.append(max(0, limit))
            record.of_all, record.length = self._pacer.of_all, sequence.num_sampled
            record.to_replay = sequence.num_to_replay
            record.to_prefill = drafter.num_to_prefill(sequence.tokens) if drafter is not None else 0
        records = [sequence.drafts for sequence in sequences]
        return self._pacer.plan(records, limits, _context(sequences), is_drafting=was_drafting)

    def propose(
        self,
        sequences: Sequence[DecodingSequence],
        max_drafts: Sequence[int],
        layers: Callable[[int], LayerCaches] = lambda _row: [],
    ) -> list[list[int]]:
        """Draft what follows the sequences, where any may be drafted. `layers` returns the caches of a row."""
        drafts: list[list[int]] = [[] for _ in sequences]
        tasks = {
            row: DraftTask(
                sequence.drafter,
                sequence.tokens,
                count,
                sequence.draft_position(),
                layers(row) if isinstance(sequence.drafter, HeadDrafter) else [],
                sequence.num_to_replay,
                sequence.images.shift,
            )
            for row, (sequence, count) in enumerate(zip(sequences, max_drafts, strict=True))
            if count and sequence.drafter is not None
        }
        clock, to_prefill = self._pacer.clock, _num_to_prefill(tasks.values())
        started = clock() if clock is not None else 0.0
        try:
            proposed = propose([*tasks.values()])
        except Exception as error:
            self.give_up(error)
            return drafts
        if clock is not None and to_prefill > MIN_PREFILL:
            self._prefilled = to_prefill - _num_to_prefill(tasks.values()), clock() - started
        for row, own in zip(tasks, proposed, strict=True):
            drafts[row] = own or []
            if own == [] and not sequences[row].drafts.is_rehearsed:
                sequences[row].drafter = None  # it does not know all tokens of the text
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
        had_drafts, self._had_drafts = self._had_drafts, bool(num_drafted)
        self._plain_steps = self._plain_steps + 1 if num_drafted is None else 0
        if (clock := self._pacer.clock) is None:
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
                1 + num_accepted / number,
                _context(sequences),
                num_drafted,
                self._plain_steps,
                *self._prefilled,
                self._num_replayed,
                is_steady=number == number_before and had_drafts == self._had_drafts,
            )
            self._pacer.record(step, now - then)
        self._last_step = number, now

    def forget_last_step(self) -> None:
        """Note that the next step cannot be measured: there was something else to do meanwhile."""
        self._last_step = None


def _num_to_prefill(tasks: Iterable[DraftTask]) -> int:
    return sum(task.drafter.num_to_prefill(task.tokens) for task in tasks)


def _context(sequences: Sequence[DecodingSequence]) -> int:
    return sum(len(sequence.tokens) for sequence in sequences)


class DraftedRow:
    """A sequence in a step in which it is fed the token sampled last and the drafts after it; there may be none.

    `start` is the number of the first of these among all tokens of the step. `ends` says that its reply ends with the
    token sampled last. The methods are called in their order: `next_positions` until it returns none, and `add` once
    for each position.
    """

    def __init__(
        self, sequence: DecodingSequence, token: int, drafts: Sequence[int], start: int, *, ends: bool
    ) -> None:
        self.sequence = sequence
        self.fed = [token, *drafts]
        self.replayed = sequence.to_replay  # run first, and not sampled after
        self._array = mx.array(self.fed)
        self._start = start
        self._ends = ends
        self.is_masked = sequence.sampler.unconstrained_tokens() <= len(self.fed)
        self._positions: list[SamplePosition] = []
        self._sampled: list[int] = []
        self._logprobs: list[tuple[StepLogprobs, int] | None] = []  # of those

    @property
    def num_run(self) -> int:
        """How many tokens are run."""
        return len(self.replayed) + len(self.fed)

    def segment(self, caches: BatchCaches, row: int) -> Segment:
        """Return what is to be run, on caches that are not merged."""
        segment = caches.rewindable_segment(row, self._array, self.sequence.images.shift)
        self._point = RewindPoint(segment.layers)
        return segment.after(self.replayed) if self.replayed else segment

    def next_positions(self) -> dict[int, SamplePosition]:
        """Return the positions to sample at next, by the numbers of the tokens that they follow.

        They are all, unless a constraint has to see each token before it can mask the next: then one at a time, for as
        long as the drafts are what is sampled.
        """
        sequence, first = self.sequence, len(self._sampled)
        if first == len(self.fed):
            return {}
        if first and (self._sampled[-1] != self.fed[first] or self.fed[first] in sequence.end_tokens):
            return {}
        last = first + 1 if self.is_masked else len(self.fed)
        if self.is_masked:
            sequence.advance_constraint(self.fed[first])
        self._positions += [sequence.position_after(self._array, at) for at in range(first, last)]
        return {self._start + at: self._positions[at] for at in range(first, last)}

    def add(self, token: int, logprobs: tuple[StepLogprobs, int] | None) -> None:
        """Note what is sampled at the next position."""
        self._sampled.append(token)
        self._logprobs.append(logprobs)

    def accept(self) -> tuple[list[GeneratedToken], int]:
        """Emit the drafts that were sampled too, and take back the others; return the token that follows, too."""
        sequence, fed = self.sequence, self.fed
        emitted: list[GeneratedToken] = []
        has_ended = self._ends
        for sampled, draft, logprobs in zip(self._sampled, fed[1:], self._logprobs, strict=False):
            if has_ended or sampled != draft:
                break
            emitted.append(sequence.emit(draft, logprobs))
            has_ended = emitted[-1].finish_reason is not None
        count = len(emitted)
        last = min(count, len(self._sampled) - 1)  # nothing is sampled after a masked reply's end
        sequence.num_sampled = self._positions[0].index + 1 + count
        sequence.penalties = self._positions[last].penalties
        sequence.logprobs = self._logprobs[last]
        rejected = len(fed) - 1 - count
        sequence.num_to_replay = self._point.rewind(rejected, self.num_run)
        if len(fed) > 1:
            sequence.drafts.record(len(fed) - 1, count)
        if not self.is_masked:
            for token in fed[: 1 + count]:
                sequence.advance_constraint(token)
        return emitted, self._sampled[last]
