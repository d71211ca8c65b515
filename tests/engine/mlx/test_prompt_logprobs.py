"""Log probabilities of a prompt's own tokens: those of mlx-lm's network in one forward, however the prompt is cut."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from engine_models import write_mamba
from engine_requests import engine_and_batch
from mlx_lm.utils import load_model
from tolerances import ON_CPU

from mlx_backend.demo import MODEL_PATH
from mlx_backend.engine.base import GenerationRequest, PromptLogprobs, PromptStart, TokenDelta
from mlx_backend.engine.mlx import prefill_queue
from mlx_backend.engine.mlx.sampling import TokenRows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from mlx_backend.engine.base import EngineItem, Logprobs
    from mlx_backend.engine.batch import Outcome
    from mlx_backend.engine.threaded import Engine

ATOL = 1e-3 if ON_CPU else 0.05
SMALL = 1 << 17
"""Bytes of logits in a chunk: 32 tokens of the demo model's vocabulary."""


def random_tokens(engine: Engine, length: int, seed: int = 5) -> list[int]:
    draws, size = random.Random(seed), engine.tokenizer.vocabulary_size
    return [draws.randrange(size) for _ in range(length)]


def scored(items: Sequence[EngineItem]) -> list[Logprobs]:
    found: list[Logprobs] = []
    for item in items:
        if isinstance(item, PromptLogprobs):
            assert item.start == len(found) + 1, "they come in order, and each once"
            found += item.logprobs
    return found


@lru_cache
def network_of(model: Path) -> Any:
    network, _ = load_model(model)
    return network


def check(model: Path, prompt: Sequence[int], found: Sequence[Logprobs], top: int) -> None:
    """Compare them with those of the network as mlx-lm loads it, run on the whole prompt without a cache."""
    logits = network_of(model)(mx.array([prompt]))[0].astype(mx.float32)
    expected = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    assert len(found) == len(prompt) - 1
    for at, each in enumerate(found):
        row = expected[at]
        assert each.chosen == pytest.approx(row[prompt[at + 1]].item(), abs=ATOL)
        assert len(each.top) == top
        assert [value for _, value in each.top] == sorted((value for _, value in each.top), reverse=True)
        for token, value in each.top:
            assert value == pytest.approx(row[token].item(), abs=ATOL)
        if top:
            assert each.top[0][1] == pytest.approx(mx.max(row).item(), abs=ATOL)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mamba(tmp_path_factory.mktemp("mamba"))


@pytest.mark.parametrize("name", ["demo", "hybrid"])
def test_they_are_those_of_one_forward(name: str, hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_queue, "MAX_SCORED_BYTES", SMALL)
    model = MODEL_PATH if name == "demo" else hybrid
    with engine_and_batch(model) as (engine, _):
        for length, top in ((1, 0), (2, 3), (33, 0), (34, 1), (150, 20)):
            prompt = random_tokens(engine, length)
            request = GenerationRequest(prompt=prompt, max_tokens=2, prompt_logprobs=top, logprobs=top)
            items = list(engine.generate(request))
            check(model, prompt, scored(items), top)
            kinds = [type(item) for item in items]
            assert PromptLogprobs not in kinds[kinds.index(TokenDelta) :]


@pytest.mark.parametrize("pads_chunks", [False, True])
def test_prompts_of_a_crowd_are_scored_together_and_alone_and_from_no_cache(
    pads_chunks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_queue, "MAX_SCORED_BYTES", SMALL)
    with engine_and_batch(MODEL_PATH) as (engine, batch):
        batch.prefill_queue.pads_chunks = pads_chunks
        prompts = [random_tokens(engine, length, seed=length) for length in (5, 9, 70, 40, 12)]
        again = [*prompts, *prompts]  # by then their prefixes are cached
        asks = [at % 3 != 1 for at in range(len(again))]
        generations = [
            engine.generate(GenerationRequest(prompt=each, max_tokens=4, prompt_logprobs=2 if ask else None))
            for each, ask in zip(again, asks, strict=True)
        ]
        for prompt, ask, generation in zip(again, asks, generations, strict=True):
            found = scored(list(generation))
            if ask:
                check(MODEL_PATH, prompt, found, 2)
            else:
                assert not found


def test_no_more_logits_are_computed_at_a_time_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_queue, "MAX_SCORED_BYTES", SMALL)
    sizes: list[int] = []
    run = TokenRows.__init__

    def counted(rows: TokenRows, logits: mx.array, tokens: mx.array, count: int) -> None:
        sizes.append(logits.shape[0])
        run(rows, logits, tokens, count)

    monkeypatch.setattr(TokenRows, "__init__", counted)
    with engine_and_batch(MODEL_PATH) as (engine, _):
        generations = [
            engine.generate(
                GenerationRequest(prompt=random_tokens(engine, 200), max_tokens=1, prompt_logprobs=1)
            )
            for _ in range(3)
        ]
        for generation in generations:
            list(generation)
    assert sum(sizes) >= 3 * 199
    assert max(sizes) <= SMALL // (4 * 1024)


def test_a_prompt_that_is_preempted_is_scored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_queue, "MAX_SCORED_BYTES", SMALL)
    with engine_and_batch(MODEL_PATH) as (engine, batch):
        prompt = random_tokens(engine, 120)
        step = batch.step
        seen: list[Outcome] = []

        def preempting() -> Iterator[tuple[int, Outcome]]:
            for key, outcome in list(step()):
                yield key, outcome
                if isinstance(outcome, PromptLogprobs) and len(seen) < 2:
                    seen.append(outcome)
                    batch.preempt(batch.sequences[key])

        monkeypatch.setattr(batch, "step", preempting)
        items = list(engine.generate(GenerationRequest(prompt=prompt, max_tokens=3, prompt_logprobs=0)))
        assert len(seen) == 2
        check(MODEL_PATH, prompt, scored(items), 0)


def test_a_warm_up_of_the_same_prompt_changes_nothing() -> None:
    with engine_and_batch(MODEL_PATH) as (engine, _):
        prompt = random_tokens(engine, 90)
        engine.prewarm(lambda: PromptStart(prompt))
        list(engine.generate(GenerationRequest(prompt=prompt, max_tokens=1)))
        items = list(engine.generate(GenerationRequest(prompt=prompt, max_tokens=1, prompt_logprobs=0)))
        check(MODEL_PATH, prompt, scored(items), 0)
