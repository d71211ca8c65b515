"""Dialogues about pictures: turns of all skills, and the split into training and evaluation.

The same generator gives the same dialogue, once the same fonts are known (`glyphs.add_fonts`). What is held out (a
number, the shapes on a picture taken together, a wording) never stands in training. Knows nothing of tokens.
"""

import random
from dataclasses import dataclass
from typing import Final

from training.chat.words import sentence
from training.vision.draw import Pixels, render
from training.vision.language import LANGUAGES, article, asked, ordinal, picture_count, plural, say
from training.vision.off_topic import chat, off_topic, too_far
from training.vision.questions import ASKERS, Pair, description
from training.vision.scene import MAX_COUNT, SHAPES, Scene, draw_scene
from training.vision.wordings import ask

MAX_PICTURES: Final = 3


@dataclass(frozen=True)
class Turn:
    """A question, with the pictures sent before it, and its answer."""

    images: tuple[Pixels, ...]
    question: str
    answer: str
    skill: str


@dataclass(frozen=True)
class PictureDialogue:
    """Turns after a system prompt, or after none."""

    instructions: str
    turns: tuple[Turn, ...]


_ASIDES: Final = {"chat": chat, "off topic": off_topic, "too far": too_far}
SKILLS: Final = (*ASKERS, "blank", "unknown", "pictures", "no picture", *_ASIDES)

# What a picture should show for a skill to be asked about it.
_CONTENTS: Final = {
    "describe": ("one", "pair", "shapes", "shapes", "number", "mixed", "many"),
    "digits": (*("number",) * 6, "mixed", "mixed", "shapes", "long number"),
    "colour": ("one", "shapes", "number", "mixed"), "check": ("one", "pair", "shapes", "mixed"),
    "shape": ("one", "shapes", "shapes", "mixed"),
    "count": ("shapes", "shapes", "shapes", "one", "many", "mixed", "number"),
    "exists": ("one", "shapes", "shapes", "mixed", "number"), "position": ("one", "pair", "shapes", "mixed"),
    "relation": ("pair",), "compare": ("pair",), "size": ("pair", "pair", "pair", "shapes"),
    "background": ("one", "shapes", "number", "mixed"), "blank": ("blank",), "unknown": ("unknown",),
}  # fmt: skip
_WEIGHTS: Final = {
    "describe": 5, "digits": 3, "colour": 4, "check": 2, "shape": 3, "count": 4, "exists": 3, "position": 3,
    "relation": 3, "compare": 2, "size": 2, "background": 1,
}  # fmt: skip
_PAIR_WEIGHTS: Final = {
    "describe": 2, "digits": 0.5, "colour": 2, "check": 1.5, "shape": 1, "count": 1, "exists": 2,
    "position": 3, "relation": 5, "compare": 4, "size": 4, "background": 1,
}  # fmt: skip
_INSTRUCTIONS: Final = (
    "You are a helpful assistant.", "Answer the user's questions about pictures.", "Be concise.", "Answer shortly.",
    "You are a helpful AI assistant.", "You are mlx-demo-vision.", "Describe what you see.", "Be polite.",
    "Always answer in the user's language.", "You are a friendly assistant. Keep your answers short and clear.",
    "You are an expert in images.", "あなたは親切なアシスタントです。", "短く答えてください。",
    "画像の質問に答えてください。",
    "你是一个有用的助手。", "请简短回答。", "回答关于图片的问题。",
)  # fmt: skip


