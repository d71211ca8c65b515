"""The models file (`--config models.toml`): from TOML to frozen specs, or to every mistake in it at once.

    [defaults]                      # for all models, also those that the file does not name
    ttl = 900                       # seconds without a request until a model is unloaded; 0: never

    [models."gpt-oss-20b"]          # the name clients use
    model = "mlx-community/gpt-oss-20b-MXFP4-Q8"    # a folder or a Hugging Face repository
    aliases = ["gpt-oss"]
    pinned = true
    reasoning_effort = "high"

Paths are relative to the file's own folder. A model's own table wins over `[defaults]`; of
`chat_template_kwargs` and `adapters`, key by key.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_backend.conversation import effort as efforts
from mlx_backend.conversation.json_values import shown
from mlx_backend.embedding.embedding_config import POOLINGS
from mlx_backend.models.model_type import TYPES
from mlx_backend.models.spec import RESERVED_KWARGS, SAMPLING, ModelDefaults, ModelSpec
from mlx_backend.registry.errors import ConfigurationError
from mlx_backend.settings import ReasoningFormat

_REPOSITORY = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What a file says: its models in their order, and what all others are like."""

    models: tuple[ModelSpec, ...] = ()
    # But for name and source.
    others: ModelSpec = field(default_factory=lambda: ModelSpec(name="", source=""))


def is_repository(name: str) -> bool:
    """Whether this is spelt like a repository on Hugging Face: owner/name."""
    return _REPOSITORY.fullmatch(name) is not None


def read(path: Path) -> Configuration:
    """Read a file; raise ConfigurationError with a line for each mistake."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigurationError(f"There is no file {str(path)!r}.") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: byte {error.start} is not UTF-8; save it as UTF-8.") from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from None
    return parse(text, name=str(path), folder=path.absolute().parent)


def parse(text: str, *, name: str = "models.toml", folder: Path) -> Configuration:
    """Read a file's text; `folder` is where its relative paths begin."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{name} is not TOML: {error}.") from None
    except RecursionError:
        raise ConfigurationError(f"{name} is nested too deeply.") from None
    reading = _Reading(folder)
    configuration = reading.all(tables)
    if reading.mistakes:
        raise ConfigurationError("\n".join(f"{name}: {mistake}" for mistake in reading.mistakes))
    return configuration


class _Wrong(Exception):
    """What a value would have to be."""


type _Reader = Callable[[Any, Path], Any]


class _Reading:
    """One reading of one file: goes on after a mistake, so that a person hears of all of them."""

    def __init__(self, folder: Path) -> None:
        self.mistakes: list[str] = []
        self._folder = folder

    def all(self, tables: Mapping[str, Any]) -> Configuration:
        self._refuse_unknown("", tables, ("defaults", "models"), "a table of this file")
        shared = self._table("defaults", tables.get("defaults", {}), _SETTINGS)
        models = tables.get("models", {})
        if not isinstance(models, dict):
            self._mistake("models", models, 'must be tables: [models."name"]')
            models = {}
        specs = tuple(self._model(name, table, shared) for name, table in models.items())
        self._refuse_shared_names(specs)
        return Configuration(models=specs, others=_spec(shared))

    def _model(self, name: str, table: Any, shared: Mapping[str, Any]) -> ModelSpec:
        where = f"models.{_key(name)}"
        try:
            _name(name, self._folder)
        except _Wrong as error:
            self.mistakes.append(f"{where}: the name {error}.")
        own = self._table(where, table, _OF_A_MODEL)
        if isinstance(table, dict) and "model" not in table:
            self.mistakes.append(
                f"{where}.model is missing: the model's folder, or its repository on Hugging Face."
            )
        merged = {key: shared[key] | own[key] for key in _MERGED if key in shared and key in own}
        spec = _spec({**shared, **own, **merged, "name": name})
        if spec.type is not None:
            self._refuse_misplaced(where, own, spec.type)
        adapter, adapters = spec.engine.get("adapter"), spec.engine.get("adapters", {})
        if adapter is not None and adapter not in adapters:
            there = ", ".join(adapters) or "none"
            self._mistake(f"{where}.adapter", adapter, f"must be the name of one of its adapters: {there}")
        return spec

    def _table(self, where: str, table: Any, readers: Mapping[str, _Reader]) -> dict[str, Any]:
        """Read one table's values; leave out those that are wrong."""
        if not isinstance(table, dict):
            self._mistake(where, table, f"must be a table: [{where}]")
            return {}
        misplaced = [key for key in table if key in _OF_A_MODEL and key not in readers]
        for key in misplaced:
            self._mistake(
                f"{where}.{key}", table[key], 'belongs to one model: write it below its [models."name"]'
            )
        known = [key for key in table if key not in misplaced]
        self._refuse_unknown(where, known, readers, "a setting of a model")
        values = {}
        for key in known:
            if key in readers:
                try:
                    values[key] = readers[key](table[key], self._folder)
                except _Wrong as error:
                    self._mistake(f"{where}.{_key(key)}", table[key], str(error))
        return values

    def _mistake(self, where: str, value: Any, right: str) -> None:
        self.mistakes.append(f"{where} = {shown(value)}: {right}.")

    def _refuse_unknown(self, where: str, keys: Iterable[str], known: Iterable[str], what: str) -> None:
        names = sorted(known)
        for key in keys:
            if key in names:
                continue
            near = difflib.get_close_matches(key.replace("-", "_").lower(), names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}."
            path = f"{where}.{_key(key)}" if where else _key(key)
            self.mistakes.append(f"{path} is not {what}; {hint}")

    def _refuse_misplaced(self, where: str, own: Mapping[str, Any], kind: str) -> None:
        """A setting that a model of its type has no use for would be a mistake that nobody notices."""
        for_all = {"model", "aliases", "pinned", "type", "ttl", "context_length"}
        known = for_all | (_SETTINGS.keys() if kind == "llm" else _EMBEDDING.keys())
        for key in own:
            if key not in known or (kind == "rerank" and key in _EMBEDDING):
                self._mistake(f"{where}.{_key(key)}", own[key], f"means nothing to a model of type {kind}")

    def _refuse_shared_names(self, specs: Iterable[ModelSpec]) -> None:
        """A name that two models share would choose one of them by accident."""
        specs = list(specs)
        owners = {spec.name: spec.name for spec in specs}
        for spec in specs:
            for alias in spec.aliases:
                owner = owners.setdefault(alias, spec.name)
                if owner != spec.name:
                    where = f"models.{_key(spec.name)}.aliases"
                    self._mistake(where, alias, f"the model {owner!r} has this name already")


