"""The rows that the model that sees learns from: what its processor, tokenizer and chat template make of a dialogue."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_vlm")

from PIL import Image

from mlx_backend.demo import VISION_MODEL_PATH
from training.vision import corpus, shape, tokens, weights
from training.vision.encode import CLASSES, GRIDS, Row, encode, patches_of


@pytest.fixture(scope="module")
def processor() -> Any:
    import mlx_vlm.models.qwen3_vl  # noqa: F401  # makes its processor known
    from mlx_vlm.utils import load_processor

    return load_processor(VISION_MODEL_PATH, add_detokenizer=False)


@pytest.fixture(scope="module")
def reader() -> tokens.Reader:
    return tokens.Reader(VISION_MODEL_PATH)


def parts(row: Row) -> dict[str, Any]:
    return {name: row.numbers[part] for name, part in CLASSES[row.row_class].parts.items()}


def written(row: Row) -> list[int]:
    """A row's ids without its padding."""
    ids: list[int] = parts(row)["ids"].tolist()
    while ids[-1] == tokens.ID["<|endoftext|>"]:
        ids.pop()
    return ids


def picture(width: int, height: int) -> np.ndarray:
    return np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize(
    ("width", "height"), [(32, 32), (160, 160), (256, 256), (400, 100), (90, 700), (1234, 777), (17, 33)]
)
def test_patches_are_those_of_the_processor(processor: Any, width: int, height: int) -> None:
    pixels = picture(width, height)
    patches, (rows, columns) = patches_of(pixels)
    made = processor.image_processor(images=[Image.fromarray(pixels)])
    assert made["image_grid_thw"].tolist() == [[1, rows * shape.MERGE, columns * shape.MERGE]]
    frames = made["pixel_values"].reshape(len(patches), 3, shape.FRAMES, -1)
    shown = (patches.reshape(len(patches), 3, 1, -1) / np.float32(255) - 0.5) / 0.5
    assert np.allclose(frames, np.broadcast_to(shown, frames.shape), atol=1e-5)
    assert (rows, columns) in GRIDS


def test_a_row_is_what_the_chat_template_writes(processor: Any, reader: tokens.Reader) -> None:
    rng = random.Random(5)
    for _ in range(8):
        drawn = corpus.dialogue(rng)
        row = encode(reader, drawn)
        if row is None:
            continue
        messages: list[dict[str, Any]] = []
        if drawn.instructions:
            messages.append({"role": "system", "content": drawn.instructions})
        for turn in drawn.turns:
            content: list[dict[str, str]] = [{"type": "image"} for _ in turn.images]
            messages.append({"role": "user", "content": [*content, {"type": "text", "text": turn.question}]})
            messages.append({"role": "assistant", "content": turn.answer})
        text = processor.tokenizer.apply_chat_template(messages, tokenize=False)
        for patches in row.patches:
            text = text.replace("<|image_pad|>", "<|place|>" * (len(patches) // shape.MERGE**2), 1)
        text = text.replace("<|place|>", "<|image_pad|>")
        assert processor.tokenizer.encode(text, add_special_tokens=False) == written(row)


def test_what_is_learned_is_each_answer_and_its_end(reader: tokens.Reader) -> None:
    pixels = picture(64, 64)
    turns = (
        corpus.Turn((pixels,), "What number is this?", "The number is 47.", corpus.SKILLS[1]),
        corpus.Turn((), "日本語", "数字は47です。", corpus.SKILLS[1]),
    )
    row = encode(reader, corpus.PictureDialogue("", turns))
    assert row is not None
    found = parts(row)
    for number, turn in enumerate(turns, 1):
        learned = found["target"][(found["answer"] == number) & (found["target"] >= 0)].tolist()
        assert learned == [*reader.ids(turn.answer), tokens.ID["<|im_end|>"]]
    known = found["target"] >= 0
    assert (found["ids"][found["at"][known] + 1] == found["target"][known]).all()


def test_a_digit_is_a_token_and_so_is_every_marker(processor: Any) -> None:
    tokenizer = processor.tokenizer
    assert len(tokenizer.encode("The number is 4721.", add_special_tokens=False)) == 9
    for name, number in tokens.ID.items():
        assert tokenizer.encode(name, add_special_tokens=False) == [number]
    assert len(tokenizer) == tokens.VOCABULARY


@pytest.mark.parametrize("text", ["Zürich 日本 🙂", "a  b\n\n\tc", "赤い円が1つ、红色的圆形", "ﾊﾝｶｸ ヴァー"])
def test_any_text_survives_the_tokenizer(processor: Any, reader: tokens.Reader, text: str) -> None:
    ids = processor.tokenizer.encode(text, add_special_tokens=False)
    assert processor.tokenizer.decode(ids) == text
    assert reader.ids(text) == ids


def test_the_configuration_files_are_those_of_the_sizes(tmp_path: Path) -> None:
    shape.write(tmp_path)
    for file in tmp_path.iterdir():
        assert json.loads(file.read_text()) == json.loads((VISION_MODEL_PATH / file.name).read_text()), (
            file.name
        )


def test_saved_weights_are_read_by_mlx_and_again(tmp_path: Path) -> None:
    import mlx.core as mx

    made = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([1.5], np.float32)}
    weights.save(made, tmp_path / "model.safetensors")
    read: Any = mx.load(str(tmp_path / "model.safetensors"))
    for found in (read, weights.load(tmp_path / "model.safetensors")):
        assert {name: np.array(value).tolist() for name, value in found.items()} == {
            name: value.tolist() for name, value in made.items()
        }