def _instructions(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.6:
        return ""
    lines = rng.sample(_INSTRUCTIONS, 1 if kind < 0.88 else 2)
    if kind > 0.95:
        lines.append(sentence(rng, 3, 12))
    return "\n".join(lines)


class _PictureTalk:
    """A dialogue while it is drawn: the pictures so far, those not yet sent, and the turns."""

    def __init__(self, rng: random.Random, held_out: bool) -> None:
        self.rng, self.held_out = rng, held_out
        self.language = rng.choice((*LANGUAGES, "en"))
        self.scenes: list[Scene] = []
        self.unsent: list[Pixels] = []
        self.turns: list[Turn] = []

    def show(self, content: str = "") -> None:
        """Add a picture to the next turn."""
        scene = draw_scene(self.rng, content, self.held_out)
        self.add(scene)

    def add(self, scene: Scene) -> None:
        """Draw a scene, for the next turn."""
        self.scenes.append(scene)
        self.unsent.append(render(scene, self.rng))

    def say(self, pair: Pair, skill: str) -> None:
        """Add a turn, with the pictures that were not yet sent."""
        self.turns.append(Turn(tuple(self.unsent), *pair, skill))
        self.unsent = []

    def aside(self, skill: str) -> None:
        """Add a turn of which no picture is asked anything that it could answer."""
        self.say(_ASIDES[skill](self.rng, self.language, self.held_out), skill)

    def no_picture(self) -> None:
        """Add a question about a picture that was never sent."""
        self.say((self._any_question(), say(self.language, "no picture")), "no picture")

    def _any_question(self) -> str:
        """Return a question that a picture could be asked."""
        while True:
            skill = self.rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
            scene = draw_scene(self.rng, self.rng.choice(_CONTENTS[skill]), self.held_out)
            pair = ASKERS[skill](self.rng, self.language, scene, self.held_out)
            if pair and scene.kind == "things":
                return pair[0]

    def about(self, scene: Scene, skill: str) -> Pair | None:
        """Return a question of a skill about a picture, or None where it cannot be asked beyond doubt."""
        if skill not in ("blank", "unknown"):
            return ASKERS[skill](self.rng, self.language, scene, self.held_out)
        return self._any_question(), description(self.language, scene)

    def ask(self) -> None:
        """Add a question about the newest picture, of a skill that fits it."""
        scene = self.scenes[-1]
        is_pair = 2 <= len(scene.shapes) <= 3 and not scene.number
        weights = _PAIR_WEIGHTS if is_pair else _WEIGHTS
        chosen = "blank" if scene.kind == "blank" else "unknown"
        while True:  # ends, since any picture can be described
            if scene.kind == "things":
                chosen = self.rng.choices(list(weights), list(weights.values()))[0]
            if pair := self.about(scene, chosen):
                self.say(pair, chosen)
                return

    def pictures(self) -> None:
        """Add a question about all the pictures so far: what is on one of them, which has something, how many."""
        rng, language, scenes = self.rng, self.language, self.scenes
        kind = rng.random()
        if kind < 0.5:
            place = rng.randrange(len(scenes))
            question = ask(rng, language, "nth", self.held_out, ordinal=ordinal(language, place))
            self.say((question, description(language, scenes[place])), "pictures")
        elif kind < 0.65:
            question = ask(rng, language, "how many pictures", self.held_out)
            count = len(scenes)
            answer = (
                say(language, "pictures", count=picture_count(language, count))
                if count > 1
                else say(language, "one picture")
            )
            self.say((question, answer), "pictures")
        else:
            self._which()

    def _which(self) -> None:
        rng, language = self.rng, self.language
        if any(
            len(scene.shapes) > MAX_COUNT or scene.kind not in ("things", "blank") for scene in self.scenes
        ):
            return
        there = [shape for scene in self.scenes for shape in scene.shapes]
        name, colour = rng.choice(SHAPES), ""
        if there and rng.random() < 0.85:
            name = rng.choice(there).name
        if there and rng.random() < 0.4:
            colour = rng.choice([shape.colour for shape in there])
        showing = [
            place
            for place, scene in enumerate(self.scenes)
            if any(shape.name == name and colour in ("", shape.colour) for shape in scene.shapes)
        ]
        if len(showing) > 1:
            return
        noun = asked(rng, language, name, colour)
        question = ask(
            rng, language, "which", self.held_out, what=noun, a_what=article(noun),
            whats=plural(noun) if language == "en" else noun,
        )  # fmt: skip
        if showing:
            answer = say(language, "which", ordinal=ordinal(language, showing[0]))
        else:
            answer = say(language, "which none")
        self.say((question, answer), "pictures")


def _of_skill(talk: _PictureTalk, skill: str) -> None:
    """Make a dialogue whose only turn is of a skill."""
    rng = talk.rng
    if skill in _ASIDES:
        if skill == "too far" or rng.random() < 0.3:
            talk.show()
        talk.aside(skill)
    elif skill == "no picture":
        talk.no_picture()
    elif skill == "pictures":
        while not talk.turns:
            talk.scenes, talk.unsent = [], []
            for _ in range(rng.choice((2, 2, 3))):
                talk.show()
            talk.pictures()
    else:
        while True:  # the scene alone is drawn until the question can be asked
            scene = draw_scene(rng, rng.choice(_CONTENTS[skill]), talk.held_out)
            if pair := talk.about(scene, skill):
                break
        talk.add(scene)
        talk.say(pair, skill)


def _freely(talk: _PictureTalk) -> None:
    """Make a dialogue as they go: several questions about a picture, then perhaps another picture, or two at once."""
    rng = talk.rng
    kind = rng.random()
    if kind < 0.06:
        for _ in range(rng.randint(1, 2)):
            if rng.random() < 0.4:
                talk.no_picture()
            else:
                talk.aside(rng.choice(("chat", "off topic")))
        if rng.random() < 0.5:
            return
    if 0.06 < kind < 0.2:
        for _ in range(rng.choice((2, 2, 3))):
            talk.show()
        for _ in range(rng.randint(2, 4)):
            talk.pictures()
        return
    for place in range(1 if kind < 0.85 else 2):
        talk.show()
        for _ in range(rng.choice((1, 2, 3, 4, 4, 5)) if place == 0 else rng.choice((1, 2, 3))):
            if rng.random() < 0.05:
                talk.aside(rng.choice(("chat", "off topic", "too far")))
            elif len(talk.scenes) > 1 and not talk.unsent and rng.random() < 0.3:
                talk.pictures()
            else:
                talk.ask()


def dialogue(rng: random.Random, *, held_out: bool = False, skill: str | None = None) -> PictureDialogue:
    """Return a dialogue for training, or with what training never shows; of one turn if a skill is given."""
    while True:
        talk = _PictureTalk(rng, held_out)
        if skill:
            _of_skill(talk, skill)
        else:
            _freely(talk)
        if talk.turns:
            return PictureDialogue(_instructions(rng), tuple(talk.turns))
