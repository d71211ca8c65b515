"""How much is drafted: simulated replies on simulated devices, whose steps take known times."""

import random
from dataclasses import dataclass, field

import pytest

from mlx_backend.engine.mlx.draft_pacer import MAX_REPLIES, DraftPacer, DraftRecord

UNLIMITED = 1000  # tokens


@dataclass
class Device:
    """A step takes 10 ms; with drafts `overhead` more, and `per_draft` for each drafted token."""

    overhead: float = 0.001
    per_draft: float = 0.001
    noise: float = 0.0
    steps: int = 0
    drafted_steps: int = 0
    seconds: float = 0.0
    chance: random.Random = field(default_factory=lambda: random.Random(3))

    def step(self, drafted: int | None) -> float:
        seconds = 0.010 + (0.0 if drafted is None else self.overhead + drafted * self.per_draft)
        if self.chance.random() < self.noise:
            seconds += 0.25  # a chunk of somebody's prompt
        self.steps += 1
        self.drafted_steps += drafted is not None
        self.seconds += seconds
        return seconds


def tokens_per_step(
    pacer: DraftPacer, device: Device, probabilities: list[float], steps: int, *, frequency: float = 1.0
) -> tuple[float, list[DraftRecord]]:
    """Run replies whose drafts are right with some probabilities; return their speed, in tokens per plain step."""
    replies = [DraftRecord() for _ in probabilities]
    tokens = 0
    for _ in range(steps):
        counts = pacer.plan(replies, [UNLIMITED] * len(replies))
        tokens += len(replies)
        if not any(counts):
            pacer.record(len(replies), None, device.step(None))
            continue
        drafted = 0
        for reply, count, probability in zip(replies, counts, probabilities, strict=True):
            if count and device.chance.random() > frequency:
                reply.record(0, 0)
                continue
            accepted = 0
            while accepted < count and device.chance.random() < probability:
                accepted += 1
            if count:
                reply.record(count, accepted)
            tokens += accepted
            drafted += count
        pacer.record(len(replies), drafted, device.step(drafted))
    return tokens / (device.seconds / 0.010), replies


def pacer(max_drafts: int = 4) -> DraftPacer:
    return DraftPacer(max_drafts, lambda: 0.0)


@pytest.mark.parametrize("replies", range(1, MAX_REPLIES + 1))
def test_right_drafts_are_nearly_always_used(replies: int) -> None:
    device = Device()
    speed, _ = tokens_per_step(pacer(), device, [0.9] * replies, 600)
    assert device.drafted_steps > 0.9 * device.steps
    expected = replies * (1 + 0.9 + 0.9**2 + 0.9**3 + 0.9**4) / (1 + 0.1 + 0.1 * 4 * replies)
    assert speed == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize("replies", range(1, MAX_REPLIES + 1))
@pytest.mark.parametrize(
    ("probability", "device"),
    [
        (0.0, Device()),
        (0.3, Device(per_draft=0.008)),
        (0.8, Device(overhead=0.05)),
        (0.95, Device(per_draft=0.02)),
    ],
    ids=["wrong drafts", "dear tokens", "a slow draft model", "a device that is busy with one token"],
)
def test_drafts_that_do_not_pay_are_hardly_tried(probability: float, device: Device, replies: int) -> None:
    device = Device(device.overhead, device.per_draft)
    speed, _ = tokens_per_step(pacer(), device, [probability] * replies, 2000)
    assert speed > 0.95 * replies
    assert device.drafted_steps < 0.1 * device.steps


def test_a_reply_with_wrong_drafts_gets_none_beside_one_with_right_ones() -> None:
    _, (right, wrong) = tokens_per_step(pacer(), Device(), [0.95, 0.02], 1000)
    assert right.accepted > 2000
    assert wrong.proposed < 0.1 * right.proposed


def test_as_many_tokens_are_drafted_as_are_likely_to_be_right() -> None:
    _, (likely,) = tokens_per_step(pacer(16), Device(), [0.95], 500)
    _, (unlikely,) = tokens_per_step(pacer(16), Device(), [0.5], 500)
    assert likely.proposed / 500 > 10
    assert 0 < unlikely.proposed / 500 < 6


def test_other_work_in_between_does_not_change_what_pays() -> None:
    device = Device(noise=0.1)
    speed, _ = tokens_per_step(pacer(), device, [0.9], 2000)
    assert device.drafted_steps > 0.9 * device.steps
    assert speed > 1


def test_a_text_that_rarely_repeats_itself_is_not_waited_for() -> None:
    device = Device(overhead=0.003)
    speed, _ = tokens_per_step(pacer(), device, [0.8], 2000, frequency=0.03)
    assert speed > 0.95
    assert device.drafted_steps < 0.3 * device.steps


def test_drafts_are_used_again_when_they_become_right() -> None:
    own, device, reply = pacer(), Device(), DraftRecord()

    def run(probability: float, steps: int) -> int:
        before = reply.accepted
        for _ in range(steps):
            [count] = own.plan([reply], [UNLIMITED])
            accepted = 0
            while accepted < count and device.chance.random() < probability:
                accepted += 1
            if count:
                reply.record(count, accepted)
            own.record(1, count or None, device.step(count or None))
        return reply.accepted - before

    assert run(0.0, 300) == 0
    assert run(1.0, 600) > 600


def test_more_replies_than_drafts_are_for_get_none() -> None:
    own = DraftPacer(4, None)
    assert (
        own.plan([DraftRecord() for _ in range(MAX_REPLIES)], [UNLIMITED] * MAX_REPLIES) == [2] * MAX_REPLIES
    )
    assert own.plan([DraftRecord() for _ in range(MAX_REPLIES + 1)], [UNLIMITED] * 5) == [0] * 5


def test_processes_that_share_a_model_decide_by_what_was_accepted_alone() -> None:
    good, bad = DraftRecord(), DraftRecord()
    own = DraftPacer(4, None)
    for _ in range(40):
        counts = own.plan([good, bad], [UNLIMITED, UNLIMITED])
        good.record(counts[0], counts[0])
        if counts[1]:
            bad.record(counts[1], 0)
    assert good.accepted > 150
    assert bad.proposed < good.proposed / 5
