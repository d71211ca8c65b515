"""How people ask about pictures in three languages: forms, and what stands around them. Knows no picture, no answer.

One in eight combinations of a form with what stands before and after it is never used in training.
"""

import random
from collections.abc import Sequence
from typing import Final

from training.vision.scene import is_held

_BEFORE: Final = {
    "en": ("", "", "", "Please tell me: ", "Hi! ", "Look at the picture. ", "Question: ", "Hello, ", "Can you help? "),
    "ja": ("", "", "", "", "教えてください。", "こんにちは。", "画像を見てください。", "質問です。"),
    "zh": ("", "", "", "", "请告诉我：", "你好，", "请看图片。", "请问，", "看图回答："),
}  # fmt: skip
_AFTER: Final = {
    "en": ("", "", "", "", " Answer briefly.", " Thanks!", " Please.", " Just the answer."),
    "ja": ("", "", "", "", "短く答えてください。", "お願いします。", "答えだけで。"),
    "zh": ("", "", "", "", "请简短回答。", "谢谢！", "只说答案。"),
}

_Forms = dict[str, tuple[str, ...]]
FORMS: Final[dict[str, _Forms]] = {
    "digits": {
        "en": ("What number is this?", "Which number is in the picture?", "Read the number.", "What is the number?",
               "What number do you see?", "What number is written here?", "Which digits do you see?",
               "Can you read the number?", "What does the number say?", "What number does the picture show?"),
        "ja": ("この数字は何ですか？", "数字を読んでください。", "画像の数字は何ですか？", "何の数字が見えますか？",
               "何という数字が書かれていますか？", "数字は？"),
        "zh": ("这是什么数字？", "图片里的数字是什么？", "请读出数字。", "你看到什么数字？", "上面写的是什么数字？",
               "数字是多少？"),
    },
    "describe": {
        "en": ("What is in this picture?", "What is in the picture?", "Describe the picture.", "What do you see?",
               "What is this?", "What can you see in this image?", "What does this picture show?",
               "Describe this image.", "What's in this image?", "Tell me what is in the picture.",
               "What is shown here?", "Which shapes do you see?", "What do you see in the picture?", "What is that?",
               "What shapes are there?", "Please describe what you see.", "What's this?", "Explain this image."),
        "ja": ("この画像には何がありますか？", "画像に何がありますか？", "画像を説明してください。", "何が見えますか？",
               "これは何ですか？", "この画像は何ですか？", "何が写っていますか？", "どんな図形がありますか？",
               "何が描かれていますか？", "この画像について教えてください。"),
        "zh": ("这张图片里有什么？", "图片里有什么？", "描述这张图片。", "你看到了什么？", "这是什么？", "图里有什么？",
               "这张图显示了什么？", "有哪些图形？", "请描述图片。", "图上画的是什么？"),
    },
    "what shape": {
        "en": ("What shape is this?", "Which shape is this?", "What shape do you see?", "What shape is it?",
               "Name the shape.", "Which shape is in the picture?"),
        "ja": ("これは何の形ですか？", "この図形は何ですか？", "どんな形ですか？", "図形の名前は？"),
        "zh": ("这是什么形状？", "这个图形是什么？", "是什么图形？", "什么形状？"),
    },
    "colour": {
        "en": ("What colour is the {what}?", "What color is the {what}?", "Which colour does the {what} have?",
               "Which color is the {what}?", "What is the colour of the {what}?", "What is the {what}'s color?",
               "Tell me the colour of the {what}."),
        "ja": ("{what}は何色ですか？", "{what}の色は何ですか？", "{what}の色は？", "{what}の色を教えてください。"),
        "zh": ("{what}是什么颜色？", "{what}的颜色是什么？", "{what}是什么颜色的？", "说出{what}的颜色。"),
    },
    "what colour": {
        "en": ("What colour is this?", "What color is it?", "Which colour is it?", "What color is this?",
               "What colour do you see?"),
        "ja": ("何色ですか？", "これは何色ですか？", "色は？"),
        "zh": ("这是什么颜色？", "是什么颜色的？", "什么颜色？"),
    },
    "check": {
        "en": ("Is the {what} {colour}?", "Is the {what} in the picture {colour}?",
               "Is the colour of the {what} {colour}?",
               "Do you see that the {what} is {colour}?", "Does the {what} look {colour}?"),
        "ja": ("{what}は{colour}ですか？", "{what}の色は{colour}ですか？", "画像の{what}は{colour}ですか？"),
        "zh": ("{what}是{colour}的吗？", "{what}的颜色是{colour}吗？", "图片里的{what}是{colour}吗？"),
    },
    "shape": {
        "en": ("Which shape is {colour}?", "What is {colour}?", "What shape is {colour}?", "Which shapes are {colour}?",
               "What {colour} shape is there?", "Which thing is {colour}?", "Which one is {colour}?"),
        "ja": ("{what}は何ですか？", "{colour}の図形は何ですか？", "{colour}のものは何ですか？",
               "どの図形が{colour}ですか？"),
        "zh": ("哪个图形是{colour}的？", "{colour}的是什么？", "什么是{colour}的？", "{colour}的图形是什么？"),
    },
    "count": {
        "en": ("How many {whats} are there?", "How many {whats} do you see?", "Count the {whats}.",
               "How many {whats} are in the picture?", "How many {whats}?", "What is the number of {whats}?",
               "Can you count the {whats}?"),
        "ja": ("{what}はいくつありますか？", "{what}は何個ありますか？", "{what}の数は？", "{what}を数えてください。"),
        "zh": ("有几个{what}？", "有多少个{what}？", "数一数{what}。", "图片里有几个{what}？", "{what}有几个？"),
    },
    "exists": {
        "en": ("Is there {a_what}?", "Is there {a_what} in the picture?", "Do you see {a_what}?",
               "Does the picture show {a_what}?", "Can you see {a_what}?", "Are there any {whats}?"),
        "ja": ("{what}はありますか？", "画像に{what}はありますか？", "{what}が見えますか？", "{what}がありますか？"),
        "zh": ("有{what}吗？", "图片里有{what}吗？", "你看到{what}了吗？", "有没有{what}？"),
    },
    "exists number": {
        "en": ("Is there a number?", "Is there a number in the picture?", "Do you see a number?",
               "Are there any digits?", "Is a number written there?"),
        "ja": ("数字はありますか？", "画像に数字はありますか？", "数字が見えますか？"),
        "zh": ("有数字吗？", "图片里有数字吗？", "你看到数字了吗？"),
    },
    "position": {
        "en": ("Where is the {what}?", "Where in the picture is the {what}?", "Where do you see the {what}?",
               "At which place is the {what}?", "What is the position of the {what}?"),
        "ja": ("{what}はどこにありますか？", "{what}はどこですか？", "{what}の位置は？"),
        "zh": ("{what}在哪里？", "{what}在哪儿？", "{what}在什么位置？", "{what}在图片的哪里？"),
    },
    "relation": {
        "en": ("What is {side} the {what}?", "Which shape is {side} the {what}?", "What do you see {side} the {what}?",
               "What lies {side} the {what}?"),
        "ja": ("{what}の{side}には何がありますか？", "{what}の{side}に何がありますか？", "{what}の{side}は何ですか？"),
        "zh": ("{what}的{side}是什么？", "{what}{side}有什么？", "{what}的{side}有什么？"),
    },
    "compare": {
        "en": ("Is the {what} {side} the {other}?", "Does the {what} lie {side} the {other}?",
               "Do you see the {what} {side} the {other}?"),
        "ja": ("{what}は{other}の{side}にありますか？", "{what}は{other}の{side}ですか？"),
        "zh": ("{what}在{other}的{side}吗？", "{what}是在{other}{side}吗？"),
    },
    "biggest": {
        "en": ("Which shape is the biggest?", "What is the biggest shape?", "Which shape is the largest?",
               "Which one is bigger?", "What is the largest thing?"),
        "ja": ("一番大きい図形は何ですか？", "一番大きいのは何ですか？", "どの図形が一番大きいですか？"),
        "zh": ("最大的图形是什么？", "哪个图形最大？", "哪个最大？"),
    },
    "smallest": {
        "en": ("Which shape is the smallest?", "What is the smallest shape?", "Which one is smaller?",
               "What is the smallest thing?"),
        "ja": ("一番小さい図形は何ですか？", "一番小さいのは何ですか？", "どの図形が一番小さいですか？"),
        "zh": ("最小的图形是什么？", "哪个图形最小？", "哪个最小？"),
    },
    "background": {
        "en": ("What colour is the background?", "What color is the background?", "Which colour is the background?",
               "What is the background colour?", "What is the background color?"),
        "ja": ("背景は何色ですか？", "背景の色は？", "背景の色は何ですか？"),
        "zh": ("背景是什么颜色？", "背景的颜色是什么？", "背景是什么颜色的？"),
    },
    "nth": {
        "en": ("What is in the {ordinal} picture?", "What does the {ordinal} picture show?",
               "What is in the {ordinal} image?", "Describe the {ordinal} picture.", "And the {ordinal} one?",
               "What do you see in the {ordinal} picture?"),
        "ja": ("{ordinal}の画像には何がありますか？", "{ordinal}の画像は何ですか？", "{ordinal}には何がありますか？",
               "{ordinal}の画像を説明してください。"),
        "zh": ("{ordinal}图片里有什么？", "{ordinal}图里有什么？", "{ordinal}是什么？", "描述{ordinal}图片。"),
    },
    "which": {
        "en": ("Which picture shows {a_what}?", "In which picture is {a_what}?", "Which image has {a_what}?",
               "Which picture has {a_what}?", "Where is {a_what}: in which picture?"),
        "ja": ("どの画像に{what}がありますか？", "{what}があるのはどの画像ですか？",
               "{what}は何枚目の画像にありますか？"),
        "zh": ("哪张图片里有{what}？", "{what}在哪张图片里？", "哪张图有{what}？"),
    },
    "how many pictures": {
        "en": ("How many pictures are there?", "How many pictures did I send?", "How many images do you see?",
               "How many images are there?"),
        "ja": ("画像は何枚ありますか？", "画像を何枚送りましたか？", "何枚の画像がありますか？"),
        "zh": ("有几张图片？", "我发了几张图片？", "有多少张图片？"),
    },
}  # fmt: skip
NUMBER_WORD: Final = {"en": "number", "ja": "数字", "zh": "数字"}


def framed(rng: random.Random, language: str, forms: Sequence[str], held_out: bool) -> str:
    """Return one of the forms with what people put around it, of one side of the split where there is one."""
    text = ""
    for _ in range(200):
        before = rng.choice(_BEFORE[language]) if rng.random() < 0.5 else ""
        after = rng.choice(_AFTER[language]) if rng.random() < 0.5 else ""
        text = f"{before}{rng.choice(forms)}{after}"
        if is_held(f"wording {text}") is held_out:
            break
    return text


def ask(rng: random.Random, language: str, skill: str, held_out: bool, **parts: str) -> str:
    """Return a question of a skill. Of the held-out ones, half are worded as in training, so that facts count too."""
    text = framed(rng, language, FORMS[skill][language], held_out and rng.random() < 0.5).format(**parts)
    return typed(rng, language, text)


def typed(rng: random.Random, language: str, text: str) -> str:
    """Return a question as people type it: at times without capitals or the last mark."""
    kind = rng.random()
    if kind < 0.1 and text[-1] in ".?!？。！":
        text = text[:-1]
    if language == "en" and 0.05 < kind < 0.16:
        text = text[0].lower() + text[1:]
    if language != "en" and kind > 0.95:
        text = text.replace("？", "?")
    return text
