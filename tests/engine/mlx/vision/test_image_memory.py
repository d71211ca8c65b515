"""What images take of the memory, before they are seen, while they are and afterwards, and what is refused."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import pytest
from drafting import generate, loaded_batch
from prepared_images import prepared
from seeing import TEXT, Seeing, noise
from vision_models import SeeingModel, needs_mlx_vlm

from mlx_backend.device.memory import MemoryBudget
from mlx_backend.engine.kv_cache_budget import ImageBytes, KVCacheBudget
from mlx_backend.engine.mlx.vision.image_memory import FeatureCache, PreparedImages, TowerCost
from mlx_backend.errors import EngineBusy, EngineRefused

if TYPE_CHECKING:
    from mlx_backend.engine.images import PreparedImage
    from mlx_backend.engine.mlx.batch import MLXBatch


def image(nbytes: int) -> PreparedImage:
    return prepared(inputs={"pixel_values": np.zeros(nbytes, np.uint8)})


def counting(room: int) -> PreparedImages:
    images = PreparedImages()
    images.room = lambda: room
    return images


def test_prepared_images_are_counted_for_as_long_as_they_exist() -> None:
    counted = counting(4000)
    first, second = image(300), image(500)
    counted.add(first)
    counted.add(second)
    assert counted.nbytes == 800
    del first
    gc.collect()
    assert counted.nbytes == 500


def test_images_of_one_request_that_never_fit_together_are_refused() -> None:
    counted = counting(4000)
    counted.add(first := image(600))
    with pytest.raises(EngineRefused, match=r"The request's images take more than 0\.977 KB of memory"):
        counted.add(image(500), first.nbytes)
    assert counted.nbytes == 600
    with pytest.raises(EngineBusy):  # of another request
        counted.add(image(500), 100)


def test_one_that_never_fits_is_refused_and_one_too_many_is_told_to_come_back() -> None:
    counted = counting(4000)  # a quarter of which is for images
    with pytest.raises(EngineRefused, match=r"takes 1\.07 KB of memory .* 0\.977 KB are left for images"):
        counted.add(image(1100))
    held = image(600)
    counted.add(held)
    with pytest.raises(EngineBusy, match=r"take 0\.586 KB of memory, and one more of 0\.488 KB does not fit"):
        counted.add(image(500))
    assert counted.nbytes == 600, "what was refused does not count"
    del held
    gc.collect()
    counted.add(another := image(500))
    assert counted.nbytes == another.nbytes


@pytest.mark.parametrize(("per_byte", "per_pair"), [(3.0, 0.0), (2.0, 0.01), (0.0, 0.5)])
def test_the_cost_of_any_image_follows_from_two(per_byte: float, per_pair: float) -> None:
    def taken(nbytes: int) -> tuple[int, int]:
        return nbytes, int(nbytes * (per_byte + per_pair * nbytes))

    cost = TowerCost.of([taken(1000), taken(4000)])
    assert cost.working_bytes(image(10_000)) == pytest.approx(taken(10_000)[1], rel=1e-6)


def test_images_of_one_size_all_cost_the_same() -> None:
    assert TowerCost.of([(1000, 5000), (1000, 5000)]).working_bytes(image(1000)) == 5000


def test_the_least_recently_used_features_are_dropped() -> None:
    one = mx.zeros((10,), mx.float32)
    cache = FeatureCache(max_bytes=100)
    cache.put(b"a", one)
    cache.put(b"b", one)
    assert cache.find(b"a") is not None
    cache.put(b"c", one)
    assert [cache.find(each) is not None for each in (b"a", b"b", b"c")] == [True, False, True]
    cache.evict_to(40)
    assert [cache.find(each) is not None for each in (b"a", b"c")] == [False, True]
    cache.evict_to(-1)
    assert cache.nbytes == 0
    cache.put(b"d", mx.zeros((1000,)))
    assert cache.nbytes == 0, "more than it may hold"


# -- the budget -------------------------------------------------------------------------------------------------


def budget_of(memory: MemoryBudget, waiting: list[int]) -> KVCacheBudget:
    return KVCacheBudget(
        memory.reserve(1000), lambda tokens: 10 * tokens, max_padded=0, waiting=lambda: waiting[0]
    )


def test_memory_for_seeing_is_set_aside_until_all_is_seen_and_once_for_all_who_wait() -> None:
    memory, waiting = MemoryBudget(10_000), [0]
    budget = budget_of(memory, waiting)  # of 8,500 bytes; a margin of 400 is for every step
    budget.reserve(0, 100, seeing=2_400)
    budget.reserve(1, 100, seeing=1_400)
    assert budget.used == 2_000 + 2_400 - 400, "one image is seen after the other"
    assert budget.prefix_room() == 8_500 - budget.used
    assert memory.reserved == 1000 + budget.used
    budget.reserve_seeing(0, 0)
    assert budget.used == 2_000 + 1_400 - 400
    budget.release(1)
    assert budget.used == 1_000
    waiting[0] = 700
    assert budget.used == 1_700
    budget.set_prefix_bytes(0)
    assert memory.reserved == 2_700


def test_a_request_fits_with_its_images_or_waits() -> None:
    budget = budget_of(MemoryBudget(10_000), waiting := [0])
    budget.reserve(0, 600)
    assert budget.fits(250)
    assert budget.fits(250, seeing=400), "in the margin"
    assert not budget.fits(250, seeing=500)
    waiting[0] = 100
    assert not budget.fits(250)


def test_images_that_can_never_be_seen_are_refused_with_the_figures() -> None:
    memory = MemoryBudget(10_000)
    budget = budget_of(memory, [0])
    budget.check(100, "The request", ImageBytes(1_000, 6_900))
    with pytest.raises(
        EngineRefused,
        match=r"of memory for its cache and its images; the model leaves 8\.30 KB of 9\.77 KB, enough for 100 tokens "
        r"of prompt and reply together\. Ask for fewer tokens, send fewer or smaller images, or raise",
    ):
        budget.check(101, "The request", ImageBytes(1_000, 6_900))
    memory.reserve(0).set_working(500)
    with pytest.raises(EngineBusy, match="enough for 50 tokens"):
        budget.check(51, "The request", ImageBytes(1_000, 6_900))


# -- an engine --------------------------------------------------------------------------------------------------


any_family = pytest.mark.parametrize("folder", ["gemma3", "qwen3_vl"], indirect=True, scope="module")
"""For what is the same in every family."""


def working(batch: MLXBatch) -> int:
    return batch.runtime.cache_budget.reservation.working


@needs_mlx_vlm
def test_a_vision_tower_is_measured_and_its_features_are_counted(folder: SeeingModel, seeing: Seeing) -> None:
    with loaded_batch(folder.folder) as batch:
        vision = batch.runtime.vision
        assert vision is not None
        request = seeing.request((2,), noise(90), TEXT)
        needed = vision.cost.working_bytes(request.images[0].image)
        assert needed >= request.images[0].image.nbytes, "they are copied at least"
        [found] = generate(batch, [request])
        assert found.ended is not None
        assert vision.features.nbytes > 0
        assert working(batch) == vision.features.nbytes


@needs_mlx_vlm
@any_family
def test_an_image_that_cannot_be_seen_in_the_memory_there_is_is_refused_and_text_goes_on(
    folder: SeeingModel, seeing: Seeing
) -> None:
    with loaded_batch(folder.folder) as batch:
        assert batch.runtime.vision is not None
        request = seeing.request((2,), noise(91), TEXT)
        assert batch.admits(request)
        batch.runtime.vision.cost = TowerCost(per_byte=1e9)
        with pytest.raises(EngineRefused, match="of memory for its cache and its images"):
            batch.admits(request)
        text = seeing.request((2, 30, 31))
        assert batch.admits(text)
        assert generate(batch, [text])[0].tokens == seeing.reply(text)


@needs_mlx_vlm
@any_family
def test_images_that_wait_are_given_back_with_their_requests(folder: SeeingModel, seeing: Seeing) -> None:
    with loaded_batch(folder.folder) as batch:
        vision = batch.runtime.vision
        assert vision is not None
        before = vision.processor.waiting.nbytes
        prepared = vision.processor.prepare(noise(92))
        assert vision.processor.waiting.nbytes == before + prepared.nbytes
        del prepared
        gc.collect()
        assert vision.processor.waiting.nbytes == before


@needs_mlx_vlm
@any_family
def test_features_make_room_for_replies(folder: SeeingModel, seeing: Seeing) -> None:
    with loaded_batch(folder.folder) as batch:
        runtime = batch.runtime
        assert runtime.vision is not None
        generate(batch, [seeing.request((2,), noise(93), TEXT)])
        assert runtime.vision.features.nbytes
        runtime.cache_budget.reserve(99, 1 << 40)
        batch.runtime.prefix_store.evict_to_fit()
        assert not runtime.vision.features.nbytes
