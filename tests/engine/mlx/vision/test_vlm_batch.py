"""Models that run on mlx-vlm's own network, one reply at a time: their replies are those of mlx-vlm's generation."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from mlx import nn
from seeing import LAYOUTS, TEXT, Seeing, noise
from vision_models import WRITERS, SeeingModel, needs_mlx_vlm
from vision_reference import reference

from mlx_backend.device import Device
from mlx_backend.engine.base import Finished, GenerationRequest, Progress, Sampling, TokenDelta
from mlx_backend.engine.images import ImageSupport
from mlx_backend.engine.mlx import load_engine
from mlx_backend.engine.mlx.vision.vlm_processor import VLMProcessor
from mlx_backend.engine.mlx.vision.whole import read_whole
from mlx_backend.errors import EngineBusy, EngineError, EngineRefused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

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
        whole, config = read_whole(*given, **named)
        whole.language_model.more = nn.Linear(16, 64, bias=False)
        return whole, config

    before = reserved()
    monkeypatch.setattr("mlx_backend.engine.mlx.vision.vlm_batch.read_whole", read)
    assert reserved() == before + 4 * 16 * 64


def test_options_that_it_lacks_leave_the_model_without_images(
    one: Seeing, caplog: pytest.LogCaptureFixture
) -> None:
    with load_engine(one.model.folder, packing=False, max_kv_size=64) as engine:
        assert engine.image_processor is None
        assert "mlx-vlm's network, which can be shown images, does not support max_kv_size" in caplog.text


def test_a_model_whose_pictures_cannot_be_prepared_answers_text_in_the_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = WRITERS["qwen3_vl"](tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "NoSuchProcessor"})
    )
    with load_engine(tmp_path, packing=False) as engine:
        assert engine.image_support is ImageSupport.NOT_HERE
        assert not engine.status().unbatched
        assert Seeing(model, engine).reply(GenerationRequest(prompt=LONG, max_tokens=3))
    assert "answers text only" in caplog.text
