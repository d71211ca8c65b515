"""Replies about images, on tiny random models, compared with mlx-vlm's own modules on the same weights."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

import mlx.core as mx
import pytest
from picture_files import BLUE, RED
from seeing import LAYOUTS, TEXT, Seeing, noise, plain
from vision_models import MIXTURES, SeeingModel, needs_mlx_vlm, write_gemma3
from vision_reference import reference

from mlx_backend.engine.base import GenerationRequest, Sampling, TokenDelta
from mlx_backend.engine.images import PreparedImage, PromptImage
from mlx_backend.engine.mlx import load_engine
from mlx_backend.engine.mlx.vision.tower import Vision
from mlx_backend.errors import EngineError, EngineRefused

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


pytestmark = needs_mlx_vlm
some_families = pytest.mark.parametrize(
    "folder", ["gemma3", "qwen3_vl", "qwen3_5"], indirect=True, scope="module"
)
"""One with windows, one with positions in rows and columns, one with states: what a cache may hold."""


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_reply_is_that_of_mlx_vlms_own_modules(seeing: Seeing, layout: str) -> None:
    request = seeing.request(*LAYOUTS[layout])
    assert seeing.reply(request) == reference(seeing.model, request)


@pytest.mark.parametrize("name", sorted(MIXTURES))
def test_replies_of_mixtures_of_experts_are_those_of_mlx_vlms_own_modules(name: str, tmp_path: Path) -> None:
    model = MIXTURES[name](tmp_path)
    engine = load_engine(model.folder, cache_bytes=0)
    try:
        seeing = Seeing(model, engine)
        for layout in ("two images", "an image after a long text"):
            request = seeing.request(*LAYOUTS[layout])
            assert seeing.reply(request) == reference(model, request)
    finally:
        engine.stop()


def test_an_image_changes_the_reply(seeing: Seeing) -> None:
    replies = [seeing.reply(seeing.request((2,), plain(colour), TEXT)) for colour in (RED, BLUE, RED)]
    assert replies[0] != replies[1]
    assert replies[0] == replies[2]


def test_replies_in_a_crowd_of_images_and_texts_are_those_alone(seeing: Seeing) -> None:
    requests = [
        *(seeing.request(*parts) for parts in LAYOUTS.values()),
        seeing.request((2, *range(30, 50))),
        seeing.request((2, 11)),
        seeing.request((2,), noise(1), TEXT, sampling=Sampling(temperature=1.0, seed=3)),
        seeing.request((2, *range(60, 90)), sampling=Sampling(temperature=1.0, seed=4)),
    ]
    alone = [seeing.reply(request) for request in requests]
    generations = [seeing.engine.generate(request) for request in requests]
    crowd = [[item.token for item in each if isinstance(item, TokenDelta)] for each in generations]
    assert crowd == alone


@pytest.mark.parametrize("size", [1, 7])
def test_chunks_of_any_size_change_nothing(seeing: Seeing, size: int) -> None:
    parts = LAYOUTS["two images"]
    expected = seeing.reply(seeing.request(*parts))
    engine = load_engine(seeing.model.folder, cache_bytes=0, prefill_chunk=size)
    try:
        other = Seeing(seeing.model, engine)
        assert other.reply(other.request(*parts)) == expected
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def caching(folder: SeeingModel) -> Iterator[Seeing]:
    engine = load_engine(folder.folder, cache_bytes=64 << 20)
    yield Seeing(folder, engine)
    engine.stop()


def test_the_next_turn_about_a_picture_reads_only_the_new_words(caching: Seeing, seeing: Seeing) -> None:
    turn = caching.request((2,), noise(20), TEXT)
    answer, _ = caching.cached(turn)
    following = caching.request((2,), noise(20), (*TEXT, *answer, 30, 31, 32))
    reply, cached = caching.cached(following)
    assert cached == len(turn.prompt) + len(answer) - 1  # the last token was never fed
    assert reply == seeing.reply(following)


def test_two_pictures_with_the_same_tokens_are_never_confused(caching: Seeing, seeing: Seeing) -> None:
    pictures = [noise(30), noise(31)]
    for picture in [*pictures, *pictures]:
        request = caching.request((2, 77), picture, TEXT)
        assert caching.reply(request) == seeing.reply(request)
    other = caching.request((2, 77), noise(34), TEXT)
    assert caching.cached(other)[1] < other.images[0].end


@some_families
def test_prefixes_on_disk_know_their_pictures_after_a_restart(
    folder: SeeingModel, seeing: Seeing, tmp_path: Path
) -> None:
    turn = seeing.request((2,), noise(60), TEXT)
    turn = replace(turn, checkpoints=(turn.images[0].end + 1,))
    other = seeing.request((2,), noise(61), TEXT)
    found = []
    for request in (turn, turn, other):
        engine = load_engine(folder.folder, cache_folder=tmp_path)
        try:
            reply, cached = Seeing(folder, engine).cached(request)
        finally:
            engine.stop()
        assert reply == seeing.reply(request)
        found.append(cached)
    assert found == [0, turn.checkpoints[0], 0]


def test_a_vision_tower_runs_once_for_each_image(caching: Seeing, seen: list[bytes]) -> None:
    request = caching.request((2, 78), noise(40), noise(41), noise(40), TEXT)
    caching.reply(request)
    caching.reply(caching.request((2, 79), noise(41), TEXT))
    assert sorted(seen) == sorted({each.image.digest for each in request.images})


def test_an_image_that_cannot_be_computed_fails_its_own_request_alone(
    seeing: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [seeing.request((2, *range(30, 50)), tokens=40), seeing.request((2,), noise(1), TEXT)]
    expected = [seeing.reply(each) for each in others]
    broken = seeing.request((2,), noise(50), TEXT)
    compute = Vision._compute

    def failing(self: Vision, image: PreparedImage) -> mx.array:
        if image.digest == broken.images[0].image.digest:
            raise RuntimeError("out of memory")
        return compute(self, image)

    monkeypatch.setattr(Vision, "_compute", failing)
    others_replies = [seeing.engine.generate(each) for each in others]
    with pytest.raises(EngineError, match="could not be prefilled: out of memory"):
        seeing.reply(broken)
    found = [[item.token for item in each if isinstance(item, TokenDelta)] for each in others_replies]
    assert found == expected


@some_families
def test_drafts_change_no_reply_about_an_image(seeing: Seeing) -> None:
    layouts = ("two images", "images side by side", "a long text after an image")
    requests = [seeing.request(*LAYOUTS[layout], tokens=40) for layout in layouts]
    expected = [seeing.reply(request) for request in requests]
    engine = load_engine(seeing.model.folder, cache_bytes=0, draft_from_text=True)
    try:
        drafting = Seeing(seeing.model, engine)
        assert [drafting.reply(request) for request in requests] == expected
        crowd = [engine.generate(request) for request in requests]
        assert [[i.token for i in each if isinstance(i, TokenDelta)] for each in crowd] == expected
    finally:
        engine.stop()


def test_images_that_do_not_stand_on_pad_tokens_are_refused(seeing: Seeing) -> None:
    image = seeing.prepared(noise(1))
    pads = [seeing.model.pad] * image.num_tokens
    cases = [
        ([2, *pads, 3], [PromptImage(0, image)]),
        ([2, *pads], [PromptImage(2, image)]),
        ([2, *pads], [PromptImage(-1, image)]),
        ([2, *pads, *pads], [PromptImage(1, image), PromptImage(2, image)]),
        ([2, *pads, *pads], [PromptImage(1 + len(pads), image), PromptImage(1, image)]),
    ]
    for prompt, images in cases:
        with pytest.raises(EngineRefused) as raised:
            list(seeing.engine.generate(GenerationRequest(prompt=prompt, images=images, max_tokens=1)))
        assert raised.value.field == "images"


@some_families
def test_without_the_extra_the_same_model_answers_the_same_text(
    seeing: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = seeing.request((2, *range(30, 50)))
    expected = seeing.reply(text)
    monkeypatch.setattr("mlx_backend.engine.mlx.vision.families.is_installed", lambda: False)
    engine = load_engine(seeing.model.folder)
    try:
        assert engine.image_processor is None
        assert Seeing(seeing.model, engine).reply(text) == expected
        with pytest.raises(EngineRefused, match="cannot see images here"):
            list(engine.generate(seeing.request((2,), noise(1), TEXT)))
    finally:
        engine.stop()


def test_without_packed_runs_images_are_seen_all_the_same(folder: SeeingModel, seeing: Seeing) -> None:
    parts, text = LAYOUTS["two images"], seeing.request((2, *range(30, 50)))
    with load_engine(folder.folder, packing=False, cache_bytes=0) as engine:
        found = Seeing(folder, engine)
        assert ("replies about pictures" in engine.status().unbatched) is ("qwen" in folder.folder.name)
        assert found.reply(found.request(*parts)) == seeing.reply(seeing.request(*parts))
        assert found.reply(text) == seeing.reply(text)


def test_mlx_vlms_own_generation_reads_the_images_of_gemma_3_in_one_direction(tmp_path: Path) -> None:
    """Why its replies are not the reference for this family. Should this fail, mlx-vlm has mended it: then they are."""
    from mlx_vlm.utils import load_model

    model = load_model(write_gemma3(tmp_path).folder)
    tokens = mx.array([[2, 3, *[5] * 16, 4, 20]])
    pixels = mx.random.normal((1, 3, 32, 32))
    found = model.get_input_embeddings(tokens, pixels, mask=mx.ones_like(tokens))
    named = {
        key: value for key, value in found.to_dict().items() if key != "inputs_embeds" and value is not None
    }
    answers = []
    for first in (0, 1):  # another last row of the image's embeddings
        embedded = mx.array(found.inputs_embeds)
        embedded[0, 17] += first
        answers.append(model.language_model(tokens, embedded, cache=None, **named).logits[0])
    changed = (mx.abs(answers[0] - answers[1]).max(axis=-1) > 0).tolist()
    assert list(named) == ["attention_mask_4d"]
    assert changed == [index >= 17 for index, _ in zip(range(20), count(), strict=False)]
