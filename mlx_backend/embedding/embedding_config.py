"""How a model's vectors are made: pooling, the prefixes of queries and documents, whether vectors may be shortened.

Sources, strongest first:

    settings              from the models file or the command line
    the model's files     modules.json, 1_Pooling/, config_sentence_transformers.json, sentence_*_config.json
    the model's family    by its name: the pooling and prefixes of popular models, which conversions often lose

Knows files and names; no MLX.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from mlx_backend.declaration import Kind, declare, one_of, switch
from mlx_backend.errors import EngineError
from mlx_backend.models import files as model_files
from mlx_backend.models.files import ENCODERS, MAX_JSON_BYTES, read_json_or_empty, read_small

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

type Pooling = Literal["cls", "mean", "last"]
type Role = Literal["query", "document"]

POOLINGS: tuple[Pooling, ...] = ("cls", "mean", "last")
_PREFIX = Kind(words="a text in quotes; empty for none", metavar="TEXT", type=str, parse=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOptions:
    """How one embedding or rerank model is served. None leaves a setting to the model's files."""

    context_length: int | None = None
    pooling: Pooling | None = declare(
        None, one_of(*POOLINGS), help="how a text's vector is made of its tokens' vectors"
    )
    query_prefix: str | None = declare(None, _PREFIX, help="text that is put before a query")
    document_prefix: str | None = declare(None, _PREFIX, help="text that is put before a document")
    matryoshka: bool | None = declare(
        None, switch(), help="whether requests may ask for shorter vectors (dimensions)"
    )
    allow_download: bool = True
    memory_bytes: int | None = None
    max_waiting: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingConfig:
    """How a model's vectors are made, known before its weights are loaded."""

    pooling: Pooling = "mean"
    query_prefix: str = ""
    document_prefix: str = ""
    matryoshka: bool = False
    max_tokens: int | None = None
    dense: tuple[str, ...] = ()
    """Folders of dense layers applied after pooling."""

    def prefix(self, role: Role | None) -> str:
        """Return the prefix for a text of this role, "" for no role."""
        return {"query": self.query_prefix, "document": self.document_prefix}.get(role or "", "")


def _family(
    pooling: Pooling, query_prefix: str = "", document_prefix: str = "", *, matryoshka: bool = False
) -> EmbeddingConfig:
    return EmbeddingConfig(
        pooling=pooling, query_prefix=query_prefix, document_prefix=document_prefix, matryoshka=matryoshka
    )


_SEARCH = "Given a web search query, retrieve relevant passages that answer the query"
_FAMILIES = {
    r"e5-mistral": _family("last", f"Instruct: {_SEARCH}\nQuery: "),
    r"e5-.*instruct": _family("mean", f"Instruct: {_SEARCH}\nQuery: "),
    r"(^|[-_])e5($|[-_])": _family("mean", "query: ", "passage: "),
    r"ruri.*v3": _family("mean", "検索クエリ: ", "検索文書: "),
    r"ruri": _family("mean", "クエリ: ", "文章: "),
    r"qwen3.*embed": _family("last", f"Instruct: {_SEARCH}\nQuery:", matryoshka=True),
    r"embedding-?gemma": _family(
        "mean",
        "task: search result | query: ",
        "title: none | text: ",
        matryoshka=True,
    ),
    r"modernbert-embed|nomic-embed": _family("mean", "search_query: ", "search_document: ", matryoshka=True),
    r"arctic-embed.*v2": _family("cls", "query: ", matryoshka=True),
    r"bge-.*-zh": _family("cls", "为这个句子生成表示以用于检索相关文章："),
    r"bge-(small|base|large)-en": _family("cls", "Represent this sentence for searching relevant passages: "),
    r"bge|arctic-embed|gte-modernbert|mxbai-embed": _family("cls"),
}
"""By a pattern of a model's name, in any case; the first that matches is meant."""


def embedding_config(folder: Path, name: str, options: EmbeddingOptions, *, causal: bool) -> EmbeddingConfig:
    """Determine how a model's vectors are made. Raises EngineError for what is not supported."""
    short_name = name.rpartition("/")[2]
    families = (
        family for pattern, family in _FAMILIES.items() if re.search(pattern, short_name, re.IGNORECASE)
    )
    found = next(families, None) or EmbeddingConfig(pooling="last" if causal else "mean")
    if causal and found.pooling == "cls":  # its first token has attended to nothing but itself
        found = replace(found, pooling="last")
    found = _from_files(folder, name, found)
    settings = {
        key: value
        for key in ("pooling", "query_prefix", "document_prefix", "matryoshka")
        if (value := getattr(options, key)) is not None
    }
    return replace(found, **settings)


