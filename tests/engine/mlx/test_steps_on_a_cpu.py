"""On a CPU a step has all but ended when it is started: its tokens are emitted then, not with the next step's."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from drafting import FoundReply, generate, loaded_batch

from mlx_backend.constraints.reasoning_budget import ReasoningBudgets
from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.conversation.events import Channel
from mlx_backend.engine.base import GenerationRequest, Sampling, TokenDelta
from mlx_backend.engine.mlx import batch as stepping
from mlx_backend.engine.mlx.decode import Decoder


def requests() -> list[GenerationRequest]:
    return [
        GenerationRequest(
            prompt=[20 + at] * (7 * at + 3),
            max_tokens=1 + 4 * at,
            checkpoints=(2,),
            logprobs=at or None,
            sampling=Sampling(temperature=0.8 * (at % 2), seed=at, repetition_penalty=1 + 0.1 * at),
        )
        for at in range(6)
    ]


OPTIONS: list[dict[str, Any]] = [
    {"cache_bytes": 1 << 28},
    {"packing": False},
    {"draft_from_text": True, "draft_tokens": 4},
    {"cache_bytes": 1 << 28, "max_concurrent": 2},
]


def finish_reason(reply: FoundReply) -> str | None:
    """Return why a reply ended. How much of it was drafted depends on what else its steps had to do."""
    return reply.ended.reason if reply.ended is not None else None


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ", ".join(options))
def test_replies_are_those_of_steps_that_are_started_ahead(
    qwen: Path, windowed: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = "draft_tokens" in options
    model = qwen if drafts else windowed
    repeating = GenerationRequest(prompt=[28, 421] * 8, max_tokens=25)  # and comes when the others have ended
    found = []
    for ahead in (True, False):
        monkeypatch.setattr(stepping, "computes_ahead", lambda ahead=ahead: ahead)
        with loaded_batch(model, **options) as batch:
            arrivals = {3: 2, 4: 5, 5: 6, 6: 40}
            found.append(generate(batch, [*requests(), repeating], arrivals=arrivals, cancelled_after={4: 3}))
            assert batch.runtime.cache_budget.used == 0
    for one, other in zip(*found, strict=True):
        assert one.tokens[: len(other.tokens)] == other.tokens
        assert [finish_reason(one), one.error] == [finish_reason(other), other.error]
    assert [len(each.tokens) for each in found[1]] == [1, 5, 9, 13, 3, 21, 25]
    for *_, last in found:
        assert last.ended is not None
        assert (last.ended.accepted_tokens > 0) == drafts


def test_every_step_emits_the_tokens_that_it_samples_and_no_reply_is_fed_its_last(
    windowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepping, "computes_ahead", lambda: False)
    fed: list[int] = []
    forward = Decoder._forward

    def counted(self: Decoder, sequences: Any, prefilled: Any) -> Any:
        fed.append(len(sequences) + len(prefilled))
        return forward(self, sequences, prefilled)

    monkeypatch.setattr(Decoder, "_forward", counted)
    with loaded_batch(windowed) as batch:
        for key in range(3):
            batch.insert(key, GenerationRequest(prompt=[30 + key] * 5, max_tokens=4 + key))
        emitted = []
        while batch.sequences:
            emitted.append(Counter(type(outcome) for _, outcome in batch.step())[TokenDelta])
    assert emitted == fed == [3, 3, 3, 3, 2, 1]


def test_steps_of_long_replies_are_started_ahead_and_go_on_so_when_a_new_one_joins(
    windowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepping, "computes_ahead", lambda: False)
    monkeypatch.setattr(stepping, "SHORT_REPLY_TOKENS", 3)
    with loaded_batch(windowed) as batch:
        batch.insert(0, GenerationRequest(prompt=[30] * 5, max_tokens=12))
        emitted: list[Counter[int]] = []
        while batch.sequences:
            if len(emitted) == 6:
                batch.insert(1, GenerationRequest(prompt=[31] * 5, max_tokens=2))
            emitted.append(Counter(key for key, each in batch.step() if isinstance(each, TokenDelta)))
    assert [each[0] for each in emitted[:5]] == [1, 1, 1, 0, 1]
    assert [each[1] for each in emitted[5:8]] == [0, 1, 1]
    assert 0 not in [each[0] for each in emitted[4:]]
    assert [sum(each[key] for each in emitted) for key in (0, 1)] == [12, 2]


def test_a_reply_that_a_constraint_masks_is_the_same(windowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for ahead in (True, False):
        monkeypatch.setattr(stepping, "computes_ahead", lambda ahead=ahead: ahead)
        with loaded_batch(windowed) as batch:
            words = batch.runtime.networks.model.tokenizer
            prompt = tuple(words.encode("fox<|channel|>analysis<|message|>", control_tokens=True))
            budgets = ReasoningBudgets(words, DIALECTS["harmony"])
            budget = budgets.start(prompt, Channel.ANALYSIS, room=40, tokens=5)
            asked = GenerationRequest(prompt=prompt, max_tokens=40, constraint=budget)
            found.append([each.tokens for each in generate(batch, [asked, *requests()[:3]])])
    assert found[0] == found[1]
    assert len(found[0][0]) == 40
