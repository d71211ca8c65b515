"""Train the small model that sees: `python -m training.vision.train --minutes 7 --out FOLDER`.

Needs PyTorch, which the project does not. Rows are drawn by processes that are forked before it is imported.
`--tokenizer` only trains the tokenizer and writes the configuration files, into the model's folder.
"""

import argparse
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

STARTED: Final = time.monotonic()
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # in the drawing processes; torch is told another number later
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from mlx_backend.demo import VISION_MODEL_PATH
from training.vision import corpus, glyphs, shape, tokens, weights
from training.vision.rows import DrawingPlan, Rows


def texts(seed: int, count: int) -> Iterator[str]:
    """Yield the texts that the tokenizer is trained on."""
    rng = random.Random(seed)
    for number in range(count):
        drawn = corpus.dialogue(rng, skill=corpus.SKILLS[number % len(corpus.SKILLS)])
        yield drawn.instructions
        for turn in drawn.turns:
            yield f"user\n{turn.question}"
            yield f"assistant\n{turn.answer}"
    yield "system\n"


def make_tokenizer(folder: Path) -> None:
    """Train the tokenizer, and write it and the configuration files."""
    tokens.save(tokens.train(texts(1, 12_000)), folder, shape.TEXT["max_position_embeddings"])
    shape.write(folder)


def main() -> None:
    """Draw, train, save and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=7.0, help="for all of it, from the start of the process"
    )
    parser.add_argument(
        "--out", type=Path, default=VISION_MODEL_PATH, help="where model.safetensors is written"
    )
    parser.add_argument("--folder", type=Path, default=VISION_MODEL_PATH, help="where the tokenizer is")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--images", type=int, default=480, help="pictures of a step; a multiple of 32")
    parser.add_argument("--chunk", type=int, default=240, help="pictures of a chunk of rows; a multiple of 4")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--decay", type=float, default=0.05)
    parser.add_argument("--gigabytes", type=float, default=60.0, help="of the device, for rows")
    parser.add_argument("--held", type=int, default=200, help="held-out dialogues of each skill")
    parser.add_argument(
        "--easy", type=float, default=0.3, help="part of the dialogues of the easy skills, at first"
    )
    parser.add_argument("--easy-until", type=float, default=0.5, help="part of the run that is first")
    parser.add_argument(
        "--easy-skills", nargs="*", default=["digits", "digits", "colour", "shape", "position"]
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=Path, help="weights to go on from")
    parser.add_argument("--fonts", type=Path, help="a folder with fonts to write numbers in")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--tokenizer", action="store_true")
    chosen = parser.parse_args()
    if chosen.tokenizer:
        make_tokenizer(VISION_MODEL_PATH)
        return
    if chosen.fonts:
        print(f"{glyphs.add_fonts(chosen.fonts)} fonts", flush=True)
    chosen.out.mkdir(parents=True, exist_ok=True)
    easy = tuple(skill for skill in chosen.easy_skills if skill in corpus.SKILLS)
    plan = DrawingPlan(
        chosen.folder, chosen.seed, chosen.workers, chosen.chunk, chosen.held,
        easy, chosen.easy_until if easy else 0.0, chosen.easy,
    )  # fmt: skip
    rows = Rows(plan)
    try:
        from training.vision.learn import Settings, learn  # only now: torch has threads

        settings = Settings(
            chosen.minutes, chosen.images, chosen.rate, chosen.decay, chosen.gigabytes, not chosen.eager,
            chosen.seed, chosen.out, STARTED,
        )  # fmt: skip
        learn(settings, rows, lambda: weights.load(chosen.start) if chosen.start else None)
    finally:
        rows.stop()


if __name__ == "__main__":
    main()
