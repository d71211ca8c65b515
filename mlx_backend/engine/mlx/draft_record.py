"""How drafts fared: those for one reply, and those for all replies of a model. Knows nothing of time."""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_PAUSE, MAX_PAUSE = 16, 256  # steps
MEMORY = 0.95  # how much of what is known of a reply's drafts counts after one more step with them
SHARED_MEMORY = 0.99  # and of the drafts for all replies
ASSUMED_ACCEPTANCE = 2 / 3
MAX_WEIGHT = 6.0  # of what is known of all replies, in tokens of this one


@dataclass(slots=True)
class DraftCounts:
    """What became of drafts, decayed with every step."""

    memory: float
    right: float = 0.0  # drafted tokens that were accepted,
    wrong: float = 0.0  # steps in which one was rejected,
    found: float = 0.0  # steps in which anything was drafted,
    missed: float = 0.0  # and in which nothing was

    def add(self, proposed: int, accepted: int) -> None:
        """Note how many tokens were drafted in a step, and how many of them were accepted."""
        self.found = self.found * self.memory + bool(proposed)
        self.missed = self.missed * self.memory + (not proposed)
        if proposed:
            self.right = self.right * self.memory + accepted
            self.wrong = self.wrong * self.memory + (accepted < proposed)

    def acceptance(self, assumed: float, weight: float = 1) -> float:
        """Return how likely a drafted token is accepted, if those before it are.

        What is assumed counts as so many tokens.
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
    _own: DraftCounts = field(default_factory=lambda: DraftCounts(MEMORY))
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
        self._own = DraftCounts(MEMORY)
        self._has_paused, self.is_started = True, False