def folder_context_length(folder: Path, name: str, options: EmbeddingOptions) -> int | None:
    """Return the maximum length of a text, in tokens, for the model in a folder; None if its files do not say."""
    config = read_json_or_empty(folder / "config.json")
    causal = config.get("model_type") not in ENCODERS
    try:
        found = embedding_config(folder, name, options, causal=causal)
    except EngineError:
        return None
    return context_length(folder, config, found, options) if config else None


def context_length(
    folder: Path, config: Mapping[str, Any], embedding: EmbeddingConfig, options: EmbeddingOptions
) -> int:
    """Return the maximum length of a text, in tokens: as configured, else the smallest limit in the model's files."""
    if options.context_length is not None:
        return options.context_length
    tokenizer_limit = read_json_or_empty(folder / "tokenizer_config.json").get("model_max_length")
    candidates = [max_positions(config), embedding.max_tokens, tokenizer_limit]
    limits = [int(limit) for limit in candidates if isinstance(limit, int | float) and 0 < limit < 1 << 40]
    return min(limits, default=512)


def max_positions(config: Mapping[str, Any]) -> int | None:
    """Return the number of positions a network has. RoBERTa's start after the padding token's id."""
    length = model_files.context_length(config)
    if length is None or config.get("model_type") not in _ROBERTAS:
        return length
    padding = config.get("pad_token_id")
    return length - (1 if padding is None else int(padding)) - 1


_ROBERTAS = ("roberta", "xlm-roberta", "camembert")


def _from_files(folder: Path, name: str, found: EmbeddingConfig) -> EmbeddingConfig:
    pooling, dense = _modules(folder, name)
    if pooling:
        found = replace(found, pooling=_pooling(pooling, name))
    config = read_json_or_empty(folder / "config.json")
    if config.get("is_matryoshka") is True or config.get("matryoshka_dimensions"):
        found = replace(found, matryoshka=True)
    prompts = read_json_or_empty(folder / "config_sentence_transformers.json").get("prompts")
    if isinstance(prompts, dict) and any(isinstance(text, str) and text for text in prompts.values()):
        found = replace(
            found,
            query_prefix=_prompt(prompts, "query", "search_query", "retrieval.query", "Retrieval-query"),
            document_prefix=_prompt(prompts, "document", "passage", "search_document", "retrieval.passage"),
        )
    for file in sorted(folder.glob("sentence_*_config.json")):  # named after the network, usually bert
        limit = read_json_or_empty(file).get("max_seq_length")
        if isinstance(limit, int) and limit > 0:
            found = replace(found, max_tokens=limit)
    return replace(found, dense=tuple(dense))


def _modules(folder: Path, name: str) -> tuple[dict[str, Any], list[str]]:
    """Read modules.json; return the configuration of the pooling, and the folders of the dense layers after it."""
    try:
        listed = json.loads(read_small(folder / "modules.json", MAX_JSON_BYTES))
        steps = [(str(step["type"]).rpartition(".")[2], str(step["path"])) for step in listed]
    except FileNotFoundError:
        return read_json_or_empty(folder / "1_Pooling" / "config.json"), []
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise EngineError(f"The modules.json of {name!r} cannot be read: {error!r}.") from error
    pooling: dict[str, Any] = {}
    dense: list[str] = []
    for module_type, path in steps:
        module_folder = (folder / path).resolve()
        if not module_folder.is_relative_to(folder.resolve()):
            raise EngineError(f"The modules.json of {name!r} leads out of its folder: {path!r}.")
        match module_type:
            case "Transformer" | "Normalize":
                pass  # every vector is normalised here
            case "Pooling":
                pooling = read_json_or_empty(module_folder / "config.json")
            case "Dense":
                dense.append(path)
            case _:
                raise EngineError(f"The model {name!r} has a {module_type!r} module, which is not supported.")
    return pooling, dense


def _pooling(config: dict[str, Any], name: str) -> Pooling:
    """Return the pooling of a module's config, in its old form (pooling_mode_*: true) or its new (pooling_mode)."""
    names = {"cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean"}
    names |= {"lasttoken": "last", "last_token": "last", "last": "last"}
    mode = config.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else list(mode) if isinstance(mode, list) else []
    modes += [
        key.removeprefix("pooling_mode_")
        for key, on in config.items()
        if on is True and key.startswith("pooling_mode_")
    ]
    found = {names.get(str(mode), str(mode)) for mode in modes}
    if config.get("include_prompt") is False:
        raise EngineError(f"The model {name!r} excludes prompts from pooling, which is not supported.")
    for pooling in POOLINGS:
        if found == {pooling}:
            return pooling
    used = " and ".join(sorted(found)) or "nothing"
    raise EngineError(f"The model {name!r} pools by {used}; supported are {', '.join(POOLINGS)}.")


def _prompt(prompts: dict[str, Any], *names: str) -> str:
    found = next((prompts[name] for name in names if isinstance(prompts.get(name), str)), "")
    return str(found)
