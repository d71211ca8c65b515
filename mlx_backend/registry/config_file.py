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
`models/engine_options` and `embedding/embedding_config`; those that exist only in the file are declared here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, PlainValidator, ValidationInfo

from mlx_backend.declaration import (
    Kind,
    Setting,
    SettingError,
    declared,
    one_of,
    seconds,
    switch,
    text,
)
from mlx_backend.demo import demo_path
from mlx_backend.embedding.embedding_config import EmbeddingOptions
from mlx_backend.models.engine_options import REMOVED, EngineOptions
from mlx_backend.models.files import TYPES
from mlx_backend.models.spec import RESERVED_KWARGS, ModelDefaults, ModelSpec, is_repository
from mlx_backend.registry.toml_tables import TableParser, decode, read_text, table_model, toml_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


# -- values that are more than a number or a word; `info.context` is the folder of the file ------------------


def check_name(value: object) -> str:
    """Return a name that fits into a line. Raises SettingError."""
    name = _text(value)
    if name != name.strip() or not name.isprintable() or len(name) > 200:
        raise SettingError("must be at most 200 characters on one line, with no blank at either end")
    return name


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise SettingError("must be a text in quotes")
    return value


def _path(value: object, info: ValidationInfo) -> Path:
    try:
        return Path(info.context or "", Path(_text(value)).expanduser()).absolute()
    except RuntimeError:  # ~user, and there is no such user
        raise SettingError("begins with the home of a user that does not exist") from None


def check_names(value: object) -> tuple[str, ...]:
    """Return a list of names, each once. Raises SettingError for a name, and ValueError for what is no list."""
    if not isinstance(value, list):
        raise ValueError
    return tuple(dict.fromkeys(check_name(item) for item in value))


def _template_kwargs(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError
    if reserved := sorted(value.keys() & RESERVED_KWARGS):
        raise SettingError(f"cannot replace {', '.join(reserved)}: the server sets that itself")
    return value


def _source(value: object, info: ValidationInfo) -> str:
    path = _path(value, info)
    if path.is_dir():
        return str(path)
    if path.is_file():
        raise SettingError("is a file: name the folder that holds config.json and the weights")
    if is_repository(source := _text(value)):
        return source
    if (demo := demo_path(source)) is not None:
        return str(demo)
    raise SettingError(f"there is no folder {path}; a repository is written owner/name")


def _folder(value: object, info: ValidationInfo) -> Path:
    path = _path(value, info)
    if not path.is_dir():
        raise SettingError(f"there is no folder {path}")
    return path


def _folders(value: object, info: ValidationInfo) -> dict[str, Path]:
    if not isinstance(value, dict):
        raise ValueError
    return {check_name(name): _folder(path, info) for name, path in value.items()}


def _template(value: object, info: ValidationInfo) -> str:
    path = _path(value, info)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        text = f"must be a file with a Jinja template, and {path} cannot be read ({reason})"
        raise SettingError(text) from None


_TYPES: Mapping[str, Any] = {
    "model": Annotated[str, PlainValidator(_source)],
    "aliases": Annotated[tuple[str, ...], PlainValidator(check_names)],
    "chat_template_kwargs": Annotated[dict[str, Any], PlainValidator(_template_kwargs)],
    "adapter_path": Annotated[Path, PlainValidator(_folder)],
    "adapters": Annotated[dict[str, Path], PlainValidator(_folders)],
    "adapter": Annotated[str, BeforeValidator(check_name)],
    "draft_model": Annotated[str, PlainValidator(_source)],
    "chat_template": Annotated[str, PlainValidator(_template)],
}


# -- keys -----------------------------------------------------------------------------------------------------


def _kind(words: str, kind: type) -> Kind:
    return Kind(words=words, metavar="", type=kind, parse=str)


REPLY = declared(ModelDefaults)
ENGINE = {name: setting for name, setting in declared(EngineOptions).items() if setting.in_file}
EMBEDDING = declared(EmbeddingOptions)

SHARED_KEYS: Mapping[str, Setting] = {
    "ttl": Setting(
        kind=seconds("a number of seconds, or 0 for never"),
        help="unload the model after this many seconds without a request; 0: never",
        default="never",
    ),
    **REPLY,
    "chat_template_kwargs": Setting(
        kind=_kind("a table: { name = value }", dict), help="further variables for the chat template"
    ),
    "adapter_path": Setting(
        kind=text("DIR", "a folder"), help="folder of a LoRA adapter that is always on", default="none"
    ),
    **ENGINE,
}
MODEL_KEYS: Mapping[str, Setting] = {
    "model": Setting(
        kind=text("PATH_OR_REPO", "a folder, or a repository on Hugging Face"),
        help="the model itself, or `mlx-demo`, `mlx-demo-vision`, `mlx-demo-embedding`, which are included; required",
    ),
    "aliases": Setting(
        kind=_kind('a list of names: ["one", "two"]', tuple), help="further names that clients may use"
    ),
    "pinned": Setting(kind=switch(), help="load the model at start and never unload it"),
    "type": Setting(kind=one_of(*TYPES), help="what the model is made for", default="what its files say"),
    **EMBEDDING,
    **SHARED_KEYS,
}


SharedTable = table_model("SharedTable", SHARED_KEYS, _TYPES)
ModelTable = table_model("ModelTable", MODEL_KEYS, _TYPES)

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
    parser = _ModelsFile(folder)
    configuration = parser.parse(tables, {} if ttl is None else {"ttl": ttl})
    parser.raise_mistakes(name)
    return configuration


class _ModelsFile(TableParser):
    """Parses one file."""

    def __init__(self, folder: Path) -> None:
        header = '[models."name"]'
        super().__init__(MODEL_KEYS, thing="a model", header=header, folder=folder, removed=REMOVED)

    def parse(self, tables: Mapping[str, Any], given: Mapping[str, Any]) -> Configuration:
        self.check_tables(tables, ("defaults", "models"))
        shared = {**given, **self.values("defaults", tables.get("defaults", {}), SharedTable)}
        models = tables.get("models", {})
        if not isinstance(models, dict):
            self.refuse("models", models, 'must be tables: [models."name"]')
            models = {}
        specs = tuple(self._model(name, table, shared) for name, table in models.items())
        self._refuse_shared_names(specs)
        return Configuration(models=specs, others=_spec(shared))

    def _model(self, name: str, table: Any, shared: Mapping[str, Any]) -> ModelSpec:
        where = f"models.{toml_key(name)}"
        self.check_name(where, name, check_name)
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
