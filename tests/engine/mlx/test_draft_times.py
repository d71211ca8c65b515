"""Drafts on the real engine, with a device that takes known times: each reply is the same, and never takes longer.

The networks are real and tiny. The clock that the pacer sees runs only when one of them does: as on a GPU, a run is
started, and what it computes is waited for when it is read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from drafting import FoundReply, generate, loaded_batch
from engine_models import WrappedNetwork

from mlx_backend.engine.base import GenerationRequest, Sampling
from mlx_backend.engine.mlx import decode, speculative
from mlx_backend.engine.mlx.arrays import as_ints
from mlx_backend.engine.mlx.draft_pacer import DraftPacer
from mlx_backend.engine.mlx.sequences import start_computing

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mlx_backend.engine.mlx.batch import MLXBatch
    from mlx_backend.engine.mlx.sequences import DecodingSequence

STEP, PER_TOKEN, GUESS, HOST = 0.010, 0.0005, 0.001, 0.0002  # seconds
SAMPLINGS = (Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=4), Sampling(temperature=1.0, seed=5))


class Clock:
    """The time on a device that does one thing after the other."""

    def __init__(self) -> None:
        self.now = 0.0
        self._busy_until = 0.0
        self._computed: dict[int, tuple[mx.array, float]] = {}  # each array, and when

    def start(self, seconds: float) -> None:
        """Start the device on something."""
        self._busy_until = max(self._busy_until, self.now) + seconds

    def start_computing(self, sequences: Sequence[DecodingSequence], sampled: mx.array) -> None:
        """Note that these are computed when all that was started is."""
        self._computed[id(sampled)] = sampled, self._busy_until
        start_computing(sequences, sampled)

    def read(self, array: mx.array) -> list[int]:
        """Wait for an array of sampled tokens."""
        _, until = self._computed.get(id(array), (array, 0.0))
        self.now = max(self.now, until)
        return as_ints(array)

    def read_drafts(self, array: mx.array) -> list[int]:
        """Wait for an array of drafts."""
        self.now = max(self.now, self._busy_until)
        return as_ints(array)


class Timed(WrappedNetwork):
    """A network whose runs take some time, and more for each token beyond one."""

    def __init__(self, network: Any, clock: Clock, step: float, per_token: float) -> None:
        super().__init__(network)
        self._clock, self._step, self._per_token = clock, step, per_token

    def __call__(self, inputs: mx.array, cache: Any) -> mx.array:
        self._clock.start(self._step + self._per_token * (inputs.size - 1))
        logits: mx.array = self._network(inputs, cache=cache)
        return logits


def time_on(batch: MLXBatch, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Give a batch a clock of its own."""
    clock, runtime = Clock(), batch.runtime
    monkeypatch.setattr(decode, "as_ints", clock.read)
    monkeypatch.setattr(decode, "start_computing", clock.start_computing)
    monkeypatch.setattr(speculative, "as_ints", clock.read_drafts)
    monkeypatch.setitem(
        runtime.networks.by_adapter, "", Timed(runtime.networks.by_adapter[""], clock, STEP, PER_TOKEN)
    )
    if runtime.networks.draft is not None:
        timed = Timed(runtime.networks.draft.network, clock, GUESS, 0.00001)
        object.__setattr__(runtime.networks.draft, "network", timed)  # which is frozen
    return clock


def seconds(
    batch: MLXBatch, clock: Clock, rounds: Sequence[Sequence[GenerationRequest]]
) -> list[list[FoundReply]]:
    """Generate the replies of each round together, those of the next after them."""

    def tick() -> float:
        clock.now += HOST
        return clock.now

    batch.draft_pacer = DraftPacer(batch.draft_pacer.max_drafts, tick)
    return [generate(batch, requests) for requests in rounds]


