"""The tokenizer: how text is split into pieces, and which pieces are tokens. Knows nothing of what texts mean.

What has to be copied (names, values, unseen words) must be the same tokens everywhere, or a small model cannot learn
to copy. So a space belongs to the word after it only for a fixed list of words from the model's own prose; before
every other word it is a token of its own. Digits are paired, which makes a time of day and a number up to 99 short.
Each fixed line of a Harmony prompt is one token.

A piece that is frequent in the corpus is one token; byte-level BPE handles the others.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from training.piece_tokenizer import count_pieces, in_bytes, make_tokenizer


def _split(words: str) -> tuple[str, ...]:
    return tuple(words.split())


SPECIAL: Final = (
    "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>",
    "<|message|>", "<|call|>",
)  # fmt: skip
RESERVED: Final = 7
VOCABULARY: Final = 1_024
STOPS: Final = ("<|return|>", "<|endoftext|>", "<|call|>")

_MAX_WHOLE_PIECES: Final = 430  # entries of the vocabulary for the most frequent pieces
_STRUCTURES: Final = (
    "You are mlx-demo, a small demonstration model.\nKnowledge cutoff: 2026-01\nCurrent date: ",
    "\n\nReasoning: ",
    "\n\n# Valid channels: analysis, commentary, final. Channel must be included for every message.",
    "\nCalls to these tools must go to the commentary channel: 'functions'.",
    "# Instructions\n\n",
    "# Tools\n\n## functions\n\nnamespace functions {\n\n",
    "} // namespace functions",
    "type ",
    " = (_: {\n",
    " = () => any;\n\n",
    "}) => any;\n\n",
    ": string, // ",
    ": number, // ",
    ": boolean, // ",
    ": string[], // ",
    ": string,\n",
    ": number,\n",
    ": boolean,\n",
    ": string[],\n",
    "?: string, // ",
    "?: number, // ",
    "?: boolean, // ",
    "?: string[], // ",
    "?: string,\n",
    "?: number,\n",
    "?: boolean,\n",
    "?: string[],\n",
    "functions.",
    " to=",
    '{"',
    '": "',
    '"}',
    '", "',
    '" | "',
    "\n\n",
    "// ",
    " + ",
    " = ",
    ", ",
    ". ",
    "# Response Formats\n\n## ", "```json\n", "\n```", "### ", "\n  ", "\n    ", "\n      ", "\n        ",
    '{"type":"object"', '{"type": "object"', '":{"type":"', '": {"type": "', '"type":"', '"type": "', '","type":"',
    '", "type": "',
    '"properties":{"', '"properties": {"', '"additionalProperties":false', '"additionalProperties": false',
    '"required":["',
    '"required": ["', '"title":"', '"title": "', '"description":"', '"description": "', '":{"', '": {"', '"},"',
    '"}, "', '":"', '","',
    '": ["', '":["', '"], "', '"],"', '"]}', '"]', '"}}', '": ', '":', ', "', ',"', '}, {"', '},{"',
)  # fmt: skip
_ROLES: Final = (
    "system", "developer", "user", "assistant", "analysis", "commentary", "final", "json", "low", "medium",
    "high",
)  # fmt: skip
_WORDS_WITH_SPACE: Final = _split(
    "a about after agree all am among an and answer any are as at be before both by can capital colour "
    "comma do does done each first for found from give gives go goes good has have help how i in is it "
    "its just keep know last later learn learned least leave let letter made make makes me more must my "
    "myself need needs new no none not nothing numbers of on once one only opposite or other out past "
    "plain question right same say says see sentence short should small so some something steps takes "
    "than that the them then there they thing things think this to told too tools twice user wants was "
    "way what when where which will with word words you your"
)


def _piece_pattern() -> str:
    """Return the regular expression whose matches are the pieces."""
    structures = "|".join(re.escape(each) for each in sorted(_STRUCTURES, key=len, reverse=True))
    words = "|".join(_WORDS_WITH_SPACE)
    return rf"{structures}| (?:{words})(?![A-Za-z_])|[A-Z]?[a-z]+|\d{{1,2}}|\s|[A-Z]|[^\sA-Za-z\d]"


PIECES: Final = re.compile(
    "|".join(map(re.escape, SPECIAL)) + "|" + _piece_pattern()
)  # every text is made of these


def train(texts: Iterable[str]) -> Tokenizer:
    """Return a tokenizer of exactly `VOCABULARY` ids, the special tokens last."""
    pattern = _piece_pattern()
    pieces = count_pieces(texts, pattern)
    always = [f"{number:02}" for number in range(100)] + list(map(in_bytes, (*_STRUCTURES, *_ROLES)))
    by_frequency = sorted(
        (piece for piece in pieces if len(piece) > 1), key=lambda piece: (-pieces[piece], piece)
    )
    others = [piece for piece in by_frequency if piece not in always]
    whole = [*always, *others[:_MAX_WHOLE_PIECES]]
    return make_tokenizer(pattern, pieces, whole, size=VOCABULARY, special=SPECIAL, reserved=RESERVED)


def save(tokenizer: Tokenizer, folder: Path, positions: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|startoftext|>",
        "eos_token": "<|return|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": positions,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
