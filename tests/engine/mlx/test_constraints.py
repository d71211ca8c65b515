"""Reasoning budgets on the real engine: sampled ahead, batched, drafted or preempted, a reply is the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from drafting import drafting_engine, generate, loaded_batch
from engine_models import write_model
from engine_requests import reply_tokens

from mlx_backend.constraints.reasoning_budget import ReasoningBudgets
from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.conversation.events import Channel
from mlx_backend.device import Device
from mlx_backend.engine.base import GenerationRequest, Sampling, TokenDelta
from mlx_backend.engine.mlx import load_engine
from mlx_backend.engine.mlx.batch import MLXBatch
from mlx_backend.models.engine_options import EngineOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from mlx_backend.constraints.reasoning_budget import ReasoningBudget
    from mlx_backend.engine.base import Tokenizer
    from mlx_backend.engine.threaded import Engine

TO_FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"
SAMPLINGS = [Sampling(), Sampling(temperature=1.0, seed=3, repetition_penalty=1.2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that generates nonsense without end, so that only a budget ends its reasoning."""
    return write_model(tmp_path_factory.mktemp("random"), eos_token_id=[])


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with load_engine(model, cache_bytes=0) as engine:
        yield engine


def thinking(
    words: Tokenizer, text: str, tokens: int | None, *, room: int = 60, reserve: int | None = None
) -> GenerationRequest:
    """Return a request whose reply is reasoning from its first token."""
    prompt = tuple(words.encode(f"{text}<|channel|>analysis<|message|>", control_tokens=True))
    budget = ReasoningBudgets(words, DIALECTS["harmony"]).start(
        prompt, Channel.ANALYSIS, room=room, tokens=tokens, reserve=reserve
    )
    return GenerationRequest(prompt=prompt, max_tokens=room, constraint=budget)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "drawn"])
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 20])
def test_a_reply_is_unchanged_up_to_the_budget_and_then_closed(
    engine: Engine, sampling: Sampling, tokens: int
) -> None:
    words = engine.tokenizer
    free = reply_tokens(engine, replace(thinking(words, "fox", None), sampling=sampling))
    held = reply_tokens(engine, replace(thinking(words, "fox", tokens), sampling=sampling))
    closing = words.encode(TO_FINAL, control_tokens=True)
    assert held[: tokens + len(closing)] == [*free[:tokens], *closing]
    assert len(held) == 60


@pytest.mark.parametrize(
    ("sampling", "count", "same"),
    [(SAMPLINGS[0], 8, True), (SAMPLINGS[0], 2, False), (SAMPLINGS[1], 2, True), (SAMPLINGS[1], 8, False)],
    ids=["greedy, good drafts", "greedy, bad drafts", "drawn, good drafts", "drawn, bad drafts"],
)
def test_drafts_are_used_up_to_the_budget_and_never_beyond(
    engine: Engine, model: Path, tmp_path: Path, sampling: Sampling, count: int, same: bool
) -> None:
    other = model if same else write_model(tmp_path / "other", seed=4, eos_token_id=[])
    limits: list[tuple[int | None, int | None]] = [(0, None), (1, None), (7, None), (30, None), (None, 15)]

    def request(tokens: int | None, reserve: int | None) -> GenerationRequest:
        return replace(thinking(engine.tokenizer, "fox", tokens, reserve=reserve), sampling=sampling)

    with drafting_engine(model, draft_model=str(other), draft_tokens=count) as drafting:
        for limit in limits:
            assert reply_tokens(drafting, request(*limit)) == reply_tokens(engine, request(*limit))


def test_drafts_save_steps_under_a_budget_too(model: Path, engine: Engine) -> None:
    with loaded_batch(model, draft_model=str(model), draft_tokens=4) as batch:
        generate(batch, [thinking(engine.tokenizer, "fox", 100, room=100)])
        assert batch.steps <= 30, "each step says five tokens"


def test_replies_in_a_batch_are_what_each_is_alone(engine: Engine) -> None:
    def requests() -> list[GenerationRequest]:
        words = engine.tokenizer
        asked = [
            thinking(words, "fox", 5),
            thinking(words, "the quick brown", None),
            thinking(words, "lazy dog", 30),
            thinking(words, "one two", None, reserve=20),
            thinking(words, "three", 0),
        ]
        return [replace(each, sampling=SAMPLINGS[at % 2]) for at, each in enumerate(asked)]

    alone = [reply_tokens(engine, request) for request in requests()]
    generations = [engine.generate(request) for request in requests()]
    assert [
        [item.token for item in generation if isinstance(item, TokenDelta)] for generation in generations
    ] == alone


def test_a_preempted_reply_keeps_its_budget(model: Path) -> None:
    batch = MLXBatch(model, EngineOptions(cache_bytes=0), device=Device(8 << 30))

    def reply_with_preemptions(batch: MLXBatch, preempt_at: Sequence[int]) -> list[int]:
        words = batch.load(lambda _part: None).tokenizer
        batch.insert(0, thinking(words, "fox", 6, room=30))
        generated: list[int] = []
        while len(generated) < 30:
            before = len(generated)
            generated += [outcome.token for _, outcome in batch.step() if isinstance(outcome, TokenDelta)]
            if before < len(generated) in preempt_at:
                [sequence] = batch.sequences.values()
                batch.preempt(sequence)
        batch.unload()
        batch.close()
        return generated

    results = []
    for preempt_at in ([], range(1, 30), [6], [7], [12]):
        with ThreadPoolExecutor(1) as thread:
            results.append(thread.submit(reply_with_preemptions, batch, preempt_at).result())
    assert all(result == results[0] for result in results)


def test_a_budget_is_for_one_reply(engine: Engine) -> None:
    budgets = ReasoningBudgets(engine.tokenizer, DIALECTS["harmony"])

    def begin() -> ReasoningBudget | None:
        return budgets.start((9,), room=9, tokens=0)

    assert begin() is not begin()
