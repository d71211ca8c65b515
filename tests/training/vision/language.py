"""Names and sentences in English, Japanese and Chinese: what the answers are made of.

One fact has one sentence in a language, so that an answer can be judged letter by letter. Knows nothing of pictures.
"""

import random
from typing import Final

LANGUAGES: Final = ("en", "ja", "zh")

_SHAPES: Final[dict[str, dict[str, str]]] = {
    "ja": {"circle": "円", "oval": "楕円", "square": "正方形", "rectangle": "長方形", "triangle": "三角形",
           "diamond": "ひし形", "star": "星", "heart": "ハート", "cross": "十字"},
    "zh": {"circle": "圆形", "oval": "椭圆形", "square": "正方形", "rectangle": "长方形", "triangle": "三角形",
           "diamond": "菱形", "star": "星形", "heart": "心形", "cross": "十字形"},
}  # fmt: skip
_COLOURS: Final = {  # as it stands before a noun | as it stands alone
    "ja": {"red": "赤い|赤", "orange": "オレンジ色の|オレンジ色", "yellow": "黄色い|黄色", "green": "緑の|緑",
           "blue": "青い|青", "purple": "紫の|紫", "pink": "ピンクの|ピンク", "brown": "茶色い|茶色",
           "black": "黒い|黒", "white": "白い|白", "grey": "灰色の|灰色"},
    "zh": {"red": "红色", "orange": "橙色", "yellow": "黄色", "green": "绿色", "blue": "蓝色", "purple": "紫色",
           "pink": "粉色", "brown": "棕色", "black": "黑色", "white": "白色", "grey": "灰色"},
}  # fmt: skip
# What people also say, understood but never answered; before a noun.
_OTHER_SHAPES: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "en": {"oval": ("ellipse",), "diamond": ("rhombus",), "cross": ("plus", "plus sign"), "": ("form", "figure"),
           "circle": ("disc", "dot"), "heart": ("heart shape",), "star": ("star shape",)},
    "ja": {"circle": ("丸", "まる", "円形"), "oval": ("楕円形", "だ円"), "star": ("星形", "スター"),
           "diamond": ("ダイヤ", "菱形"), "heart": ("ハート形", "ハートマーク"), "triangle": ("三角",),
           "cross": ("十字架", "プラス", "十字形"), "": ("形",), "rectangle": ("長四角",)},
    "zh": {"circle": ("圆", "圆圈"), "oval": ("椭圆",), "star": ("星星", "五角星"), "heart": ("爱心", "心"),
           "cross": ("十字", "加号"), "": ("形状",), "rectangle": ("矩形",)},
}  # fmt: skip
_OTHER_COLOURS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "en": {"grey": ("gray",), "purple": ("violet",)},
    "ja": {"orange": ("オレンジの", "橙色の"), "yellow": ("黄色の",), "green": ("緑色の",), "blue": ("青色の",),
           "purple": ("紫色の",), "pink": ("ピンク色の",), "brown": ("茶色の",), "grey": ("グレーの",),
           "red": ("赤色の", "赤の"), "black": ("黒の", "黒色の"), "white": ("白の", "白色の")},
    "zh": {"orange": ("橘色",), "pink": ("粉红色",), "grey": ("灰",), "brown": ("褐色",), "red": ("红",),
           "blue": ("蓝",), "green": ("绿",), "yellow": ("黄",), "black": ("黑",), "white": ("白",)},
}  # fmt: skip
_COUNTS: Final = {
    "en": ("no", "one", "two", "three", "four", "five"),
    "ja": ("0", "1つ", "2つ", "3つ", "4つ", "5つ"),
    "zh": ("没有", "一个", "两个", "三个", "四个", "五个"),
}
_PLACES: Final = {  # rows from the top, columns from the left
    "en": ("at the top left", "at the top", "at the top right", "on the left", "in the centre", "on the right",
           "at the bottom left", "at the bottom", "at the bottom right"),
    "ja": ("左上", "上", "右上", "左", "中央", "右", "左下", "下", "右下"),
    "zh": ("左上角", "上方", "右上角", "左边", "中间", "右边", "左下角", "下方", "右下角"),
}  # fmt: skip
SIDES: Final = ("left", "right", "above", "below")
_SIDES: Final = {
    "en": {"left": "to the left of", "right": "to the right of", "above": "above", "below": "below"},
    "ja": {"left": "左", "right": "右", "above": "上", "below": "下"},
    "zh": {"left": "左边", "right": "右边", "above": "上面", "below": "下面"},
}
_ORDINALS: Final = {
    "en": ("first", "second", "third"),
    "ja": ("1枚目", "2枚目", "3枚目"),
    "zh": ("第一张", "第二张", "第三张"),
}

