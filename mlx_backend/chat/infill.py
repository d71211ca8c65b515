"""Filling in the middle: how each family of code models writes what stands before a gap and what after it.

A family is found by its markers, each of which is one token of its vocabulary: whether a tokenizer calls them special
differs, also between models of one family.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_backend.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_backend.engine.base import Tokenizer


@dataclass(frozen=True, slots=True)
class InfillFormat:
    """The markers before the text that precedes the gap, before the one that follows it, and where the model begins.

    `ends` are what it may write at the end of the gap, and which need not be among its end tokens.
    """

    prefix: str
    suffix: str
    middle: str = ""
    ends: tuple[str, ...] = ()
    suffix_first: bool = False

    def tokens(self, tokenizer: Tokenizer, before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
        """Return the prompt that asks for what stands between two texts."""

        def marker(text: str) -> list[int]:
            return tokenizer.encode(text, control_tokens=True) if text else []

        parts = [(*marker(self.prefix), *before), (*marker(self.suffix), *after)]
        first, second = reversed(parts) if self.suffix_first else parts
        return (*first, *second, *marker(self.middle))


_FILES = ("<|fim_pad|>", "<|file_sep|>", "<|file_separator|>", "<|repo_name|>", "<|endoftext|>")
_STAR = ("<fim_pad>", "<file_sep>", "<filename>", "<repo_name>", "<|endoftext|>")

FORMATS = (
    InfillFormat("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", _FILES),  # Qwen, CodeGemma, Granite 4
    InfillFormat(
        "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ("<|EOT|>", "<｜end▁of▁sentence｜>")
    ),  # DeepSeek
    InfillFormat(
        "<fim_prefix>", "<fim_suffix>", "<fim_middle>", _STAR
    ),  # StarCoder, Granite Code, StableCode
    InfillFormat(
        "<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<fim-pad>", "<|endoftext|>")
    ),  # SantaCoder
    InfillFormat("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),  # Seed-Coder
    InfillFormat("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>", " <EOT>")),  # CodeLlama
    InfillFormat("<PRE>", "<SUF>", "<MID>", ("<EOT>",)),
    InfillFormat("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", ("<|user|>",)),  # CodeGeeX 4
    InfillFormat("[PREFIX]", "[SUFFIX]", ends=("[MIDDLE]",), suffix_first=True),  # Codestral
)
"""The first whose markers a model knows is its own."""


def find_infill(is_token: Callable[[str], bool]) -> InfillFormat | None:
    """Return how a model is asked to fill a gap, by which texts are tokens; None if it knows no markers for that."""
    for each in FORMATS:
        if all(is_token(marker) for marker in (each.prefix, each.suffix, each.middle) if marker):
            return each
    return None


def infill_of(tokenizer: Tokenizer) -> InfillFormat | None:
    """Return how a loaded model is asked to fill a gap, if it can be."""
    return find_infill(lambda text: len(tokenizer.encode(text, control_tokens=True)) == 1)


def infill_format(tokenizer: Tokenizer, model: str) -> InfillFormat:
    """Return how a model is asked to fill a gap. Raises RequestError if it knows no markers for that."""
    if (found := infill_of(tokenizer)) is not None:
        return found
    raise RequestError(
        f"The model {model} cannot fill in text before a suffix: its vocabulary has no tokens for that, as those of "
        "Qwen-Coder, DeepSeek-Coder, StarCoder, CodeLlama and Codestral have. Send the request without 'suffix'.",
        "suffix",
        "unsupported_value",
    )
