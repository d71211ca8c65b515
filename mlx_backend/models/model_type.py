"""What a model in a folder is made for: chat, embeddings or reranking.

Decides by names and by the small JSON files that come with a model; reads no weights and imports no MLX. What cannot be
read is taken for a language model, whose loader explains best what is wrong with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from mlx_backend.models.files import read_json_or_empty

if TYPE_CHECKING:
    from pathlib import Path

type ModelType = Literal["llm", "embedding", "rerank"]

TYPES: tuple[ModelType, ...] = ("llm", "embedding", "rerank")

# Encoder-only networks: they attend in both directions and generate nothing.
ENCODERS = frozenset(
    [
        *("bert", "roberta", "xlm-roberta", "camembert", "modernbert"),  # these can be run here
        *("distilbert", "mpnet", "deberta", "deberta-v2", "electra", "albert", "nomic_bert", "new"),
        *("xlm-roberta-xl", "luke", "eurobert", "neobert"),
    ]
)
_SENTENCE_TRANSFORMERS = ("modules.json", "config_sentence_transformers.json", "1_Pooling/config.json")


def detect_model_type(folder: Path | None, name: str) -> ModelType:
    """Detect a model's type from its files, and from its name where they do not tell.

    Conversions often lose the files that make a causal model an embedding model; only its name is left then.
    """
    config = read_json_or_empty(folder / "config.json") if folder is not None else {}
    short_name = name.rpartition("/")[2].casefold()
    listed = config.get("architectures")
    architectures = [str(each) for each in listed] if isinstance(listed, list) else []
    if any(each.endswith("ForSequenceClassification") for each in architectures):
        return "rerank"
    if config.get("model_type") in ENCODERS:
        return "embedding"
    if "rerank" in short_name:
        return "rerank"
    if config.get("use_bidirectional_attention") or "embed" in short_name:
        return "embedding"
    if folder is not None and any((folder / file).is_file() for file in _SENTENCE_TRANSFORMERS):
        return "embedding"
    return "llm"