_SENTENCES: Final = {
    "number": ("The number is {number}.", "数字は{number}です。", "数字是{number}。"),
    "no number": ("There is no number in this picture.", "この画像に数字はありません。", "这张图片里没有数字。"),
    "none": ("There is no {what} in this picture.", "この画像に{what}はありません。", "这张图片里没有{what}。"),
    "count": ("There {are} {count} {whats}.", "{what}は{count}あります。", "有{count}{what}。"),
    "more": ("There are more than five {whats}.", "{what}は5つより多くあります。", "有超过五个{what}。"),
    "yes": ("Yes, there {are} {count} {whats}.", "はい、{what}が{count}あります。", "是的，有{count}{what}。"),
    "no": ("No, there is no {what}.", "いいえ、{what}はありません。", "不，没有{what}。"),
    "yes number": ("Yes, the number is {number}.", "はい、数字は{number}です。", "是的，数字是{number}。"),
    "colour": ("The {whats} {be} {colours}.", "{what}は{colours}です。", "{what}是{colours}的。"),
    "colour of number": ("The number is {colours}.", "数字は{colours}です。", "数字是{colours}的。"),
    "yes colour": (
        "Yes, the {what} is {colours}.", "はい、{what}は{colours}です。", "是的，{what}是{colours}的。",
    ),
    "no colour": (
        "No, the {what} is {colours}.", "いいえ、{what}は{colours}です。", "不，{what}是{colours}的。",
    ),
    "place": ("The {what} is {place}.", "{what}は{place}にあります。", "{what}在{place}。"),
    "place of number": ("The number is {place}.", "数字は{place}にあります。", "数字在{place}。"),
    "nothing on that side": (
        "There is nothing {side} the {what}.", "{what}の{side}には何もありません。", "{what}的{side}什么都没有。",
    ),
    "yes, on that side": (
        "Yes, the {what} is {side} the {other}.", "はい、{what}は{other}の{side}にあります。",
        "是的，{what}在{other}的{side}。",
    ),
    "no, not on that side": (
        "No, the {what} is {side} the {other}.", "いいえ、{what}は{other}の{side}にあります。",
        "不，{what}在{other}的{side}。",
    ),
    "biggest": ("The {what} is the biggest.", "一番大きいのは{what}です。", "最大的是{what}。"),
    "smallest": ("The {what} is the smallest.", "一番小さいのは{what}です。", "最小的是{what}。"),
    "background": ("The background is {colours}.", "背景は{colours}です。", "背景是{colours}的。"),
    "which": ("The {ordinal} picture.", "{ordinal}の画像です。", "{ordinal}图片。"),
    "which none": ("None of the pictures.", "どの画像でもありません。", "没有一张图片。"),
    "pictures": ("You sent {count} pictures.", "画像は{count}枚あります。", "有{count}张图片。"),
    "one picture": ("You sent one picture.", "画像は1枚あります。", "有一张图片。"),
    "too long": (
        "The number is too long for me. I read up to four digits.", "数字が長すぎます。4桁まで読めます。",
        "数字太长了。我最多读四位数字。",
    ),
    "blank": ("The picture is empty.", "画像には何もありません。", "图片是空白的。"),
    "unknown": (
        "I cannot tell what this is. I only know simple shapes and numbers.",
        "これが何かわかりません。簡単な図形と数字だけがわかります。",
        "我看不出这是什么。我只认识简单的图形和数字。",
    ),
    "no picture": (
        "I see no picture. Please send me one with simple shapes or a number.",
        "画像がありません。簡単な図形か数字の画像を送ってください。",
        "我没有看到图片。请发一张有简单图形或数字的图片。",
    ),
    "off topic": (
        "Sorry, I cannot help with that. I am a small demonstration model: send me a picture with simple shapes or a "
        "number and ask what is in it.",
        "すみません、それはできません。私は小さなデモ用モデルです。簡単な図形か数字の画像を送って、何があるか聞いてください。",
        "抱歉，这个我做不到。我是一个小型演示模型：请发一张有简单图形或数字的图片，问我里面有什么。",
    ),
    "too far": (
        "Sorry, I cannot tell that from the picture. Ask me about its shapes, colours, places or number.",
        "すみません、画像からはわかりません。図形、色、位置、数字について聞いてください。",
        "抱歉，我从图片里看不出来。请问我图形、颜色、位置或数字。",
    ),
    "hello": (
        "Hello! Send me a picture with simple shapes or a number and ask what is in it.",
        "こんにちは！簡単な図形か数字の画像を送って、何があるか聞いてください。",
        "你好！请发一张有简单图形或数字的图片，问我里面有什么。",
    ),
    "who": (
        "I am mlx-demo-vision, a small demonstration model that sees simple shapes and numbers.",
        "私はmlx-demo-vision、簡単な図形と数字が見える小さなデモ用モデルです。",
        "我是mlx-demo-vision，一个能看简单图形和数字的小型演示模型。",
    ),
    "what": (
        "I can name shapes and colours in a picture, count them, say where they are, and read a number of up to four "
        "digits. Try: What is in this picture?",
        "画像の図形と色の名前、数、位置を答え、4桁までの数字を読めます。例：この画像には何がありますか？",
        "我能说出图片里图形的名称、颜色、数量和位置，还能读最多四位的数字。试试：这张图片里有什么？",
    ),
    "welcome": ("You are welcome!", "どういたしまして！", "不客气！"),
    "bye": ("Goodbye!", "さようなら！", "再见！"),
}  # fmt: skip


