"""Replies decoded on a simulated device whose steps take known times, with drafts and without.

The device is started on a step and waited for as decode.py does: without drafts it runs one step ahead of what has been
read, and with drafts it has nothing to do between two steps. What it waits for is counted in milliseconds; a plain step
of one reply takes 10.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from itertools import repeat
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from mlx_backend.engine.base import Sampling
from mlx_backend.engine.mlx.draft_pacer import DraftPacer, DraftRecord
from mlx_backend.engine.mlx.drafting import Drafting
from mlx_backend.engine.mlx.speculative import ModelDrafter, TextDrafter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_backend.engine.mlx.sequences import DecodingSequence
    from mlx_backend.engine.mlx.speculative import Drafter

STEP = 10.0
INTERRUPTION = 250.0  # somebody else's work
UNLIMITED = 1 << 20  # tokens


@dataclass(frozen=True)
class Costs:
    """What the device takes beyond a plain step of one reply, in milliseconds."""

    reply: float = 0.1  # for each more,
    context: float = 0.0  # for each 1,000 tokens of their texts,
    host: float = 0.3  # between two steps, if it has nothing to do,
    own_caches: float = 0.5  # for each of several replies whose caches are not merged,
    switch: float = 2.0  # to merge or separate those, for each,
    verified: float = 0.5  # for each drafted token, and each that runs again after a wrong one,
    guess: float = 1.0  # to draft one with a draft model for one reply, and a tenth of it for each more,
    prefill: float = 0.01  # and for a draft model to prefill one.
    noise: float = 0.05  # as a part of each step
    interrupted: float = 0.0  # how many of the steps are interrupted
    replays: bool = False  # whether what was right before a wrong draft runs again, as with states


@dataclass
class Reply:
    """What is generated for a prompt. `right` says how likely a draft model is right at a position.

    None: the text drafts.
    """

    prompt: list[int]
    tokens: list[int]
    right: Callable[[int], float] | None = None


@dataclass
class Generated:
    """A reply so far: what Drafting knows of a `DecodingSequence`."""

    reply: Reply
    drafter: Drafter
    started: float
    tokens: list[int]
    drafts: DraftRecord = field(default_factory=DraftRecord)
    is_pending: bool = True
    num_to_replay: int = 0
    request: Any = field(default_factory=lambda: SimpleNamespace(max_tokens=UNLIMITED, sampling=Sampling()))
    images: Any = field(default_factory=lambda: SimpleNamespace(shift=0))
    sampler: Any = field(default_factory=lambda: SimpleNamespace(constraint=None))

    @property
    def num_sampled(self) -> int:
        """How many tokens were sampled; one more than was emitted."""
        return len(self.tokens) - len(self.reply.prompt) + 1

    def draft_position(self) -> Any:
        """Return nothing: nothing is sampled."""

    @property
    def next_token(self) -> int | None:
        """What will be sampled next; None: the reply is complete."""
        at = len(self.tokens) - len(self.reply.prompt)
        return self.reply.tokens[at] if at < len(self.reply.tokens) else None


class SimulatedDevice:
    """A device, and the decoder that runs on it. Without a `pacer` it drafts nothing."""

    def __init__(
        self, costs: Costs, pacer: Callable[[Callable[[], float]], DraftPacer] | None, *, seed: int = 1
    ) -> None:
        self.chance = random.Random(seed)
        self.steps = 0
        self.drafted_steps = 0
        self.costs = costs
        self.guessed_in = 0  # the step in which a draft model ran last
        self._now = 0.0
        self._busy_until = 0.0
        self._interrupted = 0.0
        self._pacer = pacer(lambda: self._now) if pacer is not None else None
        self._drafting = Drafting(self._pacer) if self._pacer is not None else None
        self._running: list[Generated] = []
        self._is_merged = True

    def run(self, users: Sequence[Sequence[Reply]]) -> float:
        """Have each user ask for one reply after the other; return how long all replies took."""
        waiting = [deque(replies) for replies in users]
        running: list[Generated | None] = [None] * len(users)
        total = 0.0
        while any(waiting) or any(running):
            for user, replies in enumerate(waiting):
                if running[user] is None and replies:
                    running[user] = self.start(replies.popleft())
            self.step()
            for user, generated in enumerate(running):
                if generated is not None and generated.next_token is None:
                    total += self._now - self._interrupted - generated.started
                    running[user] = None
        return total

    @property
    def has_replies(self) -> bool:
        """Whether anything is being generated."""
        return bool(self._running)

    def work(self, milliseconds: float) -> None:
        """Start the device on something, as soon as it has done what it does."""
        self._busy_until = max(self._busy_until, self._now) + milliseconds

    def wait(self) -> None:
        """Wait for all that it was started on."""
        self._now = max(self._now, self._busy_until)

    def start(self, reply: Reply) -> Generated:
        """Have a reply join the others."""
        drafter: Any = TextDrafter() if reply.right is None else SimulatedDrafter(self, reply)
        generated = Generated(reply, drafter, self._now - self._interrupted, list(reply.prompt))
        if self._drafting is not None and self._pacer is not None:
            if not self._running:
                self._drafting = Drafting(self._pacer)  # another decoder
            self._drafting.forget_last_step()
        self._running.append(generated)
        return generated

    @property
    def _sequences(self) -> list[DecodingSequence]:
        return cast("list[DecodingSequence]", self._running)

    def _set_merged(self, *, merged: bool) -> None:
        if merged != self._is_merged and len(self._running) > 1:
            self.work(self.costs.switch * len(self._running))
        self._is_merged = merged

    def _forward(self, drafted: int) -> None:
        costs, number = self.costs, len(self._running)
        again = sum(generated.num_to_replay for generated in self._running)
        took = STEP + costs.reply * (number - 1) + costs.verified * (drafted + again)
        took += costs.context * sum(len(generated.tokens) for generated in self._running) / 1000
        if number > 1 and not self._is_merged:
            took += costs.own_caches * number
        took *= 1 + abs(self.chance.gauss(0, costs.noise))
        if self.chance.random() < costs.interrupted:
            took += INTERRUPTION
            self._interrupted += INTERRUPTION
        self.work(took)

    def step(self) -> None:
        """Take a step with all replies; those that are complete leave."""
        self.steps += 1
        self._now += self.costs.host
        drafting = self._drafting
        limits = drafting.plan(self._sequences, constrained=True) if drafting else []
        if drafting is None or not any(limits):
            self._set_merged(merged=True)
            before = self._busy_until
            self._forward(0)
            self._replayed()
            self._now = max(self._now, before)
            self._emit_pending()
            drafted, accepted = None, 0
        else:
            self.wait()
            self._emit_pending()
            drafts = drafting.propose(self._sequences, limits)
            self._set_merged(merged=False)
            drafted = sum(map(len, drafts))
            self._forward(drafted)
            if drafted:
                self.drafted_steps += 1
                self.wait()
            else:
                self._replayed()
            accepted = sum(map(self._accept, self._running, drafts))
        for generated in self._running:
            generated.is_pending = True
        if drafting is not None:
            drafting.on_step(self._sequences, drafted, accepted)
        self._running = [generated for generated in self._running if generated.next_token is not None]

    def _replayed(self) -> None:
        for generated in self._running:
            generated.num_to_replay = 0

    def _emit_pending(self) -> None:
        for generated in self._running:
            if generated.is_pending and (token := generated.next_token) is not None:
                generated.tokens.append(token)
                generated.is_pending = False

    def _accept(self, generated: Generated, drafts: Sequence[int]) -> int:
        count = 0
        while count < len(drafts) and drafts[count] == generated.next_token:
            generated.tokens.append(drafts[count])
            count += 1
        if drafts:
            generated.drafts.record(len(drafts), count)
            is_wrong = self.costs.replays and count < len(drafts)
            generated.num_to_replay = generated.num_to_replay + 1 + count if is_wrong else 0
        return count


class SimulatedDrafter:
    """A draft model, which takes the device's time."""

    def __init__(self, device: SimulatedDevice, reply: Reply) -> None:
        self._device = device
        self._reply = reply
        self._cached = 0

    def num_to_prefill(self, tokens: Sequence[int]) -> int:
        """Return how many tokens are not in its caches."""
        return len(tokens) - self._cached

    def propose(self, tokens: Sequence[int], max_drafts: int) -> list[int] | None:
        """Guess as well as it can."""
        device, costs = self._device, self._device.costs
        fresh = min(len(tokens) - self._cached, ModelDrafter.CHUNK)
        self._cached += fresh
        device.work(costs.prefill * fresh)
        if self._cached < len(tokens):
            device.wait()
            return None
        is_first, device.guessed_in = device.guessed_in != device.steps, device.steps
        device.work(costs.guess * max_drafts * (1 if is_first else 0.1))
        device.wait()
        assert self._reply.right is not None
        start = len(tokens) - len(self._reply.prompt)
        return [
            token if device.chance.random() < self._reply.right(at) else -1
            for at, token in enumerate(self._reply.tokens[start : start + max_drafts], start)
        ]


