"""Compare the training network with mlx-vlm's, on the same weights: two runs, since no environment needs both.

`python -m training.vision.compare write FILE` where PyTorch is, then `... compare read FILE` where mlx-vlm is.
The first saves the model's weights' logits for dialogues with no picture, one, and several of different sizes; the
second prints the greatest difference from what mlx-vlm computes for the same dialogues, read by its own processor and
the chat template.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any, Final

import numpy as np

from mlx_backend.demo import VISION_MODEL_PATH
from training.vision import corpus, tokens, weights
from training.vision.encode import CLASSES, encode

DIALOGUES: Final = 12


def dialogues() -> list[corpus.PictureDialogue]:
    """Return a few dialogues of every number of pictures."""
    rng = random.Random(3)
    found: dict[int, list[corpus.PictureDialogue]] = {0: [], 1: [], 2: [], 3: []}
    while any(len(each) < DIALOGUES // 4 for each in found.values()):
        drawn = corpus.dialogue(rng)
        count = sum(len(turn.images) for turn in drawn.turns)
        if len(found[count]) < DIALOGUES // 4:
            found[count].append(drawn)
    return [each for same in found.values() for each in same]


def write(path: Path, folder: Path) -> None:
    """Save the training network's logits."""
    import torch

    from training.vision import network as networks

    network = networks.Network()
    networks.restore(network, weights.load(folder / "model.safetensors"))
    reader = tokens.Reader(folder)
    saved: dict[str, Any] = {}
    for index, drawn in enumerate(dialogues()):
        row = encode(reader, drawn)
        assert row is not None
        made = CLASSES[row.row_class]
        patches = np.zeros((1, made.images, 400, 192), np.uint8)
        for place, each in enumerate(row.patches):
            patches[0, place, : len(each)] = each
        with torch.no_grad():
            hidden = network.hidden(torch.from_numpy(patches), torch.from_numpy(row.numbers)[None], made)
            saved[f"logits {index}"] = (hidden @ network.embed_tokens.weight.T)[0].numpy()
        saved[f"ids {index}"] = row.numbers[made.parts["ids"]]
    np.savez_compressed(path, **saved)


def read(path: Path, folder: Path) -> None:
    """Print how mlx-vlm's logits differ."""
    import mlx.core as mx
    from mlx_vlm.utils import load_model, load_processor
    from PIL import Image

    saved, model = np.load(path), load_model(folder)
    processor = load_processor(folder, add_detokenizer=False)
    greatest = 0.0
    for index, drawn in enumerate(dialogues()):
        messages: list[dict[str, Any]] = []
        pictures: list[Any] = []
        if drawn.instructions:
            messages.append({"role": "system", "content": drawn.instructions})
        for turn in drawn.turns:
            pictures += [Image.fromarray(each) for each in turn.images]
            content: list[dict[str, str]] = [{"type": "image"} for _ in turn.images]
            messages.append({"role": "user", "content": [*content, {"type": "text", "text": turn.question}]})
            messages.append({"role": "assistant", "content": turn.answer})
        text = processor.tokenizer.apply_chat_template(messages, tokenize=False)
        grids: list[list[int]] = []
        inputs: dict[str, Any] = {}
        if pictures:
            made = processor.image_processor(images=pictures)
            grids = made["image_grid_thw"].tolist()
            inputs = {name: mx.array(value) for name, value in made.items()}
        for _, rows, columns in grids:
            text = text.replace("<|image_pad|>", "<|picture|>" * (rows * columns // 4), 1)
        text = text.replace("<|picture|>", "<|image_pad|>")
        ids = processor.tokenizer.encode(text, add_special_tokens=False)
        assert ids == saved[f"ids {index}"][: len(ids)].tolist(), (
            "the template or the tokenizer reads otherwise"
        )
        model.language_model._position_ids = model.language_model._rope_deltas = None
        pixels = inputs.pop("pixel_values", None)
        logits = np.array(model(mx.array([ids]), pixels, **inputs).logits[0])
        difference = float(np.abs(logits - saved[f"logits {index}"][: len(ids)]).max())
        greatest = max(greatest, difference)
        print(f"{len(pictures)} pictures {grids}: {len(ids)} tokens, difference {difference:.1e}")
    print(json.dumps({"greatest difference": greatest, "greatest logit": float(np.abs(logits).max())}))


def main() -> None:
    """Write or read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["write", "read"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--folder", type=Path, default=VISION_MODEL_PATH)
    chosen = parser.parse_args()
    (write if chosen.what == "write" else read)(chosen.file, chosen.folder)


if __name__ == "__main__":
    main()
