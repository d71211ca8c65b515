"""Decides how many tokens are drafted for each reply in a step, so that drafts never take more time than they save.

Times are counted in plain steps, in which every reply gets one token. A step with drafts takes longer than a plain
one: by what drafting takes at all (the token sampled last has to be waited for, and caches are not merged), and by
what each drafted token adds. Both are measured, for each number of replies (`DraftCosts`). What drafts save follows
from how many were right before (`DraftRecord`): if each is right with probability p, the j-th of them is accepted
with p**j, and a token that a reply need not wait for is worth a plain step's share. A network with states has one more
cost: if a draft is wrong, the tokens before it in its step run again in the next one (rewinding.py).

All that is known fades while nothing is drafted, so what did not pay is tried again some time later.

To find that out takes time too, as does what those steps do not show: caches are separated and merged, the device has
nothing to do between two steps, and a draft model prefills a text before it drafts. So an account is kept of all time
that drafting took beyond what it saved. Drafting starts only while that is a small share of all time, whatever is
expected of it; and a text is prefilled for drafts only if they would have saved as much in the reply so far.

Decisions change how fast a reply is, and never its text. Knows no tokens and no MLX.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from math import log
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# How much of what is known of drafts counts after one more step with them: of one reply's, and of all replies'.
REPLY_MEMORY, SHARED_MEMORY = 0.95, 0.99
REST_MEMORY = 0.99
"""And after one without."""
ASSUMED_ACCEPTANCE = 2 / 3
MAX_WEIGHT = 3.0
"""The most that what is known of all replies counts, in tokens of this one."""


@dataclass(slots=True)
class DraftCounts:
    """Drafted tokens that were right, and steps in which one was wrong, decayed with every step."""

    memory: float = REPLY_MEMORY
    right: float = 0.0
    wrong: float = 0.0

    def add(self, proposed: int, accepted: int) -> None:
        """Note how many tokens were drafted in a step, and how many of them were right."""
        if proposed:
            self.right = self.right * self.memory + accepted
            self.wrong = self.wrong * self.memory + (accepted < proposed)

    def fade(self) -> None:
        """Note a step without drafts."""
        self.right *= REST_MEMORY
        self.wrong *= REST_MEMORY

    def acceptance(self, assumed: float = ASSUMED_ACCEPTANCE, weight: float = 1) -> float:
        """Return how likely a drafted token is right, if those before it are; what is assumed counts as `weight`."""
        return (self.right + weight * assumed) / (self.right + self.wrong + weight)


@dataclass(slots=True)
class DraftRecord:
    """How the drafts for one reply fared. `proposed` and `accepted` count its tokens.

    `is_rehearsed` says that while none are used, drafts are compared with the text at no cost, so that it is always
    known how they would fare. Of others nothing is known at first but how those for all replies fared.
    """

    proposed: int = 0
    accepted: int = 0
    is_rehearsed: bool = False
    length: int = 0  # tokens generated so far
    to_prefill: int = 0  # tokens that the drafter has to prefill first
    to_replay: int = 0  # tokens that run again in the next step, because a draft after them was wrong
    of_all: DraftCounts = field(default_factory=lambda: DraftCounts(SHARED_MEMORY))
    _own: DraftCounts = field(default_factory=DraftCounts)

    @property
    def acceptance(self) -> float:
        """How likely a drafted token is accepted, if those before it are."""
        weight = min(MAX_WEIGHT, 1 + (self.of_all.right + self.of_all.wrong) / 8)
        return self._own.acceptance(self.of_all.acceptance(), weight)

    def record(self, proposed: int, accepted: int) -> None:
        """Note how many tokens were drafted in a step, and how many of them were accepted."""
        self.proposed += proposed
        self.accepted += accepted
        self.learn(proposed, accepted)

    def learn(self, proposed: int, accepted: int) -> None:
        """Note how many tokens would have been drafted in a step, and how many of them accepted."""
        self._own.add(proposed, accepted)
        self.of_all.add(proposed, accepted)

    def rest(self) -> None:
        """Note a step without drafts: what is known fades, unless they are rehearsed."""
        if not self.is_rehearsed:
            self._own.fade()
            self.of_all.fade()


MIN_TIMES = 3
"""Plain steps that are measured before drafts are compared with them."""
MAX_TIMES = 9
"""Number of times of plain steps that are remembered."""
ASSUMED_COSTS = 0.0, 0.1, 0.1
"""Plain steps that a step with drafts takes beyond one: at all, and for each token that is drafted or runs again."""
RATE = 0.25
"""How much of what is not as expected of a step is learned from it."""
MAX_ERROR = 2.0
"""The most of it that counts, in plain steps."""
COST_MEMORY = 1 - 1 / 1024
"""How much of what costs are beyond the assumed ones counts after a plain step."""


class DraftCosts:
    """Times of steps with one number of replies, and what drafts add to them, as measured while it runs."""

    def __init__(self, replies: int) -> None:
        self.is_known = False  # whether any step with drafts was measured
        self._costs = ASSUMED_COSTS
        self._usual = 2.0 * replies  # tokens in a step with drafts
        # Seconds, by about how long the texts are: attention takes longer the longer they are.
        self._plain: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=MAX_TIMES))

    def of(self, drafted: float, replayed: float = 0.0) -> float:
        """Return how many plain steps a step with drafts takes beyond one."""
        overhead, per_token, per_replayed = self._costs
        return overhead + per_token * drafted + per_replayed * replayed

    def plain_step(self, context: int) -> float | None:
        """Return the seconds of a plain step with `context` tokens in all texts; None: too few were measured."""
        times = self._plain[_magnitude(context)]
        return median(times) if len(times) >= MIN_TIMES else None

    def record_plain(self, context: int, seconds: float) -> None:
        """Note a plain step. Costs fade: if they were too high, nothing else would correct that."""
        self._plain[_magnitude(context)].append(seconds)
        overhead, per_token, per_replayed = (
            assumed + COST_MEMORY * (cost - assumed)
            for cost, assumed in zip(self._costs, ASSUMED_COSTS, strict=True)
        )
        self._costs = overhead, per_token, per_replayed

    def record_drafted(self, context: int, drafted: int, replayed: int, seconds: float) -> None:
        """Note a step with drafts, where `replayed` tokens ran again: a step of normalised least mean squares."""
        plain = self.plain_step(context)
        if plain is None:
            return
        error = max(-MAX_ERROR, min(MAX_ERROR, seconds / plain - 1 - self.of(drafted, replayed)))
        rate, self.is_known = RATE if self.is_known else 1.0, True
        error *= rate * self._usual**2 / (self._usual**2 + drafted**2 + replayed**2)
        overhead, per_token, per_replayed = self._costs
        self._costs = (
            max(0.0, overhead + error),
            max(0.0, per_token + error * drafted / self._usual**2),
            max(0.0, per_replayed + error * replayed / self._usual**2),
        )


def _magnitude(context: int) -> int:
    """Return the same number for texts that are about as long: short ones, and others within a half."""
    return int(log(context + 1024, 1.5))


MAX_REPLIES = 4
"""The most replies that get drafts at once; more keep a device busy with one token each."""
MAX_SHARE, FIRST_STEPS = 0.0125, 1.0
"""What drafting may have cost when it starts: a share of all time, and plain steps beyond that."""
MEMORY = 1 - 1 / 8192
"""How much of the account counts after another step."""
MAX_LOSS = 8.0
"""The most that is charged for one step, in plain steps, unless a text was prefilled: the rest is not drafting's."""
MIN_PREFILL = 64
"""Tokens of a text that take a draft model longer than to draft."""
ASSUMED_PREFILL = 0.002
"""Plain steps per token that a draft model prefills, until it is measured."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step that was taken with `replies` replies, each of which got `tokens` tokens on average.

    `context` counts the tokens of all their texts. `drafted` is None if nothing was to be drafted in it, and
    `plain_steps` counts such steps in a row, with this one. A draft model prefilled `prefilled` tokens in
    `prefill_seconds`, and `replayed` tokens ran again. `is_steady` says that the step before was alike, so that this
    one took as long as it seems.
    """

    replies: int
    tokens: float
    context: int
    drafted: int | None
    plain_steps: int
    prefilled: int
    prefill_seconds: float
    replayed: int
    is_steady: bool


