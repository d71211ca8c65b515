"""The shipped model that sees: mlx-vlm and our engine load it, and it does what its README says.

Few dialogues of each skill, to notice a model that is broken; how good it is, `evaluate.py` says.
"""

import json
import random
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("mlx_vlm")

from PIL import Image, ImageDraw, ImageFont
from seeing import Seeing
from tokenizers import Tokenizer
from training.vision.corpus import SKILLS
from training.vision.process import SeeingProcess
from training.vision.shape import TEXT, VISION, config
from training.vision.tokens import ID
from training.vision.user_pictures import UserPicture, user_pictures
from vision_models import SeeingModel

from mlx_backend.demo import VISION_MODEL_PATH as MODEL_PATH
from mlx_backend.images import Picture


@pytest.fixture(scope="module")
def model() -> Iterator[SeeingProcess]:
    process = SeeingProcess()
    yield process
    process.close()


def ask(model: SeeingProcess, question: str, *pictures: np.ndarray) -> str:
    content = [*({"type": "image"} for _ in pictures), {"type": "text", "text": question}]
    return model.answer([{"role": "user", "content": content}], pictures)


def number(text: str, size: int = 90) -> np.ndarray:
    image = Image.new("RGB", (320, 240), "white")
    ImageDraw.Draw(image).text((60, 70), text, fill="black", font=ImageFont.load_default(size))
    return np.asarray(image)


def circle(colour: str, *, side: int = 256, parts: int = 2) -> np.ndarray:
    """A circle in the middle, as wide as one of `parts` equal parts of the picture."""
    image = Image.new("RGB", (side, side), "white")
    start, end = side // 2 - side // parts // 2, side // 2 + side // parts // 2
    ImageDraw.Draw(image).ellipse((start, start, end, end), fill=colour)
    return np.asarray(image)


def circles(count: int) -> np.ndarray:
    image = Image.new("RGB", (320, 240), "white")
    for at in range(count):
        x, y = 10 + at % 4 * 75, 10 + at // 4 * 75
        ImageDraw.Draw(image).ellipse((x, y, x + 50, y + 50), fill="green")
    return np.asarray(image)


def hexagon() -> np.ndarray:
    image = Image.new("RGB", (256, 256), "white")
    ImageDraw.Draw(image).regular_polygon((128, 128, 70), 6, fill="blue")
    return np.asarray(image)


def overlap() -> np.ndarray:
    image = Image.new("RGB", (300, 300), "white")
    ImageDraw.Draw(image).ellipse((40, 40, 200, 200), fill="red")
    ImageDraw.Draw(image).rectangle((130, 130, 270, 270), fill="blue")
    return np.asarray(image)


def test_it_is_small_and_of_the_sizes_it_says() -> None:
    assert (MODEL_PATH / "model.safetensors").stat().st_size < 9_600_000
    saved = json.loads((MODEL_PATH / "config.json").read_text(encoding="utf-8"))
    assert saved == json.loads(json.dumps(config()))
    assert (saved["vision_config"], saved["text_config"]) == (VISION, TEXT)


@pytest.mark.parametrize("skill", SKILLS)
def test_held_out_questions_of_every_skill_are_answered(model: SeeingProcess, skill: str) -> None:
    figures = model.play(seed=11, count=4, skill=skill)
    assert figures.share() >= 0.75, figures.mistakes


def test_held_out_dialogues_of_several_turns_and_pictures_are_answered(model: SeeingProcess) -> None:
    figures = model.play(seed=11, count=5)
    assert figures.share() >= 0.9, figures.mistakes


@pytest.mark.parametrize("shown", list(user_pictures()), ids=lambda shown: shown.name)
def test_pictures_that_others_draw_are_answered(model: SeeingProcess, shown: UserPicture) -> None:
    assert ask(model, shown.question, *shown.images) == shown.answer


@pytest.mark.parametrize("text", ["7", "42", "305", "9168"])
def test_it_reads_a_number(model: SeeingProcess, text: str) -> None:
    assert ask(model, "What number is this?", number(text)) == f"The number is {text}."


def test_it_names_a_shape_and_its_colour_in_the_language_of_the_question(model: SeeingProcess) -> None:
    assert "red circle" in ask(model, "What is in this picture?", circle("red"))
    assert "青" in ask(model, "円は何色ですか？", circle("blue"))
    assert "绿" in ask(model, "这是什么颜色？", circle("green"))


@pytest.mark.parametrize("side", [48, 160, 1500])
def test_the_size_of_a_picture_does_not_matter(model: SeeingProcess, side: int) -> None:
    assert "blue" in ask(model, "What colour is the circle?", circle("blue", side=side))


def test_what_it_cannot_tell_it_says(model: SeeingProcess) -> None:
    rng = np.random.default_rng(random.Random(1).randrange(100))
    noise = rng.integers(0, 256, (240, 320, 3), np.uint8)
    assert "cannot tell" in ask(model, "What is in this picture?", noise)
    assert "empty" in ask(model, "What is in this picture?", np.full((200, 300, 3), 255, np.uint8))


(_APART,) = [each for each in user_pictures() if each.name == "circle and square"]


@pytest.mark.parametrize(
    ("pictures", "question", "right"),
    [
        ([number("3.14")], "What number is this?", "The number is 3.14."),
        ([circles(6)], "How many circles are there?", "There are more than five circles."),
        ([hexagon()], "What is in this picture?", "A blue hexagon."),
        ([overlap()], "What is in this picture?", "A red circle and a blue square."),
        ([circle("red", side=1500, parts=50)], "What is in this picture?", "A red circle."),
        ([circle("red"), number("47")], "Which picture shows a number?", "The second picture."),
        ([circle("red"), number("47")], "Describe the pictures.", "A red circle and the number 47."),
        ([*_APART.images], "方块是什么颜色？", "正方形是蓝色的。"),
        ([circle("red")], "Was ist auf dem Bild?", "Ein roter Kreis."),
    ],
    ids=[
        "a point",
        "six",
        "a hexagon",
        "overlapping",
        "tiny",
        "which has a number",
        "describe both",
        "another name",
        "German",
    ],
)
def test_what_the_readme_says_it_gets_wrong_is_still_wrong(
    model: SeeingProcess, pictures: list[np.ndarray], question: str, right: str
) -> None:
    assert ask(model, question, *pictures) != right, "better than its README says: change it there, too"


def test_our_engine_answers_as_mlx_vlm_does(model: SeeingProcess) -> None:
    from mlx_backend.engine.mlx import load_engine

    tokenizer = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
    engine = load_engine(MODEL_PATH, cache_bytes=0)
    try:
        start, end, pad = (ID[f"<|{name}|>"] for name in ("vision_start", "vision_end", "image_pad"))
        seeing = Seeing(SeeingModel(MODEL_PATH, (start,), (end,), pad), engine)
        before, behind = (
            tokenizer.encode(text, add_special_tokens=False).ids
            for text in (
                "<|im_start|>user\n",
                "Which picture shows the number 58?<|im_end|>\n<|im_start|>assistant\n",
            )
        )
        pictures = [number("58"), circle("red")]
        shown = [Picture(each.shape[1], each.shape[0], each.tobytes()) for each in pictures]
        said = seeing.reply(seeing.request(before, *shown, behind, tokens=160))
    finally:
        engine.stop()
    answer = ask(model, "Which picture shows the number 58?", *pictures)
    assert tokenizer.decode(said) == answer
