"""Pictures as a user's own script draws them, with a question and the answer expected: a test of another origin.

Nothing here comes from what draws the training's pictures: plain Pillow calls, its built-in font, plain colour names.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from training.vision.draw import Pixels


@dataclass(frozen=True)
class UserPicture:
    """Pictures sent at once, a question about them, and the answer that is true."""

    name: str
    images: tuple[Pixels, ...]
    question: str
    answer: str


Draw = Callable[[Any], None]


def _picture(width: int, height: int, paper: str, draw: Draw | None = None) -> Pixels:
    image = Image.new("RGB", (width, height), paper)
    if draw:
        draw(ImageDraw.Draw(image))
    return np.array(image, dtype=np.uint8)


def _number(text: str, size: int, ink: str = "black", at: tuple[int, int] = (40, 40)) -> Draw:
    return lambda pen: pen.text(at, text, fill=ink, font=ImageFont.load_default(size))


def _star(x: float, y: float, radius: float) -> list[tuple[float, float]]:
    points = []
    for step in range(10):
        reach = radius if step % 2 == 0 else radius * 0.4
        angle = math.radians(step * 36 - 90)
        points.append((x + reach * math.cos(angle), y + reach * math.sin(angle)))
    return points


def _red_circle(pen: Any) -> None:
    pen.ellipse((78, 78, 178, 178), fill="red")


def _circle_and_square(pen: Any) -> None:
    pen.ellipse((30, 100, 130, 200), fill="red")
    pen.rectangle((220, 100, 320, 200), fill="blue")


def _three(pen: Any) -> None:
    pen.ellipse((20, 20, 90, 90), fill="green")
    pen.ellipse((160, 30, 230, 100), fill="green")
    pen.polygon([(120, 150), (70, 235), (170, 235)], fill="orange")


def _circle_above_star(pen: Any) -> None:
    pen.ellipse((90, 20, 170, 100), fill="yellow", outline="black", width=2)
    pen.polygon(_star(130, 200, 50), fill="purple")


def _outlined(pen: Any) -> None:
    pen.rectangle((60, 50, 160, 150), outline="blue", width=6)


def _heart(pen: Any) -> None:
    pen.ellipse((60, 60, 130, 130), fill="red")
    pen.ellipse((120, 60, 190, 130), fill="red")
    pen.polygon([(66, 112), (184, 112), (125, 195)], fill="red")


def _corner(pen: Any) -> None:
    pen.rectangle((10, 10, 70, 70), fill="black")


def _number_and_circle(pen: Any) -> None:
    pen.ellipse((30, 60, 110, 140), fill="blue")
    pen.text((150, 60), "47", fill="black", font=ImageFont.load_default(72))


def _cross(pen: Any) -> None:
    pen.rectangle((110, 40, 150, 220), fill="green")
    pen.rectangle((40, 110, 220, 150), fill="green")


def _big_and_small(pen: Any) -> None:
    pen.ellipse((20, 40, 180, 200), fill="brown")
    pen.rectangle((230, 100, 280, 150), fill="pink")


def _five_squares(pen: Any) -> None:
    for x in range(5):
        pen.rectangle((20 + x * 75, 40, 70 + x * 75, 90), fill="purple")


def _scene_of_all(pen: Any) -> None:
    pen.regular_polygon((80, 80, 50), 3, fill="red")
    pen.polygon([(220, 30), (260, 80), (220, 130), (180, 80)], fill="blue")
    pen.ellipse((40, 190, 150, 245), fill="green")
    pen.rectangle((180, 195, 280, 240), fill="orange")


_English = tuple[str, int, int, str, Draw | None, str, str]
_ONE: tuple[_English, ...] = (
    ("red circle", 256, 256, "white", _red_circle, "What is in this picture?", "A red circle."),
    ("red circle, ja", 256, 256, "white", _red_circle, "この画像には何がありますか？", "赤い円が1つあります。"),
    ("red circle, zh", 256, 256, "white", _red_circle, "这张图片里有什么？", "一个红色的圆形。"),
    ("red circle's colour", 256, 256, "white", _red_circle, "What color is the circle?", "The circle is red."),
    ("red circle's shape", 256, 256, "white", _red_circle, "What shape is this?", "A red circle."),
    ("red circle's place", 256, 256, "white", _red_circle, "Where is the circle?", "The circle is in the centre."),
    ("circle and square", 350, 300, "white", _circle_and_square, "What do you see?", "A red circle and a blue square."),
    ("which is blue", 350, 300, "white", _circle_and_square, "Which shape is blue?", "A blue square."),
    ("left of", 350, 300, "white", _circle_and_square, "What is to the left of the square?", "A red circle."),
    ("right of, zh", 350, 300, "white", _circle_and_square, "圆形的右边是什么？", "一个蓝色的正方形。"),
    ("no star", 350, 300, "white", _circle_and_square, "Is there a star?", "No, there is no star."),
    ("is left", 350, 300, "white", _circle_and_square, "Is the circle to the left of the square?",
     "Yes, the circle is to the left of the square."),
    ("two circles", 250, 250, "white", _three, "How many circles are there?", "There are two circles."),
    ("two circles, ja", 250, 250, "white", _three, "円はいくつありますか？", "円は2つあります。"),
    ("three shapes", 250, 250, "white", _three, "How many shapes are there?", "There are three shapes."),
    ("a triangle", 250, 250, "white", _three, "What colour is the triangle?", "The triangle is orange."),
    ("circle above star", 260, 280, "lightgray", _circle_above_star, "What is below the circle?", "A purple star."),
    ("circle above star, ja", 260, 280, "white", _circle_above_star, "星の上には何がありますか？",
    "黄色い円が1つあります。"),
    ("outlined square", 220, 200, "white", _outlined, "What is this?", "A blue square."),
    ("heart", 250, 250, "white", _heart, "What is in this picture?", "A red heart."),
    ("corner", 320, 240, "white", _corner, "Where is the square?", "The square is at the top left."),
    ("corner, zh", 320, 240, "white", _corner, "正方形在哪里？", "正方形在左上角。"),
    ("cross", 260, 260, "white", _cross, "What is in the picture?", "A green cross."),
    ("biggest", 300, 240, "white", _big_and_small, "Which shape is the biggest?", "The brown circle is the biggest."),
    ("five squares", 400, 130, "white", _five_squares, "How many squares are there?", "There are five squares."),
    ("four kinds", 320, 270, "white", _scene_of_all, "What is in this picture?",
     "A green oval, an orange rectangle, a red triangle and a blue diamond."),
    ("number 7", 200, 200, "white", _number("7", 120, at=(60, 20)), "What number is this?", "The number is 7."),
    ("number 42", 256, 192, "white", _number("42", 96), "What number is this?", "The number is 42."),
    ("number 472, white on black", 320, 160, "black", _number("472", 80, "white"), "Read the number.",
     "The number is 472."),
    ("number 2026", 400, 200, "white", _number("2026", 100, "blue"), "What number do you see?", "The number is 2026."),
    ("number 905, ja", 300, 200, "lightyellow", _number("905", 90, "darkgreen"), "この数字は何ですか？",
     "数字は905です。"),
    ("number 68, zh", 640, 480, "white", _number("68", 240, "red", (160, 80)), "这是什么数字？", "数字是68。"),
    ("number's colour", 640, 480, "white", _number("68", 240, "red", (160, 80)), "What colour is the number?",
     "The number is red."),
    ("number and circle", 260, 200, "white", _number_and_circle, "What is in this picture?",
     "A blue circle and the number 47."),
    ("number and circle, the number", 260, 200, "white", _number_and_circle, "What number is in the picture?",
     "The number is 47."),
    ("empty", 300, 200, "white", None, "What is in this picture?", "The picture is empty."),
    ("empty, ja", 300, 200, "white", None, "何が見えますか？", "画像には何もありません。"),
    ("background", 300, 300, "blue", _red_circle, "What colour is the background?", "The background is blue."),
    ("text", 300, 120, "white", _number("Hello, world", 40, at=(20, 30)), "What is this?",
     "I cannot tell what this is. I only know simple shapes and numbers."),
    ("no number", 256, 256, "white", _red_circle, "What number is this?", "There is no number in this picture."),
    ("capital", 256, 256, "white", _red_circle, "What is the capital of France?",
     "Sorry, I cannot help with that. I am a small demonstration model: send me a picture with simple shapes or a "
     "number and ask what is in it."),
)  # fmt: skip


def user_pictures() -> Iterator[UserPicture]:
    """Yield the pictures, always the same."""
    for name, width, height, paper, draw, question, answer in _ONE:
        yield UserPicture(name, (_picture(width, height, paper, draw),), question, answer)
    circle = _picture(256, 256, "white", _red_circle)
    number = _picture(256, 192, "white", _number("42", 96))
    both = (circle, number)
    yield UserPicture("second of two", both, "What is in the second picture?", "The number 42.")
    yield UserPicture("first of two, zh", both, "第一张图片里有什么？", "一个红色的圆形。")
    yield UserPicture(
        "which of two", (number, circle), "Which picture shows a circle?", "The second picture."
    )
    yield UserPicture("how many", both, "画像は何枚ありますか？", "画像は2枚あります。")
    yield UserPicture("none", (), "What can you see in this image?",
                      "I see no picture. Please send me one with simple shapes or a number.")  # fmt: skip
