"""How a model's vectors are made: which tokens are pooled, what stands before a text, what may be cut off.

    the person's own settings   win
    the model's own files       modules.json, 1_Pooling/, config_sentence_transformers.json, sentence_*_config.json
    the family, by its name     what conversions lose: pooling and prefixes of the models people use

Knows files and names; no MLX.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from mlx_backend.errors import EngineError
from mlx_backend.models import files as model_files
from mlx_backend.models.files import read_json_or_empty
from mlx_backend.models.model_type import ENCODERS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

type Pooling = Literal["cls", "mean", "last"]
type Role = Literal["query", "document"]

POOLINGS: tuple[Pooling, ...] = ("cls", "mean", "last")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOptions:
    """What the person who serves a model may choose. None leaves it to the model's files."""

    context_length: int | None = None
    pooling: Pooling | None = None
    query_prefix: str | None = None
    document_prefix: str | None = None
    matryoshka: bool | None = None  # whether its vectors may be shortened
    allow_download: bool = True
    memory_bytes: int | None = None
    max_waiting: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What is known of a model before its weights are read."""

    pooling: Pooling = "mean"
    query_prefix: str = ""
    document_prefix: str = ""
    matryoshka: bool = False
    max_tokens: int | None = None
    dense: tuple[str, ...] = ()  # folders of layers that come after pooling

    def prefix(self, role: Role | None) -> str:
        """Return what stands before a text of this role."""
        return {"query": self.query_prefix, "document": self.document_prefix}.get(role or "", "")


@dataclass(frozen=True, slots=True)
class _Family:
    name: re.Pattern[str]
    pooling: Pooling
    query: str = ""
    document: str = ""
    matryoshka: bool = False


def _family(name: str, pooling: Pooling, query: str = "", document: str = "", **more: Any) -> _Family:
    return _Family(re.compile(name, re.IGNORECASE), pooling, query, document, **more)


_SEARCH = "Given a web search query, retrieve relevant passages that answer the query"
_FAMILIES = (
    _family(r"e5-mistral", "last", f"Instruct: {_SEARCH}\nQuery: "),
    _family(r"e5-.*instruct", "mean", f"Instruct: {_SEARCH}\nQuery: "),
    _family(r"(^|[-_])e5($|[-_])", "mean", "query: ", "passage: "),
    _family(r"ruri.*v3", "mean", "検索クエリ: ", "検索文書: "),
    _family(r"ruri", "mean", "クエリ: ", "文章: "),
    _family(r"qwen3.*embed", "last", f"Instruct: {_SEARCH}\nQuery:", matryoshka=True),
    _family(
        r"embedding-?gemma",
        "mean",
        "task: search result | query: ",
        "title: none | text: ",
        matryoshka=True,
    ),
    _family(r"modernbert-embed|nomic-embed", "mean", "search_query: ", "search_document: ", matryoshka=True),
    _family(r"arctic-embed.*v2", "cls", "query: ", matryoshka=True),
    _family(r"bge-.*-zh", "cls", "为这个句子生成表示以用于检索相关文章："),
    _family(r"bge-(small|base|large)-en", "cls", "Represent this sentence for searching relevant passages: "),
    _family(r"bge|arctic-embed|gte-modernbert|mxbai-embed", "cls"),
)


def recipe_of(folder: Path, name: str, options: EmbeddingOptions, *, causal: bool) -> Recipe:
    """Read how a model's vectors are made. Raises EngineError for what cannot be done here."""
    called = name.rpartition("/")[2]
    family = next((each for each in _FAMILIES if each.name.search(called)), None)
    recipe = Recipe(pooling="last" if causal else "mean")
    if family is not None:
        recipe = replace(
            recipe,
            pooling="last"
            if causal and family.pooling == "cls"
            else family.pooling,  # the first has read nothing
            query_prefix=family.query,
            document_prefix=family.document,
            matryoshka=family.matryoshka,
        )
    recipe = _from_files(folder, name, recipe)
    chosen = {
        key: value
        for key in ("pooling", "query_prefix", "document_prefix", "matryoshka")
        if (value := getattr(options, key)) is not None
    }
    return replace(recipe, **chosen)


def tokens_read(folder: Path, name: str, options: EmbeddingOptions) -> int | None:
    """Return how long a text may be for the model in a folder; None if its files do not say."""
    config = read_json_or_empty(folder / "config.json")
    try:
        recipe = recipe_of(folder, name, options, causal=config.get("model_type") not in ENCODERS)
    except EngineError:
        return None
    return context_length(folder, config, recipe, options) if config else None


