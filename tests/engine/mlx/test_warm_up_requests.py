"""What is run when a model is loaded onto a GPU, and how replies run where MLX prepares for lengths (CUDA)."""

from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from drafting import generate, loaded_batch
from engine_models import write_model
from engine_requests import room_beside
from mlx_lm.models import base

from mlx_backend.device import Device
from mlx_backend.engine.base import GenerationRequest, Sampling
from mlx_backend.engine.mlx.batch import MLXBatch
from mlx_backend.engine.mlx.tuning import FIRST, LONG, SECOND, answer_requests
from mlx_backend.models.engine_options import EngineOptions

MODULES = ("runtime", "batch_trial", "prefill_queue", "decode", "tuning")


@pytest.fixture
def prepares(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device prepares for lengths, as MLX on CUDA does."""
    for module in MODULES:
        monkeypatch.setattr(f"mlx_backend.engine.mlx.{module}.prepares_for_lengths", lambda: True)


def requests() -> list[GenerationRequest]:
    samplings = [Sampling(), Sampling(temperature=1.0, seed=3), Sampling(temperature=0.7, top_p=0.9, seed=4)]
    return [
        GenerationRequest(prompt=[30 + at, 40, 50 + at] * (9 + 50 * at), max_tokens=24, sampling=sampling)
        for at, sampling in enumerate(samplings)
    ]


@pytest.mark.usefixtures("prepares")
@pytest.mark.parametrize("source", ["the same model", "another model", "the text"])
def test_drafts_are_exact_where_lengths_are_prepared_for(windowed: Path, other: Path, source: str) -> None:
    draft = {"the same model": str(windowed), "another model": str(other)}.get(source)
    with loaded_batch(windowed) as plain:
        expected = [generate(plain, [each])[0].tokens for each in requests()]
    with loaded_batch(windowed, draft_model=draft, draft_from_text=draft is None, draft_tokens=3) as drafting:
        alone = [generate(drafting, [each])[0] for each in requests()]
        together = generate(drafting, requests())
    assert [each.tokens for each in alone] == expected
    assert [each.tokens for each in together] == expected
    if draft == str(windowed):
        for each in alone:
            assert each.ended is not None
            assert each.ended.accepted_tokens > 12


@pytest.mark.usefixtures("prepares")
def test_the_attention_of_drafts_has_one_query_and_a_drafted_text_few_lengths(
    windowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: Counter[int] = Counter()
    attend = base.scaled_dot_product_attention

    def noted(queries: mx.array, *rest: Any, **named: Any) -> mx.array:
        lengths[queries.shape[2]] += 1
        attended: mx.array = attend(queries, *rest, **named)
        return attended

    with loaded_batch(windowed, draft_model=str(windowed), draft_tokens=3) as batch:
        monkeypatch.setattr(base, "scaled_dot_product_attention", noted)
        generate(batch, requests()[1:2])
    assert set(lengths) <= {1, 2, 3, 4, 16, 64, 128, 256}, "windows of 32 tokens have few numbers of keys"
    assert lengths[1] > 5 * lengths[4] > 0


@pytest.mark.usefixtures("prepares")
@pytest.mark.parametrize("drafts", [{}, {"draft_tokens": 4}], ids=["without drafts", "with drafts"])
def test_the_requests_of_a_warm_up_leave_nothing_behind(windowed: Path, drafts: dict[str, Any]) -> None:
    options = {**drafts, "draft_model": str(windowed)} if drafts else {}
    with loaded_batch(windowed) as plain:
        expected = [generate(plain, [each])[0].tokens for each in requests()]
    with loaded_batch(windowed, **options) as batch:
        pacer, rate = batch.draft_pacer, batch.prefill_queue.pacer.rate
        list(answer_requests(batch, context_length=1024, seconds=60))
        assert not batch.sequences
        assert not batch._decoders, "theirs would go on drafting in every step"
        assert batch.draft_pacer is pacer
        assert batch.prefill_queue.pacer.rate == rate
        assert batch.runtime.cache_budget.used == 0
        assert len(batch.runtime.prefix_store.prefixes) == 0
        assert [generate(batch, [each])[0].tokens for each in requests()] == expected


@pytest.mark.usefixtures("prepares")
def test_a_first_reply_that_the_model_would_end_goes_on_until_the_long_prompt_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path, eos_token_id=list(range(512)))  # every token ends a reply
    together: list[set[int]] = []
    with loaded_batch(folder) as batch:
        step = batch.step

        def noted() -> Any:
            together.append(set(batch.sequences))
            return step()

        monkeypatch.setattr(batch, "step", noted)
        list(answer_requests(batch, context_length=1024, seconds=60))
    assert {FIRST} in together
    assert {FIRST, SECOND} in together
    assert {FIRST, LONG} in together


def test_the_requests_of_a_warm_up_take_nothing_that_other_models_have_cached(windowed: Path) -> None:
    device = Device(room_beside(windowed, 2_000_000))
    batch = MLXBatch(windowed, EngineOptions(cache_bytes=0), device=device)
    batch.load(lambda _share: None)
    asked: list[int] = []
    reservation, other = device.memory._reservations[0], device.memory.reserve(0)
    other.on_change = lambda: asked.append(reservation.asked)
    other.set_working(1_900_000, cached=1_900_000)
    list(answer_requests(batch, context_length=1024, seconds=5))
    assert not asked
    assert not batch.admits(GenerationRequest(prompt=[20] * 300, max_tokens=100))
    assert asked, "as a request does"
    batch.unload()