@dataclass
class Texts:
    """Makes replies, each different."""

    chance: random.Random = field(default_factory=lambda: random.Random(5))

    def fresh(self, count: int) -> list[int]:
        """Return tokens of which none follows from those before."""
        return [self.chance.randrange(50_000) for _ in range(count)]

    def for_model(self, prompt: int, length: int, right: float | Callable[[int], float]) -> Reply:
        """Return a reply for which a draft model is right with some probability."""
        likely = right if callable(right) else lambda _: right
        return Reply(self.fresh(prompt), self.fresh(length), likely)

    def quoting(self, prompt: int, length: int, quoted: float) -> Reply:
        """Return a reply of which a part are passages of 30 tokens of its prompt."""
        text, tokens = self.fresh(prompt), list[int]()
        while len(tokens) < length:
            start = self.chance.randrange(prompt - 30)
            is_quote = self.chance.random() < quoted
            tokens += text[start : start + 30] if is_quote else self.fresh(30)
        return Reply(text, tokens[:length])


def share_of_plain(users: Sequence[Sequence[Reply]], costs: Costs, *, seed: int = 1) -> float:
    """Return how much of the time without drafts the pacer's take."""
    plain = SimulatedDevice(costs, None, seed=seed).run(users)
    device = SimulatedDevice(costs, lambda clock: DraftPacer(4, clock, replays=costs.replays), seed=seed)
    return device.run(users) / plain


def best_share(users: Sequence[Sequence[Reply]], costs: Costs) -> float:
    """Return how much of it the best constant number of drafts takes; 1: that is none."""
    plain = SimulatedDevice(costs, None).run(users)

    def time_of(count: int) -> float:
        return SimulatedDevice(costs, lambda _: DraftPacer(count, None, lengths=repeat(count))).run(users)

    return min(plain, *map(time_of, (1, 2, 4))) / plain