def context_length(folder: Path, config: Mapping[str, Any], recipe: Recipe, options: EmbeddingOptions) -> int:
    """Return how many tokens a text may have: what the person says, else the least that the files advise."""
    if options.context_length is not None:
        return options.context_length
    advised = read_json_or_empty(folder / "tokenizer_config.json").get("model_max_length")
    limits = [positions(config), recipe.max_tokens, advised]
    said = [int(limit) for limit in limits if isinstance(limit, int | float) and 0 < limit < 1 << 40]
    return min(said, default=512)


def positions(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens a network can tell apart by their places. RoBERTa's begin after its padding's."""
    length = model_files.context_length(config)
    if length is None or config.get("model_type") not in _ROBERTAS:
        return length
    padding = config.get("pad_token_id")
    return length - (1 if padding is None else int(padding)) - 1


_ROBERTAS = ("roberta", "xlm-roberta", "camembert")


@dataclass(slots=True)
class _Modules:
    pooling: dict[str, Any] = field(default_factory=dict)
    dense: list[str] = field(default_factory=list)


def _from_files(folder: Path, name: str, recipe: Recipe) -> Recipe:
    modules = _modules(folder, name)
    if modules.pooling:
        recipe = replace(recipe, pooling=_pooling(modules.pooling, name))
    config = read_json_or_empty(folder / "config.json")
    if config.get("is_matryoshka") is True or config.get("matryoshka_dimensions"):
        recipe = replace(recipe, matryoshka=True)
    prompts = read_json_or_empty(folder / "config_sentence_transformers.json").get("prompts")
    if isinstance(prompts, dict) and any(isinstance(text, str) and text for text in prompts.values()):
        recipe = replace(
            recipe,
            query_prefix=_prompt(prompts, "query", "search_query", "retrieval.query", "Retrieval-query"),
            document_prefix=_prompt(prompts, "document", "passage", "search_document", "retrieval.passage"),
        )
    for file in sorted(folder.glob("sentence_*_config.json")):  # named for the network, bert as a rule
        longest = read_json_or_empty(file).get("max_seq_length")
        if isinstance(longest, int) and longest > 0:
            recipe = replace(recipe, max_tokens=longest)
    return replace(recipe, dense=tuple(modules.dense))


def _modules(folder: Path, name: str) -> _Modules:
    """Read modules.json: the network, how it is pooled, and what comes after."""
    try:
        listed = json.loads((folder / "modules.json").read_bytes())
        steps = [(str(step["type"]).rpartition(".")[2], str(step["path"])) for step in listed]
    except FileNotFoundError:
        return _Modules(pooling=read_json_or_empty(folder / "1_Pooling" / "config.json"))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise EngineError(f"The modules.json of {name!r} cannot be read: {error!r}.") from error
    modules = _Modules()
    for kind, path in steps:
        place = (folder / path).resolve()
        if not place.is_relative_to(folder.resolve()):
            raise EngineError(f"The modules.json of {name!r} leads out of its folder: {path!r}.")
        match kind:
            case "Transformer" | "Normalize":
                pass  # every vector is normalised here
            case "Pooling":
                modules.pooling = read_json_or_empty(place / "config.json")
            case "Dense":
                modules.dense.append(path)
            case _:
                raise EngineError(
                    f"The model {name!r} makes its vectors with {kind!r}, which is not known here."
                )
    return modules


def _pooling(config: dict[str, Any], name: str) -> Pooling:
    words = {"cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean"}
    words |= {"lasttoken": "last", "last_token": "last", "last": "last"}
    mode = config.get("pooling_mode")
    said = [mode] if isinstance(mode, str) else mode if isinstance(mode, list) else []
    said += [
        key.removeprefix("pooling_mode_")
        for key, on in config.items()
        if on is True and key.startswith("pooling_mode_")
    ]
    found = {words.get(str(word), str(word)) for word in said}
    if config.get("include_prompt") is False:
        raise EngineError(f"The model {name!r} leaves its prompts out when it pools; that is not known here.")
    for pooling in POOLINGS:
        if found == {pooling}:
            return pooling
    raise EngineError(
        f"The model {name!r} pools by {' and '.join(sorted(found)) or 'nothing'}; known are {', '.join(POOLINGS)}."
    )


def _prompt(prompts: dict[str, Any], *names: str) -> str:
    found = next((prompts[name] for name in names if isinstance(prompts.get(name), str)), "")
    return str(found)
