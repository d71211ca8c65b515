"""The models file (`--config models.toml`): from TOML to frozen specs, or to every mistake in it at once.

    [defaults]                      # for all models, also those that the file does not name
    ttl = 900                       # seconds without a request until a model is unloaded; 0: never

    [models."gpt-oss-20b"]          # the name clients use
    model = "mlx-community/gpt-oss-20b-MXFP4-Q8"    # a folder or a Hugging Face repository
    aliases = ["gpt-oss"]
    pinned = true
    reasoning_effort = "high"

Paths are relative to the file's own folder. A model's own table wins over `[defaults]`; of
`chat_template_kwargs` and `adapters`, key by key. The keys and their limits are declared in `settings`,
`models/engine_options` and `embedding/embedding_config`; those that exist only in the file are declared in `file_keys`.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from mlx_backend.conversation.json_values import excerpt
from mlx_backend.declaration import SettingError
from mlx_backend.models.spec import ModelDefaults, ModelSpec
from mlx_backend.registry.errors import ConfigurationError
from mlx_backend.registry.file_keys import (
    EMBEDDING,
    ENGINE,
    MODEL_KEYS,
    REPLY,
    SHARED_KEYS,
    ModelTable,
    SharedTable,
    check_name,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from pydantic import BaseModel
    from pydantic_core import ErrorDetails

_MERGED = ("chat_template_kwargs", "adapters")
_FOR_EVERY_TYPE = frozenset({"model", "aliases", "pinned", "type", "ttl", "context_length"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What a file says: its models in their order, and the settings of all others (a spec without name and source)."""

    models: tuple[ModelSpec, ...] = ()
    others: ModelSpec = field(default_factory=lambda: ModelSpec(name="", source=""))


def read(path: Path, *, ttl: float | None = None) -> Configuration:
    """Read a file. Raises ConfigurationError with a line for each mistake. `ttl` is for models that set none."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigurationError(f"There is no file {str(path)!r}.") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: byte {error.start} is not UTF-8; save it as UTF-8.") from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from None
    return parse(text, name=str(path), folder=path.absolute().parent, ttl=ttl)


def parse(text: str, *, name: str = "models.toml", folder: Path, ttl: float | None = None) -> Configuration:
    """Parse a file's text; relative paths begin at `folder`. Raises ConfigurationError."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{name} is not TOML: {error}.") from None
    except RecursionError:
        raise ConfigurationError(f"{name} is nested too deeply.") from None
    parser = _Parser(folder)
    configuration = parser.parse(tables, {} if ttl is None else {"ttl": ttl})
    if parser.mistakes:
        raise ConfigurationError("\n".join(f"{name}: {mistake}" for mistake in parser.mistakes))
    return configuration