def _spec(values: Mapping[str, Any]) -> ModelSpec:
    return ModelSpec(
        name=values.get("name", ""),
        source=values.get("model", ""),
        aliases=values.get("aliases", ()),
        pinned=values.get("pinned", False),
        ttl=values.get("ttl") or None,
        defaults=ModelDefaults(
            effort=values.get("reasoning_effort"),
            reasoning_format=values.get("reasoning_format"),
            max_tokens=values.get("max_tokens"),
            thinking_budget=values.get("thinking_budget"),
            answer_reserve=values.get("answer_reserve"),
            template_kwargs=values.get("chat_template_kwargs", {}),
            **{key: values[key] for key in SAMPLING if key in values},
        ),
        engine=_engine(values),
        type=values.get("type"),
        embedding={key: values[key] for key in _EMBEDDING if key in values},
    )


def _engine(values: Mapping[str, Any]) -> dict[str, Any]:
    """By the names of `EngineOptions`. One adapter_path is an adapter that every request gets."""
    options = {key: values[key] for key in _ENGINE if key in values}
    if "adapter_path" in values:
        path: Path = values["adapter_path"]
        options["adapters"] = {**options.get("adapters", {}), path.name: path}
        options.setdefault("adapter", path.name)
    return options


def _key(key: str) -> str:
    """Write a key as the file has to."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else shown(key)


# -- values: each reader gives what it has read, or says what would be right ----------------------------------


def _number(low: float, high: float, what: str) -> _Reader:
    def read(value: Any, _folder: Path) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise _Wrong(f"must be {what}")
        return float(value)

    return read


def _whole(low: int, high: int, what: str) -> _Reader:
    def read(value: Any, _folder: Path) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _Wrong(f"must be {what}")
        return value

    return read


def _one_of(values: Iterable[int]) -> _Reader:
    allowed = tuple(values)

    def read(value: Any, _folder: Path) -> int:
        if type(value) is not int or value not in allowed:
            raise _Wrong(f"must be one of {', '.join(map(str, allowed))}")
        return value

    return read


def _word(values: Iterable[str]) -> _Reader:
    allowed = tuple(values)

    def read(value: Any, _folder: Path) -> str:
        if value not in allowed:
            raise _Wrong(f"must be one of {', '.join(allowed)}")
        return str(value)

    return read


def _prefix(value: Any, _folder: Path) -> str:
    if not isinstance(value, str):
        raise _Wrong("must be a text in quotes; empty for none")
    return value


def _flag(value: Any, _folder: Path) -> bool:
    if not isinstance(value, bool):
        raise _Wrong("must be true or false, without quotes")
    return value


def _text(value: Any, _folder: Path) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _Wrong("must be a text in quotes")
    return value


def _name(value: Any, folder: Path) -> str:
    text = _text(value, folder)
    if text != text.strip() or not text.isprintable() or len(text) > 200:
        raise _Wrong("must be at most 200 characters on one line, with no blank at either end")
    return text


def _names(value: Any, folder: Path) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise _Wrong('must be a list of names: ["one", "two"]')
    return tuple(dict.fromkeys(_name(item, folder) for item in value))


def _effort(value: Any, _folder: Path) -> efforts.Effort:
    try:
        return efforts.parse(value)
    except efforts.EffortError:
        raise _Wrong(f"must be one of {', '.join(efforts.Effort)}") from None


def _format(value: Any, _folder: Path) -> ReasoningFormat:
    try:
        return ReasoningFormat(value)
    except ValueError:
        raise _Wrong(f"must be one of {', '.join(ReasoningFormat)}") from None


def _kwargs(value: Any, _folder: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong("must be a table: { name = value }")
    if taken := sorted(value.keys() & RESERVED_KWARGS):
        raise _Wrong(f"cannot replace {', '.join(taken)}: the server sets that itself")
    return value


def _source(value: Any, folder: Path) -> str:
    text = _text(value, folder)
    place = _place(text, folder)
    if place.is_dir():
        return str(place)
    if place.is_file():
        raise _Wrong("is a file: name the folder that holds config.json and the weights")
    if is_repository(text):
        return text
    raise _Wrong(f"there is no folder {place}; a repository is written owner/name")


def _folder(value: Any, folder: Path) -> Path:
    place = _place(_text(value, folder), folder)
    if not place.is_dir():
        raise _Wrong(f"there is no folder {place}")
    return place


def _folders(value: Any, folder: Path) -> dict[str, Path]:
    if not isinstance(value, dict):
        raise _Wrong('must be a table: { name = "folder" }')
    return {_name(name, folder): _folder(path, folder) for name, path in value.items()}


def _template(value: Any, folder: Path) -> str:
    place = _place(_text(value, folder), folder)
    try:
        return place.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise _Wrong(f"must be a file with a Jinja template, and {place} cannot be read ({reason})") from None


def _place(text: str, folder: Path) -> Path:
    try:
        return Path(folder, Path(text).expanduser()).absolute()
    except RuntimeError:  # ~somebody who is not here
        raise _Wrong("begins with the home of a user that does not exist") from None


# What a template gets from us.
_count = _whole(1, 1 << 40, "a whole number from 1 up")
_share = _number(0, 1, "a number from 0 to 1")
_penalty = _number(-2, 2, "a number from -2 to 2")

_ENGINE: Mapping[str, _Reader] = {  # by the names of `EngineOptions`
    "context_length": _count,
    "chat_template": _template,
    "trust_remote_code": _flag,
    "adapters": _folders,
    "adapter": _name,
    "max_concurrent": _count,
    "packing": _flag,
    "kv_bits": _one_of((2, 3, 4, 5, 6, 8)),
    "kv_group_size": _one_of((32, 64, 128)),
    "max_kv_size": _count,
    "draft_model": _source,
    "draft_from_text": _flag,
    "draft_tokens": _whole(1, 64, "a whole number from 1 to 64"),
}
_EMBEDDING: Mapping[str, _Reader] = {  # by the names of `EmbeddingOptions`
    "pooling": _word(POOLINGS),
    "query_prefix": _prefix,
    "document_prefix": _prefix,
    "matryoshka": _flag,
}
_SETTINGS: Mapping[str, _Reader] = {
    "ttl": _number(0, 1e9, "a number of seconds, or 0 for never"),
    "reasoning_effort": _effort,
    "reasoning_format": _format,
    "max_tokens": _count,
    "thinking_budget": _whole(0, 1 << 40, "a whole number of tokens, 0 for no reasoning"),
    "answer_reserve": _count,
    "temperature": _number(0, 2, "a number from 0 to 2"),
    "top_p": _share,
    "top_k": _whole(0, 1 << 30, "a whole number, or 0 for all"),
    "min_p": _share,
    "seed": _whole(0, (1 << 63) - 1, "a whole number from 0 up"),
    "repetition_penalty": _number(1e-6, 10, "a number above 0, up to 10"),
    "presence_penalty": _penalty,
    "frequency_penalty": _penalty,
    "xtc_probability": _share,
    "xtc_threshold": _share,
    "chat_template_kwargs": _kwargs,
    "adapter_path": _folder,
    **_ENGINE,
}
_OF_A_MODEL: Mapping[str, _Reader] = {
    "model": _source,
    "aliases": _names,
    "pinned": _flag,
    "type": _word(TYPES),
    **_EMBEDDING,
    **_SETTINGS,
}
_MERGED = ("chat_template_kwargs", "adapters")
