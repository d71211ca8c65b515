"""Models that run on mlx-vlm's own network, one reply at a time: their replies are those of mlx-vlm's generation."""

from __future__ import annotations

import gc
import json
import logging
import threading
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from drafting import generate
from mlx import nn
from seeing import LAYOUTS, TEXT, Seeing, noise
from vision_models import WRITERS, SeeingModel, needs_mlx_vlm
from vision_reference import reference

from mlx_backend.device import Device
from mlx_backend.engine.base import Finished, GenerationRequest, Progress, Sampling, TokenDelta
from mlx_backend.engine.images import ImageSupport, PromptImage
from mlx_backend.engine.mlx import load_engine, loading
from mlx_backend.engine.mlx.batch import MLXBatch
from mlx_backend.engine.mlx.vision import tower, vlm_batch, whole
from mlx_backend.engine.mlx.vision.image_memory import TowerCost
from mlx_backend.engine.mlx.vision.split_batch import SplitBatch
from mlx_backend.engine.mlx.vision.vlm_batch import VLMBatch
from mlx_backend.engine.mlx.vision.vlm_processor import VLMProcessor
from mlx_backend.errors import EngineBusy, EngineError, EngineFailed, EngineRefused
from mlx_backend.models.engine_options import EngineOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from mlx_backend.engine.batch import ModelInfo

pytestmark = needs_mlx_vlm

LONG = [2, *range(100, 160)]


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_5"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SeeingModel:
    name: str = request.param
    return WRITERS[name](tmp_path_factory.mktemp(name))


@pytest.fixture(scope="module")
def unpacked(model: SeeingModel) -> Iterator[Seeing]:
    with load_engine(model.folder, packing=False, prefill_chunk=16) as engine:
        yield Seeing(model, engine)


@pytest.fixture(scope="module")
def batch(model: SeeingModel) -> Iterator[Seeing]:
    with load_engine(model.folder, cache_bytes=0) as engine:
        yield Seeing(model, engine)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    model = WRITERS["qwen3_vl"](tmp_path_factory.mktemp("one"))
    with load_engine(model.folder, packing=False, prefill_chunk=16) as engine:
        yield Seeing(model, engine)


@pytest.mark.parametrize("layout", ["two images", "images side by side", "a long text after an image"])
def test_without_packing_a_reply_about_images_is_that_of_mlx_vlms_own_generation(
    unpacked: Seeing, batch: Seeing, layout: str
) -> None:
    expected = reference(batch.model, batch.request(*LAYOUTS[layout]))
    assert unpacked.reply(unpacked.request(*LAYOUTS[layout])) == expected


@pytest.mark.parametrize("parts", [((2,), noise(3), TEXT), (LONG,)], ids=["a picture", "a text"])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=1.0, seed=3),
        Sampling(temperature=0.9, seed=4, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3),
    ],
    ids=["greedy", "seeded", "penalised"],
)
def test_seeds_penalties_and_texts_are_those_of_the_batch(
    unpacked: Seeing, batch: Seeing, parts: Sequence[Any], sampling: Sampling
) -> None:
    expected = batch.reply(batch.request(*parts, sampling=sampling))
    assert unpacked.reply(unpacked.request(*parts, sampling=sampling)) == expected


def test_it_says_that_it_sees_and_that_it_runs_one_at_a_time(one: Seeing) -> None:
    assert one.engine.image_support is ImageSupport.AVAILABLE
    assert "mlx-vlm's own network" in one.engine.status().unbatched
    assert one.engine.status().available_context


def test_requests_wait_for_one_another_and_get_what_they_get_alone(one: Seeing) -> None:
    requests = [one.request(*parts) for parts in LAYOUTS.values()] + [one.request(LONG)]
    alone = [one.reply(each) for each in requests]
    generations = [one.engine.generate(each) for each in requests]
    assert [[item.token for item in each if isinstance(item, TokenDelta)] for each in generations] == alone


def test_a_picture_that_waits_for_another_holds_up_no_text(one: Seeing) -> None:
    running = one.engine.generate(one.request((2,), noise(1), TEXT, tokens=900))
    assert any(isinstance(item, TokenDelta) for item in iter(running.next, None))
    waiting = one.engine.generate(one.request((2,), noise(2), TEXT))
    assert one.reply(one.request(LONG))
    assert waiting.queued() is not None
    running.close()
    assert isinstance(list(waiting)[-1], Finished)


