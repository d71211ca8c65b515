"""Images and other work: one in a step, cancelled between two, preempted, in crowds of long and short replies."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from drafting import generate, loaded_batch
from engine_models import WrappedNetwork
from seeing import LAYOUTS, TEXT, Seeing, noise
from vision_models import SeeingModel, needs_mlx_vlm

from mlx_backend.engine.base import Progress, Sampling, TokenDelta
from mlx_backend.engine.images import PromptImage
from mlx_backend.engine.mlx import batch_caches
from mlx_backend.engine.mlx.vision.vlm_processor import VLMProcessor
from mlx_backend.errors import EngineRefused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mlx_backend.engine.base import GenerationRequest
    from mlx_backend.engine.mlx.batch import MLXBatch
    from mlx_backend.images import Picture

pytestmark = [
    needs_mlx_vlm,
    # Steps know no family: one with windows, one with positions in rows and columns, one with states.
    pytest.mark.parametrize("folder", ["gemma3", "qwen3_vl", "qwen3_5"], indirect=True, scope="module"),
]


@pytest.fixture
def batch(folder: SeeingModel) -> Iterator[MLXBatch]:
    with loaded_batch(folder.folder) as batch:
        yield batch


def step(batch: MLXBatch) -> dict[int, list[int]]:
    """Take a step; return the tokens that it emitted, by request."""
    tokens: dict[int, list[int]] = {}
    for key, outcome in batch.step():
        if isinstance(outcome, TokenDelta):
            tokens.setdefault(key, []).append(outcome.token)
    return tokens


def of_many_images(seeing: Seeing) -> GenerationRequest:
    return seeing.request((2,), *(noise(seed) for seed in range(70, 74)), TEXT)


def test_a_step_sees_one_image_and_gives_every_running_reply_a_token(
    batch: MLXBatch, seeing: Seeing, seen: list[bytes]
) -> None:
    text = seeing.request((2, *range(30, 50)), tokens=40)
    batch.insert(0, text)
    tokens = [token for _ in range(3) for token in step(batch).get(0, [])]
    batch.insert(1, of_many_images(seeing))
    for count in range(1, 5):
        emitted = step(batch)
        assert len(seen) == count
        assert emitted[0], "it does not wait for more than one image"
        assert 1 not in emitted
        tokens += emitted[0]
    while batch.sequences:
        tokens += step(batch).get(0, [])
    assert tokens == seeing.reply(text)


def test_a_short_text_does_not_wait_for_the_images_of_a_request_before_it(
    batch: MLXBatch, seeing: Seeing, seen: list[bytes]
) -> None:
    batch.prefill_queue.pacer.rate = 10_000  # whatever this machine was measured to do
    batch.insert(0, of_many_images(seeing))
    batch.insert(1, seeing.request((2, 30, 31)))
    while not step(batch):
        pass
    assert len(seen) < 4


def test_a_request_that_is_cancelled_sees_no_more_of_its_images(
    batch: MLXBatch, seeing: Seeing, seen: list[bytes]
) -> None:
    budget = batch.runtime.cache_budget
    batch.insert(0, of_many_images(seeing))
    assert budget._seeing[0] > 0
    step(batch)
    step(batch)
    batch.remove(0)
    assert len(seen) == 2
    assert not batch.sequences
    assert not budget._seeing


@pytest.mark.parametrize("after", [0, 2, 9])
def test_a_reply_that_is_preempted_goes_on_as_if_it_had_not_been(
    batch: MLXBatch, seeing: Seeing, after: int
) -> None:
    requests = [
        seeing.request(*LAYOUTS["two images"], sampling=Sampling(temperature=1.0, seed=5)),
        seeing.request((2, *range(30, 50))),
    ]
    for key, request in enumerate(requests):
        batch.insert(key, request)
    tokens: dict[int, list[int]] = {0: [], 1: []}
    steps = 0
    while batch.sequences:
        if steps == after:
            batch.preempt(batch.sequences[0])
        steps += 1
        for key, emitted in step(batch).items():
            tokens[key] += emitted
    assert [tokens[0], tokens[1]] == [seeing.reply(request) for request in requests]


def crowd(seeing: Seeing) -> list[GenerationRequest]:
    """Long and short replies, about images and not."""
    return [
        seeing.request(*LAYOUTS["images side by side"], tokens=20),
        seeing.request((2, *range(30, 40)), tokens=40),
        seeing.request(*LAYOUTS["an image at the beginning"], tokens=30),
        seeing.request((2, *range(100, 190)), tokens=15),
        seeing.request((2,), noise(80), TEXT, tokens=28, sampling=Sampling(temperature=1.0, seed=6)),
        seeing.request(*LAYOUTS["an image after a long text"], tokens=15),
        seeing.request(*LAYOUTS["an image at the end"], tokens=30),
    ]


@pytest.mark.parametrize("arrivals", [(0, 3, 5, 8, 9, 13, 17), (20, 12, 9, 6, 4, 2, 0)], ids=str)
def test_long_and_short_replies_about_images_are_together_what_each_is_alone(
    batch: MLXBatch, seeing: Seeing, arrivals: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some begin longer, some become so.
    monkeypatch.setattr(batch.runtime, "abilities", replace(batch.runtime.abilities, max_merged_length=48))
    requests = crowd(seeing)
    found = generate(batch, requests, arrivals=dict(enumerate(arrivals)))
    assert [each.tokens for each in found] == [seeing.reply(request) for request in requests]


def test_replies_that_stay_are_unchanged_when_others_leave(
    batch: MLXBatch, seeing: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch.runtime, "abilities", replace(batch.runtime.abilities, max_merged_length=48))
    requests = crowd(seeing)
    found = generate(batch, requests, cancelled_after={0: 7, 3: 3, 5: 11})
    for at in (1, 2, 4, 6):
        assert found[at].tokens == seeing.reply(requests[at])


class FailsFirst(WrappedNetwork):
    """A network that fails at once, before it has embedded anything, when it is first run."""

    has_failed = False

    def __call__(self, *given: Any, **named: Any) -> Any:
        if not self.has_failed:
            self.has_failed = True
            raise ValueError("[reshape] not so")
        return self._network(*given, **named)


def test_images_whose_run_failed_are_not_in_the_next_reply(batch: MLXBatch, seeing: Seeing) -> None:
    about_image, text = seeing.request(noise(90), TEXT), seeing.request((2, *range(30, 40)))
    networks = batch.runtime.networks.by_adapter
    networks[""] = FailsFirst(networks[""])
    [failed] = generate(batch, [about_image])
    assert failed.error is not None
    [found] = generate(batch, [text])
    assert (found.tokens, found.error) == (seeing.reply(text), None)


def test_a_warm_up_with_an_image_leaves_only_the_new_words_to_read(
    folder: SeeingModel, seeing: Seeing, seen: list[bytes]
) -> None:
    request = seeing.request((2,), noise(81), TEXT)
    with loaded_batch(folder.folder, cache_bytes=64 << 20) as batch:
        seen.clear()
        [warmed] = generate(batch, [replace(request, prompt=request.prompt[:-2], max_tokens=0)])
        assert warmed.ended is not None
        [found] = generate(batch, [request])
    assert seen == [request.images[0].image.digest], "once"
    assert found.tokens == seeing.reply(request)


def test_chunks_that_are_filled_up_may_end_behind_an_image_that_is_not_cut(
    batch: MLXBatch, seeing: Seeing
) -> None:
    batch.prefill_queue.pads_chunks = batch.runtime.abilities.can_rewind  # as on CUDA
    requests = [
        seeing.request([2, *range(30, 30 + before)], noise(9), range(40, 90)) for before in (112, 118, 125)
    ]
    for request in requests:  # a chunk would end at the 128th token
        [found] = generate(batch, [request])
        assert found.tokens == seeing.reply(request)


def test_a_reply_about_an_image_that_was_seen_before_reserves_nothing_for_seeing_it(
    batch: MLXBatch, seeing: Seeing, seen: list[bytes]
) -> None:
    generate(batch, [seeing.request((2, 70), noise(10), TEXT)])
    batch.insert(0, seeing.request((2, 71), noise(10), TEXT))
    while not step(batch):
        pass
    assert len(seen) == 1
    assert not batch.runtime.cache_budget._seeing


def test_a_picture_that_was_seen_is_prepared_again_only_if_what_was_made_of_it_is_lost(
    batch: MLXBatch, seeing: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    vision = batch.runtime.vision
    assert vision is not None
    prepared: list[Picture] = []
    write = VLMProcessor._write

    def noting(self: VLMProcessor, part: str, picture: Picture, *given: Any) -> Any:
        prepared.append(picture)
        return write(self, part, picture, *given)

    monkeypatch.setattr(VLMProcessor, "_write", noting)
    picture = noise(83)
    prompt = seeing.request((2,), picture, TEXT)
    [place] = prompt.images

    def asked() -> GenerationRequest:
        return replace(prompt, images=[PromptImage(place.start, vision.processor.prepare(picture))])

    for count in (1, 1):
        [found] = generate(batch, [request := asked()])
        assert len(prepared) == count + 1, "and once for the other engine"
        assert request.images[0].image.nbytes == place.image.nbytes
    request = asked()
    vision.features.evict_to(0)
    [again] = generate(batch, [request])
    assert len(prepared) == 3
    assert again.tokens == found.tokens == seeing.reply(prompt)


def test_what_may_come_next_is_prefilled_without_what_it_takes_to_see_an_image_again(
    folder: SeeingModel, seeing: Seeing, seen: list[bytes]
) -> None:
    request = seeing.request((2,), noise(82), TEXT)
    following = seeing.request((2,), noise(82), (*TEXT, *range(60, 80)))
    [image] = following.images
    known = [PromptImage(image.start, image.image.known())]
    plan = replace(following, prompt=following.prompt[:-3], images=known, max_tokens=0)
    with loaded_batch(folder.folder, cache_bytes=64 << 20) as batch:
        generate(batch, [request])
        seen.clear()
        [warmed] = generate(batch, [plan])
        assert warmed.ended is not None
        batch.insert(0, following)
        cached = [outcome.cached for _, outcome in batch.step() if isinstance(outcome, Progress)]
        batch.remove(0)
        assert cached[0] == len(plan.prompt)
        [found] = generate(batch, [following])
        assert not seen
        assert found.tokens == seeing.reply(following)
        vision = batch.runtime.vision
        assert vision is not None
        vision.features.evict_to(0)
        with pytest.raises(EngineRefused, match="not kept any more"):
            batch.admits(plan)


def test_replies_about_images_whose_caches_are_lost_go_on_as_if_they_were_not(
    batch: MLXBatch, seeing: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        seeing.request(*LAYOUTS["two images"], tokens=30),
        seeing.request((2, *range(30, 50)), tokens=12),
        seeing.request((2,), noise(80), TEXT, tokens=25),
    ]

    failed: list[str] = []

    def failing(*_: object) -> None:
        monkeypatch.undo()
        failed.append("when the first of them ended")
        raise ValueError("[take] not these rows")

    monkeypatch.setattr(batch_caches, "select_rows", failing)
    found = generate(batch, requests)
    assert failed
    assert [each.tokens for each in found] == [seeing.reply(request) for request in requests]
