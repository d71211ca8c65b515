"""Drafts for several replies at once: each reply is the one that it would be alone and without drafts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from architectures import write
from drafting import FoundReply, alone, generate, loaded_batch, tokens
from engine_models import WrappedNetwork, write_qwen

from mlx_backend.engine.base import GenerationRequest, Sampling
from mlx_backend.engine.mlx.arrays import as_ints
from mlx_backend.engine.mlx.draft_pacer import MAX_REPLIES, DraftPacer, Step
from mlx_backend.engine.mlx.rewinding import RewindPoint

REPLY = 20  # tokens
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.7, top_p=0.9, seed=5),
    Sampling(repetition_penalty=1.1, presence_penalty=0.3, seed=6),
    Sampling(temperature=1.0, seed=7),
    Sampling(),
)


def requests(count: int, **fields: Any) -> list[GenerationRequest]:
    """Return requests whose prompts repeat themselves, as their replies will, in part."""
    asked = []
    for at in range(count):
        phrase = as_ints(mx.random.randint(10, 250, (5 + 3 * at,), key=mx.random.key(at)))
        sampling = SAMPLINGS[at % len(SAMPLINGS)]
        asked.append(GenerationRequest(prompt=phrase * 3, max_tokens=REPLY, sampling=sampling, **fields))
    return asked


def accepted(replies: Sequence[FoundReply]) -> list[int]:
    return [reply.ended.accepted_tokens for reply in replies if reply.ended is not None]


@pytest.mark.parametrize(
    ("architecture", "source"),
    [
        ("gpt_oss", "text"),
        ("gpt_oss", "model"),
        ("gemma3_text", "text"),
        ("qwen3", "model"),
        ("gemma2", "model"),
    ],
)
def test_a_reply_is_the_same_in_crowds_of_every_size(tmp_path: Path, architecture: str, source: str) -> None:
    model = write(tmp_path / "model", architecture)
    asked = requests(MAX_REPLIES + 1)
    with loaded_batch(model) as plain:
        expected = tokens(alone(plain, asked))
    options: dict[str, Any] = {"draft_from_text": True} if source == "text" else {"draft_model": str(model)}
    with loaded_batch(model, draft_tokens=3, **options) as drafting:
        assert drafting.runtime.abilities.can_pack_drafts == (source == "model")
        for count in (2, MAX_REPLIES):
            found = generate(drafting, asked[:count])
            assert tokens(found) == expected[:count]
            assert sum(accepted(found)) > 0
        staggered = generate(drafting, asked, arrivals={1: 3, 2: 4, 3: 6, 4: 8})
        assert tokens(staggered) == expected


def test_a_network_that_is_not_run_packed_gets_drafts_for_each_reply_by_itself(tmp_path: Path) -> None:
    model = write(tmp_path / "model", "gpt2")
    asked = requests(3)
    with loaded_batch(model) as plain:
        expected = tokens(alone(plain, asked))
    with loaded_batch(model, draft_model=str(model), packing=False) as drafting:
        assert not drafting.runtime.abilities.can_pack
        [only] = generate(drafting, asked[:1])
        together = generate(drafting, asked)
    assert only.tokens == expected[0]
    assert sum(accepted([only])) > 0
    assert tokens(together) == expected
    assert min(accepted(together)) > 0


def test_right_drafts_of_several_replies_save_steps(windowed: Path) -> None:
    asked = [replace(each, sampling=Sampling()) for each in requests(MAX_REPLIES)]
    with loaded_batch(windowed, draft_model=str(windowed), draft_tokens=4) as drafting:
        found = generate(drafting, asked)
        assert accepted(found) >= [REPLY * 4 // 5 - 4] * len(asked), "four of five tokens were drafted"
        assert drafting.steps <= REPLY // 5 + 6


@pytest.mark.parametrize("count", [1, 6])
def test_wrong_drafts_are_taken_back_from_every_reply_by_itself(
    windowed: Path, other: Path, count: int
) -> None:
    asked = [replace(each, max_tokens=40) for each in requests(3)[::2]]  # beyond the window, greedy
    with loaded_batch(windowed) as batch:
        expected = tokens(alone(batch, asked))
    with loaded_batch(windowed, draft_model=str(other), draft_tokens=count) as drafting:
        found = generate(drafting, asked)
    assert tokens(found) == expected
    for reply in found:
        assert reply.ended is not None
        assert reply.ended.accepted_tokens < reply.ended.drafted_tokens / 2


SAMPLED = (
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.7, top_p=0.8, top_k=40, seed=2),
    Sampling(temperature=1.2, min_p=0.02, repetition_penalty=1.3, frequency_penalty=0.4, seed=3),
    Sampling(
        temperature=0.9, xtc_probability=0.5, xtc_threshold=0.001, logit_bias=((30, 6.0), (40, -8.0)), seed=4
    ),
)


def test_a_draft_model_draws_as_the_reply_does(windowed: Path) -> None:
    asked = [replace(each, sampling=own) for each, own in zip(requests(4), SAMPLED, strict=True)]
    with loaded_batch(windowed) as batch:
        expected = tokens(alone(batch, asked))
    with loaded_batch(windowed, draft_model=str(windowed)) as drafting:
        for found in (alone(drafting, asked), generate(drafting, asked)):
            assert tokens(found) == expected
            for ended in (reply.ended for reply in found):
                assert ended is not None
                assert ended.accepted_tokens == ended.drafted_tokens > REPLY / 2


def test_a_draft_model_with_a_smaller_table_draws_with_the_same_noise(windowed: Path) -> None:
    [asked] = [
        replace(requests(1)[0], sampling=Sampling(temperature=0.7, seed=1, logit_bias=((300, -100.0),)))
    ]
    with loaded_batch(windowed, draft_model=str(windowed)) as drafting:
        assert drafting.runtime.networks.draft is not None
        object.__setattr__(drafting.runtime.networks.draft, "num_tokens", 500)  # of 512; which is frozen
        [found] = generate(drafting, [asked])
    assert max(found.tokens) < 500, "else the rest cannot be drafted"
    assert found.ended is not None
    assert found.ended.accepted_tokens == found.ended.drafted_tokens


def test_who_leaves_or_is_cancelled_changes_no_other_reply(windowed: Path) -> None:
    asked = requests(4)
    asked[1] = replace(asked[1], max_tokens=7)
    with loaded_batch(windowed) as batch:
        expected = tokens(alone(batch, asked))
    with loaded_batch(windowed, draft_model=str(windowed)) as drafting:
        found = generate(drafting, asked, arrivals={3: 4}, cancelled_after={0: 12})
    assert [found[at].tokens for at in (1, 2, 3)] == [expected[at] for at in (1, 2, 3)]
    assert found[0].ended is None
    assert found[0].tokens == expected[0][: len(found[0].tokens)]


def test_log_probabilities_are_those_without_drafts(windowed: Path) -> None:
    asked = requests(3, logprobs=2)
    asked[1] = replace(asked[1], logprobs=None)
    with loaded_batch(windowed) as batch:
        expected = alone(batch, asked)
    with loaded_batch(windowed, draft_model=str(windowed)) as drafting:
        found = generate(drafting, asked)
    assert tokens(found) == tokens(expected)
    assert sum(accepted(found)) > 0
    for reply, wanted in zip(found, expected, strict=True):
        for one, same in zip(reply.logprobs, wanted.logprobs, strict=True):
            assert (one is None) == (same is None)
            if one is not None and same is not None:
                assert one.chosen == pytest.approx(same.chosen, abs=1e-4)
                assert [token for token, _ in one.top] == [token for token, _ in same.top]


class OnlySome:
    """A grammar that allows a token in two, by turns of the even and the odd ones; free for its first `free` tokens."""

    never_raises = True

    def __init__(self, free: int, size: int = 512) -> None:
        self._masks = [[0x55555555 << shift for _ in range(size // 32)] for shift in (0, 1)]
        self._free = free
        self.seen: list[int] = []

    def unconstrained_tokens(self) -> int:
        return max(0, self._free - len(self.seen))

    def allowed_mask(self) -> Sequence[int] | None:
        return None if self.unconstrained_tokens() else self._masks[len(self.seen) % 2]

    def advance(self, token: int) -> None:
        self.seen.append(token)


def test_a_grammar_and_a_budget_hold_beside_replies_with_drafts(windowed: Path) -> None:
    def asked() -> tuple[list[GenerationRequest], list[OnlySome]]:
        constraints = [OnlySome(0), OnlySome(15)]
        free, *rest = requests(3)
        held = [
            replace(each, constraint=own, sampling=Sampling())
            for each, own in zip(rest, constraints, strict=True)
        ]
        return [free, *held], constraints

    with loaded_batch(windowed) as batch:
        one_by_one, _ = asked()
        expected = tokens(alone(batch, one_by_one))
    with loaded_batch(windowed, draft_model=str(windowed)) as drafting:
        together, constraints = asked()
        found = generate(drafting, together)
    assert tokens(found) == expected
    assert all(count > 0 for count in accepted(found)), "drafts that a grammar allows are accepted"
    for reply, constraint in zip(found[1:], constraints, strict=True):
        assert constraint.seen == reply.tokens[: len(constraint.seen)]
        assert len(constraint.seen) >= REPLY - 1


def test_drafts_accepted_in_a_step_that_fails_are_generated_again_but_not_under_a_grammar(
    windowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grammar has seen them, and would mask other tokens than those that follow."""
    free, held = requests(2)
    held = replace(held, constraint=OnlySome(0), sampling=Sampling())
    rewind, failures = RewindPoint.rewind, iter([False] * 7 + [True])

    def fail_once(point: RewindPoint, count: int, num_run: int) -> int:
        if next(failures, False):
            raise ValueError("[slice] not these")
        return rewind(point, count, num_run)

    with loaded_batch(windowed) as batch:
        [expected] = alone(batch, [free])
    monkeypatch.setattr(RewindPoint, "rewind", fail_once)
    with loaded_batch(windowed, draft_model=str(windowed)) as drafting:
        found, failed = generate(drafting, [free, held])
    assert found.tokens == expected.tokens
    assert "a step failed after its constraint had seen the next tokens" in str(failed.error)


