"""Which kind of model lies in a folder: one to talk to, one that makes vectors, one that ranks.

Reads the names and the small JSON files that models come with; never a weight, never MLX. What cannot be read is
taken for a language model, whose loader says best what is wrong with it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pathlib import Path

type ModelType = Literal["llm", "embedding", "rerank"]

TYPES: tuple[ModelType, ...] = ("llm", "embedding", "rerank")

# Networks that read a text in both directions and cannot write one.
ENCODERS = frozenset(
    [
        *("bert", "roberta", "xlm-roberta", "camembert", "modernbert"),  # those that can be run here
        *("distilbert", "mpnet", "deberta", "deberta-v2", "electra", "albert", "nomic_bert", "new"),
        *("xlm-roberta-xl", "luke", "eurobert", "neobert"),
    ]
)
_SENTENCE_TRANSFORMERS = ("modules.json", "config_sentence_transformers.json", "1_Pooling/config.json")


def model_type(folder: Path | None, name: str) -> ModelType:
    """Tell a model's type from its files, and from its name where they say nothing.

    Conversions often lose the files that make a causal model an embedding model; what is left is its name.
    """
    config = read_json(folder / "config.json") if folder is not None else {}
    called = name.rpartition("/")[2].casefold()
    architectures = config.get("architectures")
    names = [str(each) for each in architectures] if isinstance(architectures, list) else []
    if any(each.endswith("ForSequenceClassification") for each in names):
        return "rerank"
    if config.get("model_type") in ENCODERS:
        return "embedding"
    if "rerank" in called:
        return "rerank"
    if config.get("use_bidirectional_attention") or "embed" in called:
        return "embedding"
    if folder is not None and any((folder / file).is_file() for file in _SENTENCE_TRANSFORMERS):
        return "embedding"
    return "llm"


def read_json(file: Path) -> dict[str, Any]:
    """Return an object from a file; nothing if there is none."""
    try:
        read = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}
