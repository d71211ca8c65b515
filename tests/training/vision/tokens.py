"""The tokenizer: English words, Chinese and Japanese pieces, single digits. Knows nothing of what texts mean.

A digit is always a token of its own, so that a number is read off a picture a digit at a time, and so is a Chinese
character: a colour and a shape must stay two tokens, or a pair that was never trained on could not be said. What is
frequent in the corpus is one token; byte-level BPE handles the rest, so any text can be asked.
"""

import functools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from training.piece_tokenizer import count_pieces, in_bytes, make_tokenizer

SPECIAL: Final = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
VOCABULARY: Final = 1_024
ID: Final = {name: VOCABULARY - len(SPECIAL) + index for index, name in enumerate(SPECIAL)}
STOPS: Final = ("<|im_end|>", "<|endoftext|>")

_RESERVED: Final = 9
_MAX_WHOLE_PIECES: Final = 560  # entries of the vocabulary for the most frequent pieces
_LINES: Final = ("user\n", "assistant\n", "system\n")
_PATTERN: Final = r"(?:user|assistant|system)\n| ?[A-Za-z]+|\d|\s|[ぁ-ゖ]+|[ァ-ヺー]+|[^\sA-Za-z\d]"
_PIECES: Final = re.compile("|".join(map(re.escape, SPECIAL)) + "|" + _PATTERN)


def train(texts: Iterable[str]) -> Tokenizer:
    """Return a tokenizer of exactly `VOCABULARY` ids, the special tokens last."""
    pieces = count_pieces(texts, _PATTERN)
    by_frequency = sorted(
        (piece for piece in pieces if 1 < len(piece) <= 36), key=lambda piece: (-pieces[piece], piece)
    )
    whole = [*map(in_bytes, _LINES), *by_frequency[:_MAX_WHOLE_PIECES]]
    tokenizer = make_tokenizer(_PATTERN, pieces, whole, size=VOCABULARY, special=SPECIAL, reserved=_RESERVED)
    assert all(tokenizer.token_to_id(name) == number for name, number in ID.items())
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, positions: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": positions,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class Reader:
    """A saved tokenizer that keeps the ids of pieces, which repeat: several times as fast as encoding whole texts."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._piece = functools.lru_cache(maxsize=100_000)(self._encode)

    def _encode(self, piece: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(piece, add_special_tokens=False).ids)

    def ids(self, text: str) -> list[int]:
        """Return a text's ids."""
        return [token for piece in _PIECES.findall(text) for token in self._piece(piece)]

    def text(self, ids: Iterable[int]) -> str:
        """Return the text of ids, special tokens left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
