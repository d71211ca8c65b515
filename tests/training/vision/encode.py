"""Dialogues as rows of numbers: token ids, positions, places of pictures, labels, and the pictures' patches.

Rows have few fixed shapes (`CLASSES`), so that a GPU meets each shape often. Only what the assistant writes is learned.
Knows how mlx-vlm's processor and language model take pictures, and nothing of how rows are learned.
"""

import functools
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from PIL import Image

from training.vision import shape
from training.vision.corpus import SKILLS, PictureDialogue
from training.vision.tokens import ID, Reader

IGNORED: Final = -1
ANSWERS: Final = 8  # most answers in a row


@dataclass(frozen=True)
class RowClass:
    """A shape of rows: how many pictures, tokens and learned tokens fit in."""

    images: int
    length: int
    learned: int

    @property
    def parts(self) -> dict[str, slice]:
        """Where each part of a row stands among its `width` numbers."""
        sizes = {
            "ids": self.length, "places": self.length, "time": self.length, "row": self.length,
            "column": self.length, "at": self.learned, "target": self.learned, "answer": self.learned,
            "skill": ANSWERS, "grid": self.images,
        }  # fmt: skip
        ends = np.cumsum(list(sizes.values())).tolist()
        return {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}

    @property
    def width(self) -> int:
        """The numbers (int16) of a row, without its patches."""
        return int(self.parts["grid"].stop)


CLASSES: Final = (RowClass(1, 256, 128), RowClass(2, 416, 128), RowClass(3, 448, 128))
GRIDS: Final = [
    (rows, columns)
    for rows in range(1, shape.MAX_PLACES + 1)
    for columns in range(1, shape.MAX_PLACES // rows + 1)
]
"""Every size of a picture in places; a picture is told by its index here."""
_GRID: Final = {grid: index for index, grid in enumerate(GRIDS)}
EMPTY_GRID: Final = _GRID[1, 1]  # stands for a picture that is not there


@dataclass
class Row:
    """A dialogue in a row of a class: `numbers` are its parts (int16), `patches` its pictures' (uint8)."""

    row_class: int
    numbers: np.ndarray
    patches: list[np.ndarray]


def patches_of(pixels: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
    """Return a picture's patches ([patches, bytes], in the processor's order), its rows and columns of places."""
    height, width = shape.size_of(*pixels.shape[:2])
    if pixels.shape[:2] != (height, width):
        resized = Image.fromarray(pixels).resize((width, height), resample=Image.Resampling.BICUBIC)
        pixels = np.asarray(resized)
    rows, columns = height // shape.SIDE, width // shape.SIDE
    cut = pixels.reshape(rows, shape.MERGE, shape.PATCH, columns, shape.MERGE, shape.PATCH, 3)
    ordered = cut.transpose(0, 3, 1, 4, 6, 2, 5)
    return ordered.reshape(-1, shape.PATCH_BYTES), (rows, columns)


class _RowWriter:
    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.ids: list[int] = []
        self.positions: list[np.ndarray] = []
        self.next = 0  # the position of the next token
        self.places: list[np.ndarray] = []
        self.learned: list[tuple[int, int, int]] = []  # where, what follows there, of which answer

    def write(self, ids: list[int], answer: int = 0) -> None:
        if answer:
            start = len(self.ids) - 1
            self.learned += [(start + index, token, answer) for index, token in enumerate(ids)]
        self.ids += ids
        along = np.arange(self.next, self.next + len(ids))
        self.positions.append(np.stack([along] * 3))
        self.places.append(np.full(len(ids), IGNORED))
        self.next += len(ids)

    def picture(self, number: int, grid: tuple[int, int]) -> None:
        self.write([ID["<|vision_start|>"]])
        rows, columns = grid
        count = rows * columns
        at = np.zeros((3, count), np.int64)
        at[1], at[2] = np.divmod(np.arange(count), columns)
        self.ids += [ID["<|image_pad|>"]] * count
        self.positions.append(at + self.next)
        self.places.append(number * shape.MAX_PLACES + np.arange(count))
        self.next += max(grid)
        self.write([ID["<|vision_end|>"]])


@functools.cache
def _fixed(reader: Reader) -> dict[str, list[int]]:
    texts = {
        "system": "<|im_start|>system\n", "user": "<|im_start|>user\n", "end": "<|im_end|>\n",
        "assistant": "<|im_start|>assistant\n",
    }  # fmt: skip
    return {name: reader.ids(text) for name, text in texts.items()}


def encode(reader: Reader, dialogue: PictureDialogue, *, pictures_last: bool = False) -> Row | None:
    """Return a dialogue as a row; None if it fits in none. `pictures_last`: they come after the question."""
    fixed, writer = _fixed(reader), _RowWriter(reader)
    pictures: list[tuple[np.ndarray, tuple[int, int]]] = []
    if dialogue.instructions:
        writer.write([*fixed["system"], *reader.ids(dialogue.instructions), *fixed["end"]])
    for number, turn in enumerate(dialogue.turns, 1):
        writer.write(fixed["user"])
        if pictures_last:
            writer.write(reader.ids(turn.question))
        for pixels in turn.images:
            made = patches_of(pixels)
            if len(made[0]) > shape.MAX_PATCHES:
                return None
            writer.picture(len(pictures), made[1])
            pictures.append(made)
        if not pictures_last:
            writer.write(reader.ids(turn.question))
        writer.write([*fixed["end"], *fixed["assistant"]])
        writer.write([*reader.ids(turn.answer), ID["<|im_end|>"]], answer=number)
        writer.write(fixed["end"][1:])
    for index, row_class in enumerate(CLASSES):
        if (
            len(pictures) <= row_class.images
            and len(writer.ids) <= row_class.length
            and len(writer.learned) <= row_class.learned
            and len(dialogue.turns) <= ANSWERS
        ):
            skills = [SKILLS.index(turn.skill) for turn in dialogue.turns]
            grids = [_GRID[grid] for _, grid in pictures]
            return Row(
                index, _numbers(row_class, writer, skills, grids), [patches for patches, _ in pictures]
            )
    return None


def _numbers(row_class: RowClass, writer: _RowWriter, skills: list[int], grids: list[int]) -> np.ndarray:
    numbers = np.zeros(row_class.width, np.int16)
    at, target, answer = zip(*writer.learned, strict=True)
    time, row, column = np.concatenate(writer.positions, axis=1)
    contents: dict[str, Any] = {
        "ids": writer.ids, "places": np.concatenate(writer.places), "time": time, "row": row,
        "column": column, "at": at, "target": target, "answer": answer, "skill": skills, "grid": grids,
    }  # fmt: skip
    parts = row_class.parts
    numbers[parts["ids"]] = ID["<|endoftext|>"]
    numbers[parts["grid"]] = EMPTY_GRID
    numbers[parts["at"]] = np.arange(row_class.learned)  # of those that are not there, each its own
    for name in ("places", "target", "skill"):
        numbers[parts[name]] = IGNORED
    for name, content in contents.items():
        start = parts[name].start
        numbers[start : start + len(content)] = content
    return numbers