class DraftPacer:
    """What one model's drafts took and saved, and what follows from that.

    Without a `clock` nothing is measured, and the cost is assumed: processes that share a model have to decide alike.
    With `replays`, tokens before a wrong draft run again. `lengths` says how many tokens to draft for each reply in one
    step after the other, whether that pays or not.
    """

    def __init__(
        self,
        max_drafts: int,
        clock: Callable[[], float] | None,
        *,
        replays: bool = False,
        lengths: Iterator[int] | None = None,
    ) -> None:
        self.max_drafts = max_drafts
        self.clock = clock
        self.replays = replays
        self._lengths = lengths
        self.of_all = DraftCounts(SHARED_MEMORY)
        self.num_interruptions = 0  # steps in which the device had something else to do as well
        self._costs = [DraftCosts(count) for count in range(1, MAX_REPLIES + 1)]  # by number of replies
        # In plain steps: all time, what drafting took beyond what it saved, and what a draft model prefills a token in.
        self._time = self._lost = 0.0
        self._prefill = ASSUMED_PREFILL

    def plan(
        self, replies: Sequence[DraftRecord], limits: Sequence[int], context: int, *, is_drafting: bool
    ) -> list[int]:
        """Return how many tokens to draft for each reply in the next step: at most its limit, and what pays.

        `is_drafting` says whether the step before had drafts.
        """
        nothing = [0] * len(replies)
        if len(replies) > MAX_REPLIES:
            return nothing
        if self._lengths is not None:
            length = next(self._lengths)
            return [min(length, limit) for limit in limits]
        costs = self._costs[len(replies) - 1]
        counts, saved = nothing, 0.0
        if self.clock is None or costs.plain_step(context) is not None:
            best = [
                self._best(reply, limit, costs, 1 / len(replies))
                for reply, limit in zip(replies, limits, strict=True)
            ]
            counts, saved = [count for count, _ in best], sum(gain for _, gain in best) - costs.of(0)
        if saved <= 0 or not (is_drafting or self._can_afford(0.0)):
            counts = nothing
        elif self.clock is not None and not costs.is_known:  # to find out
            counts = [min(count, 1) for count in counts]
        for reply, count in zip(replies, counts, strict=True):
            if not count:
                reply.rest()
        return counts

    def record(self, step: Step, seconds: float) -> None:
        """Note how long a step took."""
        if step.replies > MAX_REPLIES:
            return
        costs = self._costs[step.replies - 1]
        self._time *= MEMORY
        self._lost *= MEMORY
        if (plain := costs.plain_step(step.context)) is not None:
            prefill = step.prefill_seconds / plain
            if step.prefilled:
                self._prefill = prefill / step.prefilled
            took = prefill + min(seconds / plain - prefill, MAX_LOSS)
            self._time += took
            # A plain step is not waited for before the next one, and neither is what it starts with, like merging
            # caches. So the first two belong to the drafts before them.
            if step.plain_steps <= 2:
                self._lost += took - step.tokens
        if step.is_steady and step.plain_steps > 2:
            costs.record_plain(step.context, seconds)
        elif step.is_steady and step.drafted:
            costs.record_drafted(step.context, step.drafted, step.replayed, seconds)

    def on_interruption(self) -> None:
        """Note that the device has something else to do in this step."""
        self.num_interruptions += 1

    def _best(self, reply: DraftRecord, limit: int, costs: DraftCosts, share: float) -> tuple[int, float]:
        """Return how many tokens to draft to gain most, and the gain in plain steps: what they save beyond their cost.

        Each is less likely to be accepted than the one before.
        """
        acceptance, best, most = reply.acceptance, 0, 0.0
        # How likely all drafts so far are right. What is looked up continues a token that is not known yet.
        likely = acceptance if reply.is_rehearsed else 1.0
        accepted = again = 0.0
        for count in range(1, min(limit, self.max_drafts) + 1):
            if self.replays:  # the tokens before this one, if it is the first wrong one
                again += likely * (1 - acceptance) * (reply.to_replay + count)
            likely *= acceptance
            accepted += likely
            gain = share * accepted - (costs.of(count, again) - costs.of(0))
            if gain > most:
                best, most = count, gain
        # How long a reply will be is not known: as likely as not, drafts will gain as much as they would have.
        prefill = reply.to_prefill * self._prefill if reply.to_prefill > MIN_PREFILL else 0.0
        is_worth_it = prefill <= most * min(reply.length, limit) and (
            not prefill or self._can_afford(prefill)
        )
        return (best, most) if is_worth_it else (0, 0.0)

    def _can_afford(self, steps: float) -> bool:
        return self.clock is None or self._lost + steps <= MAX_SHARE * self._time + FIRST_STEPS
