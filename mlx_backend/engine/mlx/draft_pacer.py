"""Decides how many tokens are drafted for each reply in a step, so that drafts never take more time than they save.

Times are counted in plain steps, in which every reply gets one token. A step with drafts takes longer than a plain
one: by what drafting takes at all (the token sampled last has to be waited for, and caches are not merged), and by
what each drafted token adds. Both are measured, for each number of replies (`DraftCosts`). What drafts save follows
from how many were right before (`DraftRecord`): if each is right with probability p, the j-th of them is accepted
with p**j, and a token that a reply need not wait for is worth a plain step's share. A network with states has one more
cost: if a draft is wrong, the tokens before it in its step run again in the next one (rewinding.py).

To find that out takes time too, as does what those steps do not show: caches are separated and merged, the device has
nothing to do between two steps, and a draft model prefills a text before it drafts. So an account is kept of all time
that drafting took beyond what it saved. Drafting starts only while that is a small share of all time, whatever is
expected of it; and a text is prefilled for drafts only if they would have saved as much in the reply so far.

Decisions change how fast a reply is, and never its text. Knows no tokens and no MLX.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import combinations
from math import log
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FIRST_PAUSE, MAX_PAUSE = 16, 256
"""Steps without drafts, after those of a reply did not pay."""
# How much of what is known of drafts counts after one more step with them: of one reply's, and of all replies'.
REPLY_MEMORY, SHARED_MEMORY = 0.95, 0.99
ASSUMED_ACCEPTANCE = 2 / 3
MAX_WEIGHT = 6.0
"""The most that what is known of all replies counts, in tokens of this one."""


@dataclass(slots=True)
class DraftCounts:
    """What became of drafts, decayed with every step.

    `right` counts drafted tokens that were accepted, `wrong` steps in which one was rejected, `found` steps in which
    anything was drafted, and `missed` those in which nothing was.
    """

    memory: float
    right: float = 0.0
    wrong: float = 0.0
    found: float = 0.0
    missed: float = 0.0

    def add(self, proposed: int, accepted: int) -> None:
        """Note how many tokens were drafted in a step, and how many of them were accepted."""
        self.found = self.found * self.memory + bool(proposed)
        self.missed = self.missed * self.memory + (not proposed)
        if proposed:
            self.right = self.right * self.memory + accepted
            self.wrong = self.wrong * self.memory + (accepted < proposed)

    def acceptance(self, assumed: float, weight: float = 1) -> float:
        """Return how likely a drafted token is accepted, if those before it are.

        What is assumed counts as `weight` tokens.
        """
        return (self.right + weight * assumed) / (self.right + self.wrong + weight)


def shared_counts() -> DraftCounts:
    """Return counts for the drafts of all replies."""
    return DraftCounts(SHARED_MEMORY)


@dataclass(slots=True)
class DraftRecord:
    """How the drafts for one reply fared. `proposed` and `accepted` count its tokens.

    `is_rehearsed` says that while none are used, drafts are compared with the text at no cost, so that it is always
    known how they would fare. Of others nothing is known at first but how those for all replies fared; after a pause
    they are tried as if nothing were.
    """

    proposed: int = 0
    accepted: int = 0
    pause: int = 0  # steps until it may get drafts again
    is_started: bool = False  # whether it has got some since
    is_rehearsed: bool = False
    length: int = 0  # tokens generated so far
    to_prefill: int = 0  # tokens that the drafter has to prefill first
    to_replay: int = 0  # tokens that run again in the next step, because a draft after them was wrong
    of_all: DraftCounts = field(default_factory=shared_counts)
    _own: DraftCounts = field(default_factory=lambda: DraftCounts(REPLY_MEMORY))
    _next_pause: int = FIRST_PAUSE
    _has_paused: bool = False

    @property
    def acceptance(self) -> float:
        """How likely a drafted token is accepted, if those before it are."""
        if self._has_paused:
            return self._own.acceptance(ASSUMED_ACCEPTANCE)
        weight = min(MAX_WEIGHT, 1 + (self.of_all.right + self.of_all.wrong) / 8)
        return self._own.acceptance(self.of_all.acceptance(ASSUMED_ACCEPTANCE), weight)

    @property
    def frequency(self) -> float:
        """How likely a step has drafts at all."""
        found, steps = self._own.found, self._own.found + self._own.missed
        return found / (steps + 0.5) if self.is_rehearsed else (found + 1) / (steps + 1)

    def record(self, proposed: int, accepted: int) -> None:
        """Note how many tokens were drafted in a step, and how many of them were accepted."""
        self.proposed += proposed
        self.accepted += accepted
        self.learn(proposed, accepted)

    def learn(self, proposed: int, accepted: int) -> None:
        """Note how many tokens would have been drafted in a step, and how many of them accepted."""
        self._own.add(proposed, accepted)
        self.of_all.add(proposed, accepted)

    def stop(self, *, is_wrong: bool) -> None:
        """Pause before drafts are tried again: for longer each time if they are wrong, and not only too few.

        If they are rehearsed, do nothing. Drafts that are about to be tried are still: what does not pay for one reply
        may pay for several.
        """
        if self.is_rehearsed or (self._has_paused and not self.is_started):
            return
        self.pause = self._next_pause if is_wrong else FIRST_PAUSE
        if is_wrong:
            self._next_pause = min(2 * self._next_pause, MAX_PAUSE)
        self._own = DraftCounts(REPLY_MEMORY)
        self._has_paused, self.is_started = True, False


MIN_TIMES = 3
"""Plain steps that are measured before drafts are compared with them."""
MAX_TIMES = 9
"""Number of times that are remembered of each kind of step."""
MAX_KINDS = 32
"""Number of kinds of steps with drafts that are remembered: (tokens drafted, tokens run again)."""
FIRST_MEMORY, MAX_MEMORY = 128, 4096
"""Plain steps in a row, after which something is forgotten that was measured with drafts."""
STEPS_PER_MEASUREMENT = 256
"""Drafted in a row before plain steps are measured again."""
ASSUMED_COST = 0.1
"""Plain steps per drafted token, and per token that runs again, until it is measured."""


class DraftCosts:
    """Times of steps with one number of replies, and what drafts add to them, as measured while it runs.

    What drafts cost is counted in plain steps: `overhead` for drafting at all, `per_token` for each drafted token, and
    `per_replayed` for each that runs again because a draft after it was wrong.
    """

    def __init__(self) -> None:
        self.overhead = 0.0
        self.per_token = ASSUMED_COST
        self.per_replayed = ASSUMED_COST
        # Seconds, by about how long the texts are: attention takes longer the longer they are.
        self._plain: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=MAX_TIMES))
        # Plain steps beyond one, by how many tokens were drafted and how many ran again; the latest measured come last.
        self._drafted: dict[tuple[int, int], deque[float]] = {}
        self._steps_without = 0  # in a row
        self._steps_with_drafts = 0  # since plain steps were measured
        self._memory = FIRST_MEMORY

    @property
    def are_known(self) -> bool:
        """Whether more than one step with drafts was measured."""
        return sum(map(len, self._drafted.values())) > 1

    def plain_step(self, context: int) -> float | None:
        """Return the seconds of a plain step with `context` tokens in all texts; None: too few were measured."""
        times = self._plain[_magnitude(context)]
        return median(times) if len(times) >= MIN_TIMES else None

    def record_plain(self, context: int, seconds: float) -> None:
        """Note a plain step. After many of them, forget the oldest of what was measured with drafts.

        Where nothing is drafted because it cost too much, nothing else would ever correct that.
        """
        self._plain[_magnitude(context)].append(seconds)
        self._steps_with_drafts = 0
        self._steps_without += 1
        if self._steps_without == self._memory:
            self._steps_without, self._memory = 0, min(2 * self._memory, MAX_MEMORY)
            if self._drafted:
                del self._drafted[next(iter(self._drafted))]
                self._fit()

    def record_drafted(self, context: int, tokens: int, seconds: float, replayed: int = 0) -> None:
        """Note a step with drafts, where `replayed` tokens ran again. After many, have plain steps measured again."""
        plain = self.plain_step(context)
        if plain is None:
            return
        self._steps_without = 0
        self._steps_with_drafts += 1
        if self._steps_with_drafts == STEPS_PER_MEASUREMENT:
            self._plain[_magnitude(context)].clear()
            self._memory = FIRST_MEMORY
        kind = tokens, replayed
        times = self._drafted.pop(kind, None) or deque[float](maxlen=MAX_TIMES)
        times.append(seconds / plain - 1)
        self._drafted[kind] = times
        if len(self._drafted) > MAX_KINDS:
            del self._drafted[next(iter(self._drafted))]
        self._fit()

    def _fit(self) -> None:
        points = [(*kind, median(times)) for kind, times in self._drafted.items()]
        self.per_replayed = _per_replayed(points)
        self.overhead, self.per_token = _line([(x, y - self.per_replayed * again) for x, again, y in points])


def _magnitude(context: int) -> int:
    """Return the same number for texts that are about as long: short ones, and others within a half."""
    return int(log(context + 1024, 1.5))


def _per_replayed(points: Sequence[tuple[int, int, float]]) -> float:
    """Return what a token that runs again costs, from (drafted, replayed, y) of steps with equally many drafted."""
    slopes = [
        (y2 - y1) / (again2 - again1)
        for (x1, again1, y1), (x2, again2, y2) in combinations(points, 2)
        if x1 == x2
    ]
    return max(0.0, median(slopes or [ASSUMED_COST]))


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return a line through points, as (y at 0, slope): Theil and Sen's, which outliers hardly move. Never negative."""
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2) if x1 != x2]
    if not slopes:  # what was measured is the tokens' doing up to what was assumed of them
        slopes = [ASSUMED_COST, *(min(ASSUMED_COST, y / x) for x, y in points if x)]
    slope = max(0.0, median(slopes))
    return max(0.0, median([y - slope * x for x, y in points] or [0.0])), slope


MAX_REPLIES = 4
"""The most replies that get drafts at once; more keep a device busy with one token each."""
MAX_SHARE, FIRST_STEPS = 0.015, 1.0
"""What drafting may have cost when it starts: a share of all time, and plain steps beyond that."""
MEMORY = 1 - 1 / 8192
"""How much of the account counts after another step."""
MAX_LOSS = 8.0
"""The most that is charged for one step, in plain steps: the rest is not drafting's doing."""
MIN_PREFILL = 64
"""Tokens of a text that take a draft model longer than to draft."""
ASSUMED_PREFILL = 0.002
"""Plain steps per token that a draft model prefills, until it is measured."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step that was taken with `replies` replies.

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
        self._time = 0.0  # seconds of all steps
        self._lost = 0.0  # seconds that drafting took beyond what it saved
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
        """Note the seconds in which a draft model prefilled `tokens`: none, if it does not know one of them."""
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