class _Parser:
    """Parses one file, and goes on after a mistake so that all of them are reported."""

    def __init__(self, folder: Path) -> None:
        self.mistakes: list[str] = []
        self._folder = folder

    def parse(self, tables: Mapping[str, Any], given: Mapping[str, Any]) -> Configuration:
        for key in tables:
            if key not in ("defaults", "models"):
                self._refuse_unknown(_key(key), key, ("defaults", "models"), "a table of this file")
        shared = {**given, **self._table("defaults", tables.get("defaults", {}), SharedTable)}
        models = tables.get("models", {})
        if not isinstance(models, dict):
            self._refuse("models", models, 'must be tables: [models."name"]')
            models = {}
        specs = tuple(self._model(name, table, shared) for name, table in models.items())
        self._refuse_shared_names(specs)
        return Configuration(models=specs, others=_spec(shared))

    def _model(self, name: str, table: Any, shared: Mapping[str, Any]) -> ModelSpec:
        where = f"models.{_key(name)}"
        try:
            check_name(name)
        except SettingError as error:
            self.mistakes.append(f"{where}: the name {error}.")
        own = self._table(where, table, ModelTable)
        if isinstance(table, dict) and "model" not in table:
            self.mistakes.append(
                f"{where}.model is missing: the model's folder, or its repository on Hugging Face."
            )
        merged = {key: shared[key] | own[key] for key in _MERGED if key in shared and key in own}
        spec = _spec({**shared, **own, **merged, "name": name})
        if spec.type is not None:
            self._refuse_settings_of_other_types(where, own, spec.type)
        adapter, adapters = spec.engine.get("adapter"), spec.engine.get("adapters", {})
        if adapter is not None and adapter not in adapters:
            there = ", ".join(adapters) or "none"
            self._refuse(f"{where}.adapter", adapter, f"must be the name of one of its adapters: {there}")
        return spec

    def _table(self, where: str, table: Any, model: type[BaseModel]) -> dict[str, Any]:
        """Return the values of one table, without those that are wrong."""
        if not isinstance(table, dict):
            self._refuse(where, table, f"must be a table: [{where}]")
            return {}
        try:
            valid = model.model_validate(table, context=self._folder)
        except ValidationError as error:
            errors = {str(each["loc"][0]): each for each in reversed(error.errors(include_url=False))}
            for key in (key for key in table if key in errors):
                self._report(where, key, table[key], errors[key], model)
            rest = {key: value for key, value in table.items() if key not in errors}
            valid = model.model_validate(rest, context=self._folder)
        return {name: getattr(valid, name) for name in valid.model_fields_set}

    def _report(self, where: str, key: str, value: Any, error: ErrorDetails, model: type[BaseModel]) -> None:
        path = f"{where}.{_key(key)}"
        if error["type"] != "extra_forbidden":
            reason = error.get("ctx", {}).get("error")
            words = MODEL_KEYS[key].kind.words
            self._refuse(path, value, str(reason) if isinstance(reason, SettingError) else f"must be {words}")
        elif key in MODEL_KEYS:
            self._refuse(path, value, 'belongs to one model: write it below its [models."name"]')
        else:
            self._refuse_unknown(path, key, model.model_fields, "a setting of a model")

    def _refuse(self, where: str, value: Any, right: str) -> None:
        self.mistakes.append(f"{where} = {excerpt(value)}: {right}.")

    def _refuse_unknown(self, path: str, key: str, known: Iterable[str], what: str) -> None:
        names = sorted(known)
        near = difflib.get_close_matches(key.replace("-", "_").lower(), names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}."
        self.mistakes.append(f"{path} is not {what}; {hint}")

    def _refuse_settings_of_other_types(self, where: str, own: Mapping[str, Any], kind: str) -> None:
        """Refuse settings that a model of this type does not use: they would silently have no effect."""
        used = {"llm": SHARED_KEYS.keys(), "embedding": EMBEDDING.keys(), "rerank": frozenset[str]()}[kind]
        for key in own:
            if key not in _FOR_EVERY_TYPE and key not in used:
                self._refuse(f"{where}.{_key(key)}", own[key], f"means nothing to a model of type {kind}")

    def _refuse_shared_names(self, specs: Iterable[ModelSpec]) -> None:
        """Refuse a name that two models have: which of them it means would be an accident."""
        specs = list(specs)
        owners = {spec.name: spec.name for spec in specs}
        for spec in specs:
            for alias in spec.aliases:
                owner = owners.setdefault(alias, spec.name)
                if owner != spec.name:
                    where = f"models.{_key(spec.name)}.aliases"
                    self._refuse(where, alias, f"the model {owner!r} has this name already")


def _spec(values: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a model whose table, with the defaults, holds these values."""
    return ModelSpec(
        name=values.get("name", ""),
        source=values.get("model", ""),
        aliases=values.get("aliases", ()),
        pinned=values.get("pinned", False),
        ttl=values.get("ttl") or None,
        defaults=ModelDefaults(
            template_kwargs=values.get("chat_template_kwargs", {}),
            **{key: values[key] for key in REPLY if key in values},
        ),
        engine=_engine(values),
        type=values.get("type"),
        embedding={key: values[key] for key in EMBEDDING if key in values},
    )


def _engine(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `EngineOptions`. adapter_path is one adapter, which every request gets."""
    options = {key: values[key] for key in ENGINE if key in values}
    if "adapter_path" in values:
        path: Path = values["adapter_path"]
        options["adapters"] = {**options.get("adapters", {}), path.name: path}
        options.setdefault("adapter", path.name)
    return options


def _key(key: str) -> str:
    """Return a key as TOML spells it."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else excerpt(key)