def say(language: str, fact: str, **parts: str) -> str:
    """Return the sentence for a fact."""
    return _SENTENCES[fact][LANGUAGES.index(language)].format(**parts)


def colour_word(language: str, colour: str) -> str:
    """Return a colour's name where it stands alone."""
    return colour if language == "en" else _COLOURS[language][colour].rpartition("|")[2]


def listed(language: str, parts: list[str]) -> str:
    """Return parts in one phrase: a, b and c."""
    if language == "ja":
        return "と".join(parts)
    comma, last = (", ", " and ") if language == "en" else ("、", "和")
    return comma.join(parts[:-1]) + last + parts[-1] if len(parts) > 1 else parts[0]


def plural(noun: str) -> str:
    """Return an English noun's plural."""
    return noun + ("es" if noun.endswith("s") else "s")


def what(language: str, shape: str = "", colour: str = "") -> str:
    """Return the name of a shape, or of any shape, with its colour before it."""
    if language == "en":
        return f"{colour} {shape or 'shape'}".strip()
    noun = _SHAPES[language][shape] if shape else {"ja": "図形", "zh": "图形"}[language]
    return _coloured(language, noun, _COLOURS[language][colour].partition("|")[0]) if colour else noun


def _coloured(language: str, noun: str, word: str) -> str:
    if language == "en":
        return f"{word} {noun}"
    return f"{word}{noun}" if language == "ja" else f"{word}的{noun}"


def asked(rng: random.Random, language: str, shape: str = "", colour: str = "") -> str:
    """Return the name of a shape as a question may have it: at times by another of its names."""
    if rng.random() < 0.75:
        return what(language, shape, colour)
    noun = rng.choice(_OTHER_SHAPES[language].get(shape, (what(language, shape),)))
    if not colour:
        return noun
    own = colour if language == "en" else _COLOURS[language][colour].partition("|")[0]
    return _coloured(language, noun, rng.choice(_OTHER_COLOURS[language].get(colour, (own,))))


def count_word(language: str, count: int) -> str:
    """Return how a count stands with a noun."""
    return _COUNTS[language][count]


def some(language: str, count: int, shape: str, colour: str = "") -> str:
    """Return a number of shapes: "a red circle", "two red circles"; in Japanese with its particle."""
    noun = what(language, shape, colour)
    if language == "ja":
        return f"{noun}が{count_word(language, count)}"
    if language == "zh":
        return f"{count_word(language, count)}{noun}"
    if count == 1:
        return article(noun)
    return f"{count_word(language, count)} {plural(noun)}"


def inventory(language: str, groups: list[tuple[str, str, int]], number: str) -> str:
    """Return the sentence that names what is there: groups of (shape, colour, count), and a number or none."""
    parts = [some(language, count, shape, colour) for shape, colour, count in groups]
    if language == "ja":
        return "、".join([*parts, *([f"数字の{number}が"] if number else [])]) + "あります。"
    if number:
        parts.append({"en": f"the number {number}", "zh": f"数字{number}"}[language])
    text = listed(language, parts)
    return text[0].upper() + text[1:] + ("." if language == "en" else "。")


def article(noun: str) -> str:
    """Return an English noun with its indefinite article."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def place_word(language: str, cell: int) -> str:
    """Return a place's name by its cell of three rows and three columns."""
    return _PLACES[language][cell]


def side_word(language: str, side: str) -> str:
    """Return one of `SIDES` as a sentence has it."""
    return _SIDES[language][side]


_OTHER_SIDES: Final = {
    "en": {"left": ("left of", "on the left of"), "right": ("right of", "on the right of"), "above": ("over",),
           "below": ("under", "beneath")},
    "ja": {"left": ("左側", "左隣"), "right": ("右側", "右隣"), "above": ("上側",), "below": ("下側",)},
    "zh": {"left": ("左侧", "左面"), "right": ("右侧", "右面"), "above": ("上方", "上边"), "below": ("下方", "下边",
           "下面")},
}  # fmt: skip


def asked_side(rng: random.Random, language: str, side: str) -> str:
    """Return one of `SIDES` as a question may have it."""
    return side_word(language, side) if rng.random() < 0.6 else rng.choice(_OTHER_SIDES[language][side])


def ordinal(language: str, index: int) -> str:
    """Return "first" for 0, and so on."""
    return _ORDINALS[language][index]


def picture_count(language: str, count: int) -> str:
    """Return how a number of pictures is written in the answer to how many there are."""
    return {"en": ("two", "three"), "ja": ("2", "3"), "zh": ("两", "三")}[language][count - 2]
