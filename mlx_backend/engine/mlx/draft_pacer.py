"""Decides how many tokens are drafted for each reply in a step, so that drafts never take more time than they save.

Times are counted in plain steps, in which every reply gets one token. A step with drafts takes longer than a plain
one: by what drafting takes at all (the token sampled last has to be waited for, and caches are not merged), and by
what each drafted token adds. Both are measured, for each number of replies (draft_costs.py). What drafts save follows
from how many were right before (draft_record.py): if each is right with probability p, the j-th of them is accepted
with p**j, and a token that a reply need not wait for is worth a plain step's share. A network with states has one more
cost: if a draft is wrong, the tokens before it in its step run again in the next one (rewinding.py).

To find that out takes time too, as does what those steps do not show: caches are separated and merged, the device has
nothing to do between two steps, and a draft model prefills a text before it drafts. So an account is kept of all time
that drafting took beyond what it saved. Drafting starts only while that is a small share of all time, whatever is
expected of it; and a text is prefilled for drafts only if they would have saved as much in the reply so far.

Decisions change how fast a reply is, and never its text. Knows no tokens and no MLX.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_backend.engine.mlx.draft_costs import DraftCosts
from mlx_backend.engine.mlx.draft_record import shared_counts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_backend.engine.mlx.draft_record import DraftRecord

MAX_REPLIES = 4  # that get drafts at once; more replies keep a device busy with one token each
MAX_SHARE = 0.015  # of the time, that drafting may have cost when it starts,
FIRST_STEPS = 1.0  # and plain steps beyond that
MEMORY = 1 - 1 / 8192  # how much of the account counts after another step
MAX_LOSS = 8.0  # plain steps in one step: the rest is not drafting's doing
MIN_PREFILL = 64  # tokens that take a draft model longer than to draft
ASSUMED_PREFILL = 0.002  # plain steps per token that a draft model prefills, until it is measured


@dataclass(frozen=True, slots=True)
class Step:
    """A step that was taken with so many replies.

    `context` counts the tokens of all their texts, `accepted` the drafted ones among those it generated. `drafted` is
    None if nothing was to be drafted in it, and `plain_steps` counts such steps in a row, with this one. `replayed`
    counts the tokens that ran again in the run that this step waited for. The step before had `replies_before`; with
    `follows_ahead` the device was still computing a token when that ended.
    """

    replies: int
    context: int
    drafted: int | None
    replayed: int
    accepted: int
    plain_steps: int
    replies_before: int
    follows_ahead: bool


class DraftPacer:
    """What one model's drafts took and saved, and what follows from that.

    Without a `clock` nothing is measured, and the cost is assumed: processes that share a model have to decide alike.
    With `replays`, tokens before a wrong draft run again.
    """

    def __init__(self, max_drafts: int, clock: Callable[[], float] | None, *, replays: bool = False) -> None:
        self.max_drafts = max_drafts
        self.clock = clock
        self.replays = replays
        # By whether replies are sampled: drafts are what is most likely, and greedy replies always take that.
        self.of_all = {False: shared_counts(), True: shared_counts()}
        self.num_interruptions = 0  # steps in which the device had something else to do as well
        self._costs: defaultdict[int, DraftCosts] = defaultdict(DraftCosts)  # by number of replies
        self._time = 0.0  # seconds: of all steps,
        self._lost = 0.0  # and those that drafting took beyond what it saved
        self._prefill: float | None = None  # seconds that a draft model takes per token

    def plan(
        self, replies: Sequence[DraftRecord], limits: Sequence[int], context: int, *, is_drafting: bool
    ) -> list[int]:
        """Return how many tokens to draft for each reply in the next step: at most its limit, and what pays.

        `is_drafting` says whether the step before had drafts.
        """
        counts = [0] * len(replies)
        if self.can_draft(replies, context):
            counts = self._plan(replies, limits, context, is_drafting)
        for reply in replies:
            reply.pause = max(0, reply.pause - 1)
        return counts

    def can_draft(self, replies: Sequence[DraftRecord], context: int) -> bool:
        """Whether any reply may get drafts when these are decoded together."""
        if len(replies) > MAX_REPLIES or all(reply.pause for reply in replies):
            return False
        return self.clock is None or self._costs[len(replies)].plain_step(context) is not None

    def record(self, step: Step, seconds: float) -> None:
        """Note how long a step took."""
        costs = self._costs[step.replies]
        self._charge(step, seconds, costs.plain_step(step.context))
        if step.replies_before != step.replies:
            return
        if step.drafted is None:
            if step.plain_steps > 2:
                costs.record_plain(step.context, seconds)
        elif step.follows_ahead == (not step.drafted):
            costs.record_drafted(step.context, step.drafted, seconds, step.replayed)

    def record_prefill(self, tokens: int, seconds: float) -> None:
        """Note how long a draft model took to prefill so many tokens: none, if it does not know one of them."""
        if tokens:
            self._prefill = seconds / tokens
        self._time += seconds
        self._lost += seconds

    def on_interruption(self) -> None:
        """Note that the device has something else to do in this step."""
        self.num_interruptions += 1

    def _plan(
        self, replies: Sequence[DraftRecord], limits: Sequence[int], context: int, is_drafting: bool
    ) -> list[int]:
        costs, share = self._costs[len(replies)], 1 / len(replies)
        plain = costs.plain_step(context) or 1.0
        counts = [0] * len(replies)
        saved = 0.0
        for row, (reply, limit) in enumerate(zip(replies, limits, strict=True)):
            if reply.pause or not limit:
                continue
            count, gain = self._best_count(reply, min(limit, self.max_drafts), costs, share, 0)
            if not count:
                reply.stop(is_wrong=True)
                continue
            if self._is_prefill_worth_it(reply, gain, limit, plain):
                saved += gain
                counts[row] = count
        drafted = [reply for reply, count in zip(replies, counts, strict=True) if count]
        if saved <= costs.overhead:
            for reply in drafted:
                reply.stop(is_wrong=False)
            return [0] * len(replies)
        if not is_drafting and not self._can_afford(0.0, plain):
            return [0] * len(replies)
        for reply in drafted:
            reply.is_started = True
        if self.clock is not None and not costs.are_known:
            return [min(count, 1) for count in counts]  # to find out
        for row, reply in enumerate(replies):
            if counts[row] and reply.to_replay:
                # Drafts pay, but after this step more tokens than usual may have to run again; after a plain one, none.
                count, gain = self._best_count(reply, counts[row], costs, share, reply.to_replay)
                counts[row] = count if gain > costs.overhead else 0
        return counts

    def _best_count(
        self, reply: DraftRecord, limit: int, costs: DraftCosts, share: float, to_replay: int
    ) -> tuple[int, float]:
        """Return how many tokens to draft to gain most, and the gain in plain steps: what they save beyond their cost.

        Each is less likely to be accepted than the one before. `to_replay` tokens run again in the same step anyway.
        """
        acceptance, best, most = reply.acceptance, 0, 0.0
        likely, accepted, again = 1.0, 0.0, 0.0  # likely: that all drafts so far are right
        for count in range(1, limit + 1):
            if self.replays:  # the tokens before this one, if it is the first wrong one
                again += likely * (1 - acceptance) * (to_replay + count)
            likely *= acceptance
            accepted += likely
            gain = share * accepted - costs.per_token * count - costs.per_replayed * again
            if gain > most:
                best, most = count, gain
        return best, most * reply.frequency

    def _is_prefill_worth_it(self, reply: DraftRecord, gain: float, limit: int, plain: float) -> bool:
        if reply.is_started and reply.to_prefill <= MIN_PREFILL:
            return True
        prefill = reply.to_prefill * (ASSUMED_PREFILL if self._prefill is None else self._prefill / plain)
        # How long a reply will be is not known: as likely as not, twice as long as it is.
        if prefill > gain * min(reply.length, limit):
            return False
        return reply.is_started or self._can_afford(prefill * plain, plain)

    def _can_afford(self, seconds: float, plain: float) -> bool:
        return self.clock is None or self._lost + seconds <= MAX_SHARE * self._time + FIRST_STEPS * plain

    def _charge(self, step: Step, seconds: float, plain: float | None) -> None:
        self._time *= MEMORY
        self._lost *= MEMORY
        if plain is None:
            return
        self._time += min(seconds, MAX_LOSS * plain)
        if step.plain_steps > 2:
            return
        # A step that verifies no drafts is not waited for before the next one, and neither is what it starts with, like
        # merging caches.
        tokens = float(step.follows_ahead)
        if step.drafted:
            tokens += 1 + step.accepted / step.replies
        self._lost += min(seconds - tokens * plain, MAX_LOSS * plain)
