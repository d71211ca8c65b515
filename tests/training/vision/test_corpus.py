"""The corpus of the model that sees: the same again from a seed, true answers, and nothing held out in training."""

import random

import numpy as np
import pytest

from training.vision.corpus import MAX_PICTURES, SKILLS, PictureDialogue, dialogue
from training.vision.language import LANGUAGES, say
from training.vision.questions import ASKERS, cell, description
from training.vision.scene import (
    CONTENTS,
    Number,
    Scene,
    Shape,
    draw_scene,
    is_held,
    is_on_side,
    sides,
)
from training.vision.user_pictures import user_pictures
from training.vision.wordings import FORMS, framed

RED, BLUE, GREEN = (255, 0, 0), (0, 0, 255), (0, 128, 0)
WHITE = (255, 255, 255)
CIRCLE = Shape("circle", "red", RED, 50, 150, 40)
SQUARE = Shape("square", "blue", BLUE, 250, 150, 20)
STARS = (Shape("star", "green", GREEN, 50, 40, 20), Shape("star", "green", GREEN, 250, 40, 20))


def scene(*shapes: Shape, number: str = "") -> Scene:
    written = Number(number, "red", RED, 150, 250, 80, 40) if number else None
    return Scene(300, 300, WHITE, "white", "things", shapes, written)


def answers(skill: str, shown: Scene, language: str = "en", draws: int = 2_000) -> dict[str, str]:
    """Return what is answered to each question drawn, without what stands around the questions."""
    rng = random.Random(1)
    pairs = (ASKERS[skill](rng, language, shown, False) for _ in range(draws))
    return {pair[0].lower(): pair[1] for pair in pairs if pair}


def test_the_same_seed_gives_the_same_dialogues() -> None:
    def drawn() -> list[PictureDialogue]:
        rng = random.Random(8)
        return [dialogue(rng) for _ in range(12)]

    for one, other in zip(drawn(), drawn(), strict=True):
        assert one.instructions == other.instructions
        assert [turn.question for turn in one.turns] == [turn.question for turn in other.turns]
        assert [turn.answer for turn in one.turns] == [turn.answer for turn in other.turns]
        for turn, again in zip(one.turns, other.turns, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(turn.images, again.images, strict=True))


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("skill", SKILLS)
def test_a_skill_asked_for_is_the_only_turn(skill: str, held_out: bool) -> None:
    rng = random.Random(3)
    for _ in range(4):
        (turn,) = dialogue(rng, held_out=held_out, skill=skill).turns
        assert turn.skill == skill
        assert turn.question
        assert turn.answer
        assert all(image.dtype == np.uint8 and image.shape[2] == 3 for image in turn.images)


def test_free_dialogues_have_every_skill_and_few_pictures() -> None:
    rng = random.Random(4)
    drawn = [dialogue(rng) for _ in range(400)]
    assert {turn.skill for each in drawn for turn in each.turns} == set(SKILLS)
    assert max(sum(len(turn.images) for turn in each.turns) for each in drawn) == MAX_PICTURES


@pytest.mark.parametrize("held_out", [False, True])
def test_what_is_held_out_is_never_on_a_picture_of_training(held_out: bool) -> None:
    rng = random.Random(5)
    for _ in range(150):
        drawn = draw_scene(rng, held_out=held_out)
        assert is_on_side(drawn, held_out)
        if sides(drawn):
            assert any(sides(drawn)) is held_out


def test_single_digits_are_on_both_sides() -> None:
    assert sides(scene(number="7")) == ()


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("skill", FORMS)
def test_every_skill_has_wordings_of_both_sides(skill: str, language: str) -> None:
    rng = random.Random(6)
    for held_out in (False, True):
        for _ in range(5):
            text = framed(rng, language, FORMS[skill][language], held_out)
            assert is_held(f"wording {text}") is held_out


def test_a_description_counts_what_is_alike_and_names_the_number_last() -> None:
    shown = scene(CIRCLE, *STARS, number="472")
    assert description("en", shown) == "A red circle, two green stars and the number 472."
    assert description("ja", shown) == "赤い円が1つ、緑の星が2つ、数字の472があります。"
    assert description("zh", shown) == "一个红色的圆形、两个绿色的星形和数字472。"