def rounds_of(replies: int, *, tokens: int, count: int) -> list[list[GenerationRequest]]:
    """Return requests of random prompts."""
    made = []
    for number in range(count):
        keys = [mx.random.key(10 * number + at) for at in range(replies)]
        made.append(
            [
                GenerationRequest(
                    prompt=as_ints(mx.random.randint(10, 250, (6 + 5 * at,), key=key)),
                    max_tokens=tokens + 7 * at,
                    sampling=SAMPLINGS[at % len(SAMPLINGS)],
                )
                for at, key in enumerate(keys)
            ]
        )
    return made


def greedy(rounds: Sequence[Sequence[GenerationRequest]]) -> list[list[GenerationRequest]]:
    """Return the same requests without sampling."""
    return [[replace(each, sampling=Sampling()) for each in requests] for requests in rounds]


def compare(
    windowed: Path,
    rounds: Sequence[Sequence[GenerationRequest]],
    monkeypatch: pytest.MonkeyPatch,
    **drafts: Any,
) -> tuple[float, int]:
    """Generate with drafts and without; return how much of the time they take, and how many were accepted."""
    with loaded_batch(windowed) as batch, monkeypatch.context() as patch:
        clock = time_on(batch, patch)
        plain, expected = clock, seconds(batch, clock, rounds)
    with loaded_batch(windowed, **drafts) as batch, monkeypatch.context() as patch:
        clock = time_on(batch, patch)
        found = seconds(batch, clock, rounds)
    for replies, wanted in zip(found, expected, strict=True):
        assert [reply.tokens for reply in replies] == [reply.tokens for reply in wanted]
    ended = [reply.ended for replies in found for reply in replies]
    return clock.now / plain.now, sum(each.accepted_tokens for each in ended if each is not None)


@pytest.mark.parametrize("replies", [1, 3])
def test_a_draft_model_that_is_wrong_costs_next_to_nothing(
    windowed: Path, other: Path, replies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Sampled, both models' tokens are mostly noise, and that is the same.
    rounds = greedy(rounds_of(replies, tokens=80, count=4))
    share, accepted = compare(windowed, rounds, monkeypatch, draft_model=str(other))
    assert share < 1.025
    assert accepted < 20


@pytest.mark.parametrize("replies", [1, 3])
def test_a_draft_model_that_is_right_is_used_at_once(
    windowed: Path, replies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = rounds_of(replies, tokens=80, count=2)
    share, accepted = compare(windowed, rounds, monkeypatch, draft_model=str(windowed))
    assert share < (0.5 if replies == 1 else 0.75)
    assert accepted > 80 * replies


@pytest.mark.parametrize("replies", [1, 3])
def test_a_text_that_never_repeats_itself_costs_nothing_to_look_up(
    windowed: Path, replies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = [
        [replace(each, sampling=Sampling(temperature=2.0, seed=at)) for at, each in enumerate(requests)]
        for requests in rounds_of(replies, tokens=80, count=2)
    ]
    share, _ = compare(windowed, rounds, monkeypatch, draft_from_text=True)
    assert share < 1.02


def test_a_text_that_repeats_itself_is_drafted_from(windowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = greedy(rounds_of(2, tokens=150, count=2))
    share, accepted = compare(windowed, rounds, monkeypatch, draft_from_text=True)
    assert accepted > 0
    assert share < 0.9


def test_a_draft_model_that_does_not_know_a_prompts_tokens_costs_nothing(
    windowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        GenerationRequest(prompt=[20, 200, *range(10, 90)], max_tokens=60),
        GenerationRequest(prompt=[20, 201, *range(10, 90)], max_tokens=60),
    ]
    with loaded_batch(windowed) as batch:
        expected = [reply.tokens for reply in generate(batch, requests)]
    with loaded_batch(windowed, draft_model=str(windowed)) as batch, monkeypatch.context() as patch:
        clock, runtime = time_on(batch, patch), batch.runtime
        assert runtime.networks.draft is not None
        object.__setattr__(runtime.networks.draft, "num_tokens", 150)  # which is frozen
        [found] = seconds(batch, clock, [requests])
    assert [reply.tokens for reply in found] == expected
    assert all(reply.ended is not None and reply.ended.drafted_tokens == 0 for reply in found)
