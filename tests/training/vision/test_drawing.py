"""The pictures show what their scenes say: everything is there, in its ink, whole, apart and large enough."""

import itertools
import random

import numpy as np
import pytest

from training.vision.draw import outline, render
from training.vision.glyphs import number_mask
from training.vision.palette import ANCHORS, COLOURS, distance, ink, is_seen, paper, shade
from training.vision.scene import MODEL_AREA, SHAPES, UNKNOWN_KINDS, Scene, draw_scene, shrinking
from training.vision.shape import MAX_PIXELS


def scenes(content: str, count: int = 60) -> list[Scene]:
    rng = random.Random(content)
    return [draw_scene(rng, content) for _ in range(count)]


CONTENTS = ("one", "pair", "shapes", "number", "long number", "mixed", "many")


@pytest.mark.parametrize("content", CONTENTS)
def test_nothing_on_a_picture_is_cut_off_or_covered(content: str) -> None:
    for scene in scenes(content):
        boxes = [(each.x, each.y, each.radius, each.radius) for each in scene.shapes]
        if scene.number:
            number = scene.number
            boxes.append((number.x, number.y, number.width / 2, number.height / 2))
        for x, y, across, down in boxes:
            assert across <= x <= scene.width - across
            assert down <= y <= scene.height - down
        for (x, y, across, down), (u, v, over, under) in itertools.combinations(boxes, 2):
            assert abs(x - u) >= across + over or abs(y - v) >= down + under


def test_scenes_are_made_for_the_size_in_which_the_model_sees_them() -> None:
    assert MODEL_AREA == MAX_PIXELS


@pytest.mark.parametrize("content", CONTENTS)
def test_everything_is_seen_on_its_paper_and_large_enough_for_the_model(content: str) -> None:
    for scene in scenes(content):
        scale = shrinking(scene.width, scene.height)
        for shape in scene.shapes:
            assert is_seen(shape.ink, scene.paper, thin=not shape.filled)
            assert shape.colour != scene.paper_name
            assert shape.radius * scale >= 7
        if scene.number:
            assert is_seen(scene.number.ink, scene.paper, thin=True)
            assert scene.number.height * scale >= 17


@pytest.mark.parametrize("content", ["one", "pair", "shapes", "number", "mixed"])
def test_the_ink_of_everything_is_on_the_picture_where_the_scene_says(content: str) -> None:
    rng = random.Random(1)
    for scene in scenes(content, 40):
        pixels = render(scene, rng)
        assert pixels.shape == (scene.height, scene.width, 3)
        things = [(each.x, each.y, each.radius, each.radius, each.ink) for each in scene.shapes]
        if scene.number:
            number = scene.number
            things.append((number.x, number.y, number.width / 2, number.height / 2, number.ink))
        for x, y, across, down, tint in things:
            part = pixels[
                max(0, int(y - down)) : int(y + down) + 1, max(0, int(x - across)) : int(x + across) + 1
            ]
            off = np.abs(part.astype(int) - np.array(tint)).sum(axis=2)
            blank = np.abs(part.astype(int) - np.array(scene.paper)).sum(axis=2)
            assert (off < blank).mean() > 0.02, scene


def test_the_same_scene_and_generator_give_the_same_pixels() -> None:
    for scene in scenes("mixed", 5) + scenes("unknown", 10):
        assert np.array_equal(render(scene, random.Random(3)), render(scene, random.Random(3)))


@pytest.mark.parametrize("kind", sorted(set(UNKNOWN_KINDS)))
def test_what_is_unknown_is_drawn_at_any_size(kind: str) -> None:
    rng = random.Random(kind)
    for width, height in ((64, 64), (300, 100), (80, 400)):
        pixels = render(Scene(width, height, (255, 255, 255), "white", kind), rng)
        assert pixels.shape == (height, width, 3)
        assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 1


def test_a_blank_picture_is_one_colour_but_for_grain_and_faint_lines() -> None:
    rng = random.Random(4)
    for scene in scenes("blank", 20):
        pixels = render(scene, rng).astype(int)
        assert np.abs(pixels - np.array(scene.paper)).max() <= 50


@pytest.mark.parametrize("name", SHAPES)
def test_an_outline_lies_in_its_circle_and_reaches_far(name: str) -> None:
    rng = random.Random(name)
    for _ in range(30):
        points = outline(rng, name)
        reach = max(abs(value) for point in points for value in point)
        assert all(x * x + y * y <= 1.05**2 for x, y in points)
        assert reach > 0.65


def test_a_rectangle_is_never_nearly_a_square_nor_an_oval_nearly_a_circle() -> None:
    rng = random.Random(5)
    for name in ("rectangle", "oval"):
        for _ in range(50):
            points = np.array(outline(rng, name))
            wide, high = np.sqrt(np.linalg.eigvalsh(np.cov(points.T)))[::-1]
            assert wide / high > 1.5


@pytest.mark.parametrize("digit", "0123456789")
def test_a_number_fills_its_box_and_stays_in_it(digit: str) -> None:
    rng = random.Random(digit)
    for text in (digit, digit + "84", "17" + digit + "5"):
        for _ in range(10):
            width, height = 40 * len(text), 60
            mask = np.array(number_mask(rng, text, width, height))
            assert mask.shape[0] <= height + 3
            assert mask.shape[1] <= width + 3
            rows, columns = np.nonzero(mask > 128)
            assert np.ptp(rows) > 0.35 * height
            assert np.ptp(columns) > 0.03 * width


def test_no_two_colours_can_be_taken_for_each_other() -> None:
    for one, other in itertools.combinations(COLOURS, 2):
        assert min(distance(a, b) for a in ANCHORS[one] for b in ANCHORS[other]) > 50, (one, other)


def test_an_ink_of_the_name_wished_for_is_given_where_the_paper_allows() -> None:
    rng = random.Random(6)
    assert ink(rng, (255, 255, 255), "white", "red")[0] == "red"
    assert ink(rng, (255, 255, 255), "white", "white")[0] != "white"


def test_papers_with_a_name_have_a_colour_of_that_name() -> None:
    rng = random.Random(7)
    for _ in range(200):
        name, rgb = paper(rng)
        if name:
            nearest = min(COLOURS, key=lambda each: min(distance(rgb, anchor) for anchor in ANCHORS[each]))
            assert nearest == name


def test_a_shade_is_nearest_to_its_own_name() -> None:
    rng = random.Random(8)
    for name in COLOURS:
        for _ in range(100):
            rgb = shade(rng, name)
            nearest = min(COLOURS, key=lambda each: min(distance(rgb, anchor) for anchor in ANCHORS[each]))
            assert nearest == name
