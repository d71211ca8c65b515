"""Evaluate the model that sees on held-out dialogues: `python -m training.vision.evaluate`.

Every dialogue is played as a client would play it, through mlx-vlm: its processor, its network and the chat template,
greedily, each turn after the answers that the model itself gave. An answer is right if it is exactly the wanted one. A
draw is one seed; two draws share nothing but the model.
"""

import argparse
import os
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from mlx_backend.demo import VISION_MODEL_PATH
from mlx_backend.device.blas import use_fast_blas

BLAS: Final = use_fast_blas() or "MLX's own matrix products"  # before MLX
os.environ.setdefault("MLX_ENABLE_TF32", "0")  # matrix products as exact on a GPU as on a CPU

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_vlm.utils import load_model, load_processor
from PIL import Image

from training.vision.corpus import SKILLS, PictureDialogue, dialogue
from training.vision.shape import MERGE
from training.vision.tokens import STOPS

MAX_REPLY_TOKENS: Final = 160
FREELY: Final = "dialogues"


@dataclass
class AnswerCounts:
    """The counts of one draw: right and all answers of each skill, and what was wrong."""

    right: Counter[str] = field(default_factory=Counter)
    total: Counter[str] = field(default_factory=Counter)
    mistakes: list[str] = field(default_factory=list)

    def share(self) -> float:
        """Return the part of the answers that is right."""
        return self.right.total() / max(1, self.total.total())


class Model:
    """The model with its processor, as mlx-vlm loads them."""

    def __init__(self, folder: Path = VISION_MODEL_PATH) -> None:
        self.network = load_model(folder)
        self.processor = load_processor(folder, add_detokenizer=False)
        self.tokenizer = self.processor.tokenizer
        self._stops = set(self.tokenizer.convert_tokens_to_ids(list(STOPS)))

    def answer(self, messages: Sequence[dict[str, Any]], pictures: Sequence[Any]) -> str:
        """Return the greedy answer to a chat; `pictures` (arrays [height, width, 3]) stand where its messages say."""
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs: dict[str, Any] = {}
        if pictures:
            made = self.processor.image_processor(images=[Image.fromarray(each) for each in pictures])
            head, *rest = text.split("<|image_pad|>")
            places = [rows * columns // MERGE**2 for _, rows, columns in made["image_grid_thw"].tolist()]
            text = head + "".join(
                "<|image_pad|>" * count + part for count, part in zip(places, rest, strict=True)
            )
            inputs = {name: mx.array(value) for name, value in made.items()}
        ids = mx.array([self.tokenizer.encode(text, add_special_tokens=False)])
        language = self.network.language_model
        language._position_ids = language._rope_deltas = None  # of the chat before
        found = self.network.get_input_embeddings(ids, inputs.pop("pixel_values", None), **inputs)
        language._rope_deltas = found.rope_deltas
        cache = make_prompt_cache(language)
        given = {name: value for name, value in found.to_dict().items() if value is not None}
        logits = language(ids, cache=cache, **given).logits
        said: list[int] = []
        while len(said) < MAX_REPLY_TOKENS:
            token = int(np.array(logits[0, -1]).argmax())
            if token in self._stops:
                break
            said.append(token)
            logits = language(mx.array([[token]]), cache=cache).logits
        return str(self.tokenizer.decode(said, skip_special_tokens=True))


def play(model: Model, dialogues: Iterable[PictureDialogue], *, by: str = "") -> AnswerCounts:
    """Play dialogues; each ends at its first wrong answer, since what follows is about it. `by` counts all as one."""
    figures = AnswerCounts()
    for drawn in dialogues:
        messages: list[dict[str, Any]] = []
        if drawn.instructions:
            messages.append({"role": "system", "content": drawn.instructions})
        pictures: list[Any] = []
        for turn in drawn.turns:
            pictures += turn.images
            shown: list[dict[str, str]] = [{"type": "image"} for _ in turn.images]
            messages.append({"role": "user", "content": [*shown, {"type": "text", "text": turn.question}]})
            said = model.answer(messages, pictures)
            messages.append({"role": "assistant", "content": said})
            figures.total[by or turn.skill] += 1
            if said != turn.answer:
                figures.mistakes.append(
                    f"{turn.skill}: {turn.question!r} -> {said!r}, expected {turn.answer!r}"
                )
                break
            figures.right[by or turn.skill] += 1
    return figures


def draw(seed: int, count: int, skill: str | None = None) -> list[PictureDialogue]:
    """Return `count` held-out dialogues: of one turn of a skill, or as they come."""
    rng = random.Random(f"held out {skill} {seed}")
    return [dialogue(rng, held_out=True, skill=skill) for _ in range(count)]


def report(figures: AnswerCounts) -> None:
    """Print the figures of one draw."""
    for skill, total in figures.total.items():
        right = figures.right[skill]
        print(f"  {skill:22} {100 * right / total:6.2f} %  ({right} of {total})", flush=True)


def main() -> None:
    """Evaluate the model on each seed's draw."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--model", type=Path, default=VISION_MODEL_PATH)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    arguments.add_argument("--each", type=int, default=100, help="dialogues of each skill")
    arguments.add_argument("--dialogues", type=int, default=100, help="dialogues of several turns")
    arguments.add_argument("--slips", action="store_true", help="print every wrong answer")
    chosen = arguments.parse_args()
    model = Model(chosen.model)
    print(BLAS)
    for seed in chosen.seeds:
        print(f"draw {seed}")
        for skill in SKILLS:
            _show(play(model, draw(seed, chosen.each, skill)), slips=chosen.slips)
        _show(play(model, draw(seed, chosen.dialogues), by=FREELY), slips=chosen.slips)


def _show(figures: AnswerCounts, *, slips: bool) -> None:
    report(figures)
    if slips:
        print("\n".join(f"    {each}" for each in figures.mistakes), flush=True)


if __name__ == "__main__":
    main()
