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

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlx_backend.declaration import SettingError
from mlx_backend.models.spec import ModelDefaults, ModelSpec
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
from mlx_backend.registry.toml_tables import TableParser, decode, read_text, toml_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

_MERGED = ("chat_template_kwargs", "adapters")
_FOR_EVERY_TYPE = frozenset({"model", "aliases", "pinned", "type", "ttl", "context_length"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What a file says: its models in their order, and the settings of all others (a spec without name and source)."""

    models: tuple[ModelSpec, ...] = ()
    others: ModelSpec = field(default_factory=lambda: ModelSpec(name="", source=""))


def read(path: Path, *, ttl: float | None = None) -> Configuration:
    """Read a file. Raises ConfigurationError with a line for each mistake. `ttl` is for models that set none."""
    return parse(read_text(path), name=str(path), folder=path.absolute().parent, ttl=ttl)


def parse(text: str, *, name: str = "models.toml", folder: Path, ttl: float | None = None) -> Configuration:
    """Parse a file's text; relative paths begin at `folder`. Raises ConfigurationError."""
    tables = decode(text, name)
    parser = _Parser(folder)
    configuration = parser.parse(tables, {} if ttl is None else {"ttl": ttl})
    parser.raise_mistakes(name)
    return configuration


class _Parser(TableParser):
    """Parses one file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(MODEL_KEYS, thing="a model", header='[models."name"]', folder=folder)

    def parse(self, tables: Mapping[str, Any], given: Mapping[str, Any]) -> Configuration:
        self.check_tables(tables, ("defaults", "models"))
        shared = {**given, **self.values("defaults", tables.get("defaults", {}), SharedTable)}
        models = self.named_tables(tables, "models")
        specs = tuple(self._model(name, table, shared) for name, table in models.items())
        self._refuse_shared_names(specs)
        return Configuration(models=specs, others=_spec(shared))

    def _model(self, name: str, table: Any, shared: Mapping[str, Any]) -> ModelSpec:
        where = f"models.{toml_key(name)}"
        try:
            check_name(name)
        except SettingError as error:
            self.mistakes.append(f"{where}: the name {error}.")
        own = self.values(where, table, ModelTable)
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
            self.refuse(f"{where}.adapter", adapter, f"must be the name of one of its adapters: {there}")
        return spec

    def _refuse_settings_of_other_types(self, where: str, own: Mapping[str, Any], kind: str) -> None:
        """Refuse settings that a model of this type does not use: they would silently have no effect."""
        used = {"llm": SHARED_KEYS.keys(), "embedding": EMBEDDING.keys(), "rerank": frozenset[str]()}[kind]
        for key in own:
            if key not in _FOR_EVERY_TYPE and key not in used:
                self.refuse(f"{where}.{toml_key(key)}", own[key], f"means nothing to a model of type {kind}")

    def _refuse_shared_names(self, specs: Iterable[ModelSpec]) -> None:
        """Refuse a name that two models have: which of them it means would be an accident."""
        specs = list(specs)
        owners = {spec.name: spec.name for spec in specs}
        for spec in specs:
            for alias in spec.aliases:
                owner = owners.setdefault(alias, spec.name)
                if owner != spec.name:
                    where = f"models.{toml_key(spec.name)}.aliases"
                    self.refuse(where, alias, f"the model {owner!r} has this name already")


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
