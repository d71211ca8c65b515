"""The images of one prompt, as arithmetic: positions, ends of chunks, keys of prefixes."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from prepared_images import with_grid
from vision_models import needs_mlx_vlm

from mlx_backend.engine.images import PromptImage
from mlx_backend.engine.mlx.vision.families import frequency_axes
from mlx_backend.engine.mlx.vision.image_memory import FeatureCache
from mlx_backend.engine.mlx.vision.prompt_images import PromptImages
from mlx_backend.engine.mlx.vision.tower import ImageTraits

if TYPE_CHECKING:
    from mlx_backend.engine.images import PreparedImage

PAD, VISION_START = 5, 3


GRID = ImageTraits(axes=mx.array([0, 1, 2]))
BOTH_WAYS = ImageTraits(attends_both_ways=True)


def image(rows: int, columns: int, name: bytes = b"a") -> PreparedImage:
    return with_grid(rows, columns, digest=name)


def prompt_images(images: list[PromptImage], traits: ImageTraits = GRID) -> PromptImages:
    vision: Any = SimpleNamespace(traits=traits, features=FeatureCache())
    return PromptImages(images, vision)


def random_layout(seed: int) -> tuple[list[int], list[PromptImage]]:
    """A prompt of texts and images, as mlx-vlm counts images: each has a token for its start before it."""
    chance = random.Random(seed)
    tokens: list[int] = []
    images = []
    for _ in range(chance.randint(1, 4)):
        tokens += [chance.randint(100, 200) for _ in range(chance.randint(0, 6))] + [VISION_START]
        images.append(PromptImage(len(tokens), image(chance.randint(1, 5), chance.randint(1, 5))))
        tokens += [PAD] * images[-1].image.num_tokens
    return tokens + [chance.randint(100, 200) for _ in range(chance.randint(0, 6))], images


@needs_mlx_vlm
@pytest.mark.parametrize("seed", range(12))
def test_positions_are_those_of_mlx_vlm_from_any_token_to_any_other(seed: int) -> None:
    from mlx_vlm.models.qwen2_5_vl.language import LanguageModel

    tokens, images = random_layout(seed)
    config: Any = SimpleNamespace(
        vision_config=SimpleNamespace(spatial_merge_size=1),
        image_token_id=PAD,
        video_token_id=6,
        vision_start_token_id=VISION_START,
    )
    ends = [each.image.written.positions[1:, -1] + 1 for each in images]
    grids = mx.array([[1, rows, columns] for rows, columns in np.array(ends).tolist()])
    expected, delta = LanguageModel.get_rope_index(SimpleNamespace(config=config), mx.array([tokens]), grids)
    ours = prompt_images(images)
    whole = np.array(expected[:, 0])
    assert ours.shift == delta.item()
    for start in range(len(tokens)):
        for end in range(start + 1, len(tokens) + 1):
            assert (ours.positions(start, end) == whole[:, start:end]).all()


def test_a_family_without_a_grid_counts_on_by_one() -> None:
    ours = prompt_images([PromptImage(2, image(4, 4))], BOTH_WAYS)
    assert ours.shift == 0


@pytest.mark.parametrize(("traits", "is_whole"), [(BOTH_WAYS, True), (GRID, False)])
def test_a_chunk_ends_behind_an_image_that_may_not_be_cut(traits: ImageTraits, is_whole: bool) -> None:
    ours = prompt_images([PromptImage(2, image(2, 2)), PromptImage(6, image(1, 3))], traits)
    expected = [0, 1, 2, 6, 6, 6, 6, 9, 9, 9, 10]
    assert [ours.whole_end(position) for position in range(11)] == (expected if is_whole else [*range(11)])


def test_prefixes_end_outside_of_images_and_behind_none_of_few_places() -> None:
    ours = prompt_images([PromptImage(2, image(2, 2)), PromptImage(8, image(1, 3))])
    assert [position for position in range(1, 14) if ours.can_store(position)] == [1, 2, 6, 7, 8]


def test_a_key_has_the_tokens_of_texts_and_the_hash_of_images_wherever_it_is_begun() -> None:
    tokens, images = random_layout(3)
    ours = prompt_images(images)
    whole = ours.keyed(0, tokens)
    places = {at for each in images for at in range(each.start, each.end)}
    assert all((word == tokens[at]) is (at not in places) for at, word in enumerate(whole))
    assert all((word >= 1 << 31) is (at in places) for at, word in enumerate(whole))
    for start in range(len(tokens)):
        for end in range(start, len(tokens) + 1):
            assert ours.keyed(start, tokens[start:end]) == whole[start:end]


def test_keys_of_different_images_differ_in_every_place() -> None:
    keys = [
        prompt_images([PromptImage(0, image(4, 4, name))]).keyed(0, [PAD] * 16) for name in (b"a", b"b", b"c")
    ]
    assert all(one != other for pair in pairwise(keys) for one, other in zip(*pair, strict=True))
    assert len(set(keys[0])) == 16


def test_each_element_of_a_head_is_rotated_by_one_axis() -> None:
    config = {"rope_scaling": {"mrope_section": [1, 2, 1]}}
    assert frequency_axes(config, 8) == [0, 1, 1, 2, 0, 1, 1, 2]
    assert frequency_axes(config, 8, in_pairs=True) == [0, 0, 1, 1, 1, 1, 2, 2]
    with pytest.raises(ValueError, match="does not fit heads of 6"):
        frequency_axes(config, 6)