@pytest.mark.parametrize("kind", [Progress, TokenDelta])
def test_a_reply_that_is_closed_makes_room_for_the_next(one: Seeing, kind: type) -> None:
    generation = one.engine.generate(one.request(LONG, noise(1), LONG, tokens=900))
    following = one.request((2,), noise(2), TEXT)
    waiting = one.engine.generate(following)
    assert any(isinstance(item, kind) for item in iter(generation.next, None))
    generation.close()
    assert [item.token for item in waiting if isinstance(item, TokenDelta)] == one.reply(following)


def test_log_probabilities_are_those_of_the_batch(one: Seeing) -> None:
    with load_engine(one.model.folder) as engine:
        batch = Seeing(one.model, engine)
        parts = ((2,), noise(3), TEXT)
        found, expected = (
            [
                item.logprobs
                for item in each.engine.generate(each.request(*parts, logprobs=2))
                if isinstance(item, TokenDelta)
            ]
            for each in (one, batch)
        )
    assert [each.top[0][0] for each in found if each] == [each.top[0][0] for each in expected if each]
    assert [each.chosen for each in found if each] == pytest.approx(
        [each.chosen for each in expected if each], abs=1e-3
    )


def test_a_constraint_that_fails_fails_its_own_reply(one: Seeing) -> None:
    class Broken:
        never_raises = False

        def unconstrained_tokens(self) -> int:
            return 0

        def allowed_mask(self) -> None:
            raise RuntimeError("no mask")

        def advance(self, token: int) -> None: ...

    with pytest.raises(EngineError, match="Choosing the next token failed: no mask"):
        list(one.engine.generate(one.request(LONG, constraint=Broken())))
    assert isinstance(list(one.engine.generate(one.request(LONG)))[-1], Finished)


def test_pictures_that_do_not_fit_their_prompt_are_refused_and_the_next_are_seen(
    one: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*_: object) -> None:
        raise EngineRefused("written in another way", "images")

    request = one.request((2,), noise(7), TEXT)
    with monkeypatch.context() as patch:
        patch.setattr(VLMProcessor, "inputs", refusing)
        with pytest.raises(EngineRefused, match="written in another way"):
            list(one.engine.generate(request))
    assert one.reply(request)
    gc.collect()  # the error and its frames hold each other, and the pictures, which the next test counts