def test_more_than_five_shapes_are_not_counted() -> None:
    shown = scene(*(Shape("star", "green", GREEN, 40 * place + 30, 40, 15) for place in range(6)))
    assert description("en", shown) == "There are more than five shapes."
    assert set(answers("count", shown).values()) == {"There are more than five shapes."}


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("skill", ASKERS)
def test_any_picture_can_be_asked_anything(skill: str, language: str) -> None:
    rng = random.Random(f"{skill} {language}")
    for content in CONTENTS:
        for _ in range(30 if content not in ("blank", "unknown") else 0):
            pair = ASKERS[skill](rng, language, draw_scene(rng, content), False)
            assert pair is None or all(pair)


def test_a_number_of_more_than_four_digits_is_not_read() -> None:
    assert description("en", scene(number="12345")) == say("en", "too long")
    assert set(answers("digits", scene(number="12345")).values()) == {say("en", "too long")}


def test_where_something_lies_is_told_only_of_what_is_named_without_doubt() -> None:
    shown = scene(CIRCLE, *STARS)
    asked = answers("position", shown)
    assert "The circle is on the left." in asked.values()
    assert not any("star" in answer and "no " not in answer for answer in asked.values())


def test_what_lies_near_the_border_of_two_places_has_no_place() -> None:
    assert cell(scene(), Shape("circle", "red", RED, 108, 150, 20)) is None
    assert cell(scene(), Shape("circle", "red", RED, 150, 150, 20)) == 4
    assert cell(scene(), Shape("circle", "red", RED, 280, 20, 20)) == 2


def test_left_and_right_are_as_the_viewer_sees_them() -> None:
    asked = answers("compare", scene(CIRCLE, SQUARE))
    assert (
        asked["is the circle to the left of the square?"] == "Yes, the circle is to the left of the square."
    )
    assert (
        asked["is the circle to the right of the square?"] == "No, the circle is to the left of the square."
    )
    beside = answers("relation", scene(CIRCLE, SQUARE))
    assert beside["what is to the right of the circle?"] == "A blue square."
    assert beside["what is to the left of the circle?"] == "There is nothing to the left of the circle."


def test_above_and_below_are_not_asked_of_shapes_at_one_height() -> None:
    asked = answers("compare", scene(CIRCLE, SQUARE))
    assert not any("above" in question or "below" in question for question in asked)


def test_the_biggest_is_asked_for_only_where_one_is_much_bigger() -> None:
    assert "The red circle is the biggest." in answers("size", scene(CIRCLE, SQUARE)).values()
    assert answers("size", scene(*STARS)) == {}


def test_whether_there_is_something_is_answered_by_what_is_there() -> None:
    asked = answers("exists", scene(CIRCLE, *STARS))
    assert "Yes, there is a circle." in asked.values()
    assert "Yes, there are two green stars." in asked.values()
    for answer in asked.values():
        if answer.startswith("Yes"):
            assert "circle" in answer or "star" in answer or "shape" in answer
        else:
            assert answer.startswith("No, there is no ")


def test_whether_something_has_a_colour_is_answered_with_the_one_it_has() -> None:
    asked = answers("check", scene(CIRCLE, *STARS))
    assert asked["is the circle red?"] == "Yes, the circle is red."
    assert asked["is the circle green?"] == "No, the circle is red."
    assert not any("star" in question for question in asked)


def test_no_shape_is_asked_for_by_the_colour_that_the_number_has_too() -> None:
    asked = answers("shape", scene(CIRCLE, SQUARE, number="4"))
    assert "A blue square." in asked.values()
    assert not any("red" in question for question in asked)


def test_the_answer_is_in_the_questions_language() -> None:
    def is_english(text: str) -> bool:
        return text.isascii()

    rng = random.Random(7)
    for _ in range(60):
        for turn in dialogue(rng).turns:
            assert is_english(turn.question) is is_english(turn.answer)


def test_the_users_pictures_have_answers_in_the_corpus_own_words() -> None:
    rng = random.Random(2)
    facts = ("off topic", "no picture", "blank", "unknown", "no number")
    words = {word for fact in facts for word in say("en", fact).split()} | {"second", "picture."}
    for _ in range(1_500):
        shown = draw_scene(rng)
        words |= set(description("en", shown).split())
        if shown.kind == "things" and (pair := ASKERS[rng.choice(list(ASKERS))](rng, "en", shown, False)):
            words |= set(pair[1].split())
    pictures = list(user_pictures())
    assert len({each.name for each in pictures}) == len(pictures) > 40
    letters = {word.rstrip(".,") for word in words}
    for each in pictures:
        if each.answer.isascii():
            assert {word.rstrip(".,") for word in each.answer.split() if not word[0].isdigit()} <= letters