class FailsOnce(WrappedNetwork):
    """A network that runs out of memory once it has run, in the first step with drafts after so many runs."""

    def __init__(self, network: Any, after: int) -> None:
        super().__init__(network)
        self._after = after

    def __call__(self, inputs: mx.array, cache: Any) -> mx.array:
        logits: mx.array = self._network(inputs, cache=cache)
        self._after -= 1
        if self._after < 0 and inputs.shape[1] > 3:
            self._after = 1 << 30
            raise RuntimeError("[malloc] Unable to allocate 99 bytes")
        return logits


@pytest.mark.parametrize(("count", "source"), [(1, "model"), (3, "text")])
def test_a_run_that_fails_changes_no_reply_and_ends_drafting(
    windowed: Path,
    count: int,
    source: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = requests(count)
    with loaded_batch(windowed) as batch:
        expected = tokens(alone(batch, asked))
    drafts = {"draft_from_text": True} if source == "text" else {"draft_model": str(windowed)}
    with loaded_batch(windowed, draft_tokens=6, **drafts) as drafting:
        networks = drafting.runtime.networks.by_adapter
        monkeypatch.setitem(networks, "", FailsOnce(networks[""], after=3 if source == "text" else 2))
        found = generate(drafting, asked)
    assert tokens(found) == expected
    assert caplog.text.count("replies go on without drafts") == 1


def test_what_is_cached_after_drafts_continues_as_without_them(windowed: Path) -> None:
    asked = [replace(each, max_tokens=20) for each in requests(3)]
    with loaded_batch(windowed) as batch:
        first = alone(batch, asked)
        turns = [
            replace(each, prompt=[*each.prompt, *reply.tokens, 30, 31])
            for each, reply in zip(asked, first, strict=True)
        ]
        expected = tokens(alone(batch, turns))
    with loaded_batch(windowed, draft_model=str(windowed), cache_bytes=None) as drafting:
        assert tokens(generate(drafting, asked)) == tokens(first)
        assert len(drafting.runtime.prefix_store.prefixes) > 0
        assert tokens(generate(drafting, turns)) == expected


def test_quantised_caches_are_packed_and_drafted_for_together(tmp_path: Path, other: Path) -> None:
    model = write_qwen(tmp_path / "qwen")
    asked = requests(3)
    with loaded_batch(model, kv_bits=8) as batch:
        expected = tokens(alone(batch, asked))
    with loaded_batch(model, kv_bits=8, draft_model=str(model)) as drafting:
        assert drafting.runtime.abilities.can_pack
        found = generate(drafting, asked)
    assert tokens(found) == expected
    assert sum(accepted(found)) > 0


def test_text_drafts_are_left_out_where_caches_cannot_be_rewound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write(tmp_path / "model", "deepseek_v41")
    asked = requests(2)
    with loaded_batch(model) as batch:
        expected = tokens(alone(batch, asked))
    with loaded_batch(model, draft_from_text=True) as drafting:
        assert tokens(generate(drafting, asked)) == expected
    assert caplog.text.count("its LayerCache cannot be rewound. It runs without.") == 1


def test_only_the_time_between_two_steps_of_the_same_replies_is_measured(tmp_path: Path) -> None:
    times: list[tuple[int, float]] = []

    class Recording(DraftPacer):
        def record(self, step: Step, seconds: float) -> None:
            times.append((step.replies, seconds))
            super().record(step, seconds)

    model = write_qwen(tmp_path / "qwen")
    with loaded_batch(model, draft_from_text=True) as batch:
        batch.draft_pacer = Recording(4, lambda: float(batch.steps))
        first, second = (replace(each, sampling=Sampling()) for each in requests(2))
        generate(batch, [first, replace(second, max_tokens=6)], arrivals={1: 4})
    assert len(times) > 2
    assert set(times) == {(1, 1.0), (2, 1.0)}