def test_pictures_that_wait_are_bounded_together(one: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = one.engine.image_processor
    assert processor is not None
    nbytes = one.prepared(noise(5)).nbytes
    monkeypatch.setattr(processor.waiting, "room", lambda: 4 * nbytes + 3)  # type: ignore[attr-defined]
    first = one.prepared(noise(5))
    with pytest.raises(EngineBusy, match="images that wait to be seen"):
        one.prepared(noise(6))
    del first
    one.prepared(noise(6))


def test_a_processor_that_reads_no_picture_leaves_no_thread(
    one: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    monkeypatch.setattr(VLMProcessor, "_parts", lambda *_: iter([("no part", False)]))
    tokenizer: Any = one.engine.tokenizer
    network = SimpleNamespace(config=SimpleNamespace(), language_model=None)
    with pytest.raises(EngineRefused, match="reads no picture"):
        VLMProcessor(one.model.folder, network, tokenizer, trust_remote_code=False)
    assert set(threading.enumerate()) <= before


def test_what_the_language_network_has_for_itself_takes_memory(
    one: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reserved() -> int:
        device = Device(8 << 30)
        with load_engine(one.model.folder, packing=False, device=device):
            return device.memory.reserved

    def read(*given: Any, **named: Any) -> Any:
        network, config = whole.read_whole(*given, **named)
        network.language_model.more = nn.Linear(16, 64, bias=False)
        return network, config

    before = reserved()
    monkeypatch.setattr(vlm_batch, "read_whole", read)
    assert reserved() == before + 4 * 16 * 64


@pytest.mark.parametrize("packing", [True, False], ids=["in the batch", "next to it"])
def test_pictures_are_seen_again_and_nothing_stays_in_memory_after_the_engine_broke(
    one: Seeing, packing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    networks: list[weakref.ref[Any]] = []
    read = whole.read_whole

    def noting(*given: Any, **named: Any) -> Any:
        found = read(*given, **named)
        networks.append(weakref.ref(found[0].language_model))
        return found

    for module in (tower, vlm_batch):
        monkeypatch.setattr(module, "read_whole", noting)
    with load_engine(one.model.folder, packing=packing, cache_bytes=0, max_concurrent=1) as engine:
        seeing = Seeing(one.model, engine)
        parts = ((2,), noise(3), TEXT)
        expected = seeing.reply(seeing.request(*parts))
        gc.collect()
        first = [each for each in networks if each() is not None]
        assert first
        step, are_both_sent = MLXBatch.step, threading.Event()

        def breaking(self: MLXBatch) -> Any:
            monkeypatch.setattr(MLXBatch, "step", step)
            are_both_sent.wait()
            raise MemoryError("no memory left")

        before = engine.image_processor
        assert before is not None
        monkeypatch.setattr(MLXBatch, "step", breaking)
        failing, waiting = (engine.generate(seeing.request(LONG)) for _ in range(2))
        are_both_sent.set()
        with pytest.raises(EngineFailed, match="no memory left"):
            list(failing)
        assert list(waiting)
        assert seeing.reply(seeing.request(*parts)) == expected
        assert seeing.reply(seeing.request((2,), noise(98), TEXT))
        gc.collect()
        assert not any(each() for each in first), "the networks that were loaded first are held"
        with pytest.raises(EngineBusy, match="loaded again"):  # a request that was being prepared then
            before.prepare(noise(99))


@pytest.fixture
def vlm_batch_of_one(one: Seeing) -> Iterator[VLMBatch]:
    loaded = VLMBatch(
        one.model.folder, EngineOptions(cache_bytes=0, prefill_chunk=16), device=Device(8 << 30)
    )
    loaded.load(lambda _: None)
    yield loaded
    loaded.unload()


def test_a_text_that_is_preempted_is_begun_again(
    one: Seeing, vlm_batch_of_one: VLMBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, request = vlm_batch_of_one, one.request(LONG)
    [expected] = generate(loaded, [request])
    begun, begin, step = list[int](), whole.WholeNetwork.begin, loaded.step

    def noted(self: whole.WholeNetwork, prompt: Sequence[int], inputs: Any) -> Any:
        begun.append(len(prompt))
        return begin(self, prompt, inputs)

    def preempting() -> Iterator[tuple[int, Any]]:
        yield from step()
        if loaded.sequences and loaded.sequences[0].num_emitted == 3:
            monkeypatch.setattr(loaded, "step", step)
            loaded.preempt(loaded.sequences[0])

    monkeypatch.setattr(whole.WholeNetwork, "begin", noted)
    monkeypatch.setattr(loaded, "step", preempting)
    assert generate(loaded, [request]) == [expected]
    assert begun == [len(LONG), len(LONG) + 3]


@pytest.mark.parametrize("end", ["ended", "left", "failed"])
def test_nothing_is_held_of_a_prompt_when_its_reply_is_gone(
    one: Seeing,
    vlm_batch_of_one: VLMBatch,
    end: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)  # records hold what they tell of
    loaded, request = vlm_batch_of_one, one.request((2,), noise(3), TEXT)
    runs, begin = list[weakref.ref[Any]](), whole.WholeNetwork.begin

    def noted(self: whole.WholeNetwork, prompt: Sequence[int], inputs: Any) -> Any:
        run = begin(self, prompt, inputs)
        runs.append(weakref.ref(run))
        return run

    def fail(*_: object, **__: object) -> None:
        raise ValueError("no such layer")

    monkeypatch.setattr(whole.WholeNetwork, "begin", noted)
    if end == "failed":
        monkeypatch.setattr(whole.WholeNetwork, "__call__", fail)
    [found] = generate(loaded, [request], cancelled_after={0: 3} if end == "left" else None)
    assert (found.error is not None, len(found.tokens)) == {
        "ended": (False, request.max_tokens),
        "left": (False, 3),
        "failed": (True, 0),
    }[end]
    del found
    gc.collect()
    assert [run() for run in runs] == [None]


def test_a_prompts_inputs_are_made_where_its_pictures_are_prepared(
    one: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No family's processor is made for several threads."""
    threads: set[str] = set()
    run = VLMProcessor._run

    def noting(self: VLMProcessor, *given: Any) -> Any:
        threads.add(threading.current_thread().name)
        return run(self, *given)

    monkeypatch.setattr(VLMProcessor, "_run", noting)
    assert one.reply(one.request((2,), noise(41), TEXT))
    assert len(threads) == 1


@pytest.fixture
def split(one: Seeing) -> Iterator[tuple[SplitBatch, ModelInfo]]:
    options, device = EngineOptions(packing=False, cache_bytes=0), Device(8 << 30)
    text = MLXBatch(one.model.folder, options, device=device)
    batch = SplitBatch(text, VLMBatch(one.model.folder, options, device=device), options)
    yield batch, batch.load(lambda _: None)
    batch.unload()


def test_memory_is_set_aside_for_all_pictures_of_a_prompt_which_are_seen_at_once(
    split: tuple[SplitBatch, ModelInfo], one: Seeing
) -> None:
    pictures = split[0]._pictures
    (_, single), (_, pair) = (
        pictures._needed_memory(one.request(*[noise(3)] * count, TEXT)) for count in (1, 2)
    )
    assert (pair.waiting, pair.seeing) == (2 * single.waiting, 2 * single.seeing)
    assert single.seeing


def test_a_reply_about_a_picture_that_waits_for_memory_is_woken_when_another_model_frees_some(
    split: tuple[SplitBatch, ModelInfo], one: Seeing
) -> None:
    batch, info = split
    woken: list[bool] = []
    info.set_waker(lambda: woken.append(True))
    reservation = batch._pictures.runtime.cache_budget.reservation
    other = batch._text.runtime.cache_budget.reservation._budget.reserve(0)
    other.set_working(room := reservation.room, room)
    request = one.request(noise(3), TEXT)
    assert not batch.admits(request)
    woken.clear()
    other.set_working(0)
    assert woken
    assert batch.admits(request)


def test_what_may_come_next_after_a_picture_is_not_prefilled_where_no_prompts_are_cached(
    split: tuple[SplitBatch, ModelInfo], one: Seeing
) -> None:
    request = one.request(noise(3), TEXT)
    known = [PromptImage(each.start, each.image.known()) for each in request.images]
    with pytest.raises(EngineRefused):
        split[0].admits(replace(request, images=known, max_tokens=0))


def test_a_tower_that_cannot_be_measured_leaves_a_model_that_answers_text(
    one: Seeing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("too many patches")

    monkeypatch.setattr(TowerCost, "measured", failing)
    with load_engine(one.model.folder, packing=False) as engine:
        assert engine.image_support is ImageSupport.NOT_HERE
        assert Seeing(one.model, engine).reply(GenerationRequest(prompt=LONG, max_tokens=3))
    assert "answers text only: too many patches" in caplog.text


def test_a_model_that_is_too_large_is_refused_before_its_weights_are_read(
    one: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reading(*_: object) -> None:
        raise AssertionError("its weights were read")

    monkeypatch.setattr("mlx_backend.engine.mlx.loading.load_weights", reading)
    batch = VLMBatch(one.model.folder, EngineOptions(memory_bytes=100_000), device=Device(8 << 30))
    with pytest.raises(EngineError, match="for its weights alone"):
        batch.load(lambda _: None)
    batch.unload()


def test_a_model_that_neither_network_can_run_says_why_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WRITERS["qwen3_vl"](tmp_path)

    def not_here(*_: object) -> None:
        raise EngineError("No Metal.")

    def not_there(*_: object) -> None:
        raise EngineError("There is a layer too many.") from ValueError()

    monkeypatch.setattr(VLMBatch, "load", not_here)
    monkeypatch.setattr(SplitBatch, "load", not_there)
    with pytest.raises(EngineError, match=r"No Metal\. .*: There is a layer too many\."):
        load_engine(tmp_path)


def test_a_second_network_has_no_tokenizer_of_its_own(one: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading one takes a second for a vocabulary of usual size, and remembers texts of its own."""
    load, loaded = loading._load_wrapper, list[Any]()

    def noting(folder: Path, *given: Any) -> Any:
        loaded.append(folder)
        return load(folder, *given)

    monkeypatch.setattr(loading, "_load_wrapper", noting)
    with load_engine(one.model.folder, packing=False) as engine:
        assert engine.image_support is ImageSupport.AVAILABLE
    assert len(loaded) == 1


def test_options_that_it_lacks_leave_the_model_without_images(
    one: Seeing, caplog: pytest.LogCaptureFixture
) -> None:
    with load_engine(one.model.folder, packing=False, draft_from_text=True) as engine:
        assert engine.image_processor is None
        assert (
            "mlx-vlm's network, which can be shown images, does not support --draft-from-text" in caplog.text
        )


def test_a_model_whose_pictures_cannot_be_prepared_answers_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = WRITERS["qwen3_vl"](tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "NoSuchProcessor"})
    )
    with load_engine(tmp_path, packing=False) as engine:
        assert engine.image_support is ImageSupport.NOT_HERE
        assert engine.status().unbatched == "--no-packing was given"
        assert Seeing(model, engine).reply(GenerationRequest(prompt=LONG, max_tokens=3))
    assert "answers text only" in caplog.text
