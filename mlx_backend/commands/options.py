"""The options of `mlx-backend serve`, made from the declarations of settings, and the settings they give.

An option that is not given is taken from its environment variable, if that is set and not empty. Starts nothing.
"""

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from mlx_backend.commands.errors import argument, resembling
from mlx_backend.declaration import (
    VARIABLE_PREFIX,
    Kind,
    Setting,
    SettingError,
    declare,
    declared,
    declaring,
    one_of,
    option_of,
    path,
    seconds,
    switch,
    text,
    variable_of,
)
from mlx_backend.demo import EMBEDDING_MODEL_NAME, MODEL_NAME, demo_path
from mlx_backend.models.engine_options import REMOVED, EngineOptions
from mlx_backend.models.spec import ModelDefaults, ModelSpec, is_repository
from mlx_backend.registry.errors import ConfigurationError
from mlx_backend.settings import Settings

if TYPE_CHECKING:
    from mlx_backend.models.files import ModelType

GROUPS = ("model", "several models", "replies", "memory and speed", "network", "limits", "images", "log")
_OTHER_VARIABLES = {f"{VARIABLE_PREFIX}URL", f"{VARIABLE_PREFIX}LEADER"}
"""Of no option of `serve`: `running_server` and `engine/distributed/transport` read them."""
_DEFAULT_ADAPTER = "default"
"""The name of an adapter that is given without one."""


def _adapter(text: str) -> tuple[str, Path]:
    name, equals, folder = text.partition("=")
    if not equals:
        name, folder = _DEFAULT_ADAPTER, text
    if not name.strip() or not folder.strip():
        raise ValueError
    return name, Path(folder)


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


_of_model, _of_several = declaring(group="model"), declaring(group="several models")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options that belong to the command alone: which models there are. Others are engine options and settings."""

    model: str | None = _of_model(
        None,
        text("PATH_OR_REPO", "a folder or a repository"),
        help="model folder or Hugging Face repository; `mlx-demo` and `mlx-demo-vision` are included",
        default="the demo model",
    )
    model_id: str | None = _of_model(
        None, text("NAME"), help="name that clients use", default="the model's own"
    )
    adapter_path: tuple[tuple[str, Path], ...] = _of_model(
        (),
        Kind(words="PATH or NAME=PATH", metavar="[NAME=]PATH", type=tuple, parse=_adapter),
        help="LoRA adapter: always on without a name, with a name for requests that ask for it",
        repeatable=True,
    )
    chat_template_args: Mapping[str, Any] = _of_model(
        {},
        Kind(words="a JSON object", metavar="JSON", type=dict, parse=_json_object),
        help="further variables for the chat template, such as '{\"enable_thinking\": false}'",
    )
    embedding_model: tuple[str, ...] = _of_several(
        (),
        text("PATH_OR_REPO", "a folder or a repository"),
        help="embedding model (/v1/embeddings), loaded at the first request; `mlx-demo-embedding` is included",
        repeatable=True,
    )
    rerank_model: tuple[str, ...] = _of_several(
        (),
        text("PATH_OR_REPO", "a folder or a repository"),
        help="rerank model (/v1/rerank), loaded when a request first needs it",
        repeatable=True,
    )
    config: Path | None = _of_several(
        None,
        path("FILE", "a file"),
        help="models file: the models to serve and their settings, in TOML",
    )
    models_dir: tuple[Path, ...] = _of_several(
        (),
        path("DIR"),
        help="folder of models that requests may name",
        repeatable=True,
    )
    hf_cache: bool = _of_several(False, switch(), help="serve the models in the Hugging Face cache too")
    allow_download: bool = _of_several(False, switch(), help="download a repository that a request names")
    ttl: float | None = _of_several(
        None,
        seconds("a number of seconds, or 0 for never"),
        help="unload a model after this many seconds without a request; 0: never. "
        "The one named with --model stays",
        default="never",
    )
    log_level: str = declare(
        "info", one_of("debug", "info", "warning", "error"), help="what to log", group="log"
    )
    log_format: str = declare(
        "text",
        one_of("text", "json"),
        help="what a line of the log is: words, or a JSON object for programs",
        group="log",
    )


OWNERS = (ServeOptions, EngineOptions, Settings)
_OF_ONE_MODEL = frozenset(name for name, setting in declared(EngineOptions).items() if setting.of_one_model)


def options_by_group() -> dict[str, list[tuple[str, Setting, str, Any]]]:
    """Return name, setting, option and default of everything that has an option."""
    groups: dict[str, list[tuple[str, Setting, str, Any]]] = {group: [] for group in GROUPS}
    for owner in OWNERS:
        defaults = {one.name: one.default for one in fields(owner)}
        for name, setting in declared(owner).items():
            if option := option_of(name, setting):
                groups[setting.group].append((name, setting, option, defaults[name]))
    return groups


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add all options of the command. Those that are not given are left out of the namespace."""
    for group, options in options_by_group().items():
        add = parser.add_argument_group(group).add_argument
        for name, setting, option, default in options:
            more: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
            more["help"] = argparse.SUPPRESS if setting.hidden else _help(setting, default).replace("%", "%%")
            if setting.is_switch:
                add(option, action="store_false" if setting.turns_off else "store_true", **more)
            else:
                more |= {"type": argument(setting.kind), "metavar": setting.kind.metavar}
                add(option, action="append" if setting.repeatable else "store", **more)


def _help(setting: Setting, default: Any) -> str:
    if setting.turns_off:
        return f"do not {setting.help}"
    if setting.repeatable:
        return f"{setting.help}; repeatable"
    shown = default_in_words(setting, default)
    return f"{setting.help} (default: {shown})" if shown else setting.help


def default_in_words(setting: Setting, default: Any) -> str:
    """Return a setting's default as the help shows it; empty where it needs no mention."""
    plain = isinstance(default, str | int | float) and not setting.is_switch
    return setting.default or (setting.kind.show(default) if plain else "")


def values_of(
    owner: type, arguments: argparse.Namespace, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return those settings of a dataclass that an option or a variable sets. Raises ConfigurationError."""
    environment = os.environ if environment is None else environment
    values = {}
    for name, setting in declared(owner).items():
        option = option_of(name, setting)
        if option is None:
            continue
        if hasattr(arguments, name):
            value = getattr(arguments, name)
            values[name] = tuple(value) if setting.repeatable else value
        elif written := environment.get(variable_of(option), "").strip():
            values[name] = _from_variable(variable_of(option), setting, written)
    return values


def _from_variable(variable: str, setting: Setting, written: str) -> Any:
    """Read a variable: of an option that may be repeated, its values with commas between them."""
    try:
        if setting.repeatable:
            return tuple(setting.kind.from_text(each.strip()) for each in written.split(",") if each.strip())
        value = setting.kind.from_text(written)
    except SettingError as error:
        raise ConfigurationError(f"{variable}: {error}.") from None
    return not value if setting.turns_off else value


def variables() -> set[str]:
    """Return the environment variables of all options."""
    return {variable_of(option) for options in options_by_group().values() for _, _, option, _ in options}


def unknown_variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return each variable with our prefix that nothing reads, and what to do about it."""
    environment = os.environ if environment is None else environment
    known = variables()
    names = {each.removeprefix(VARIABLE_PREFIX) for each in known}
    found = {}
    for variable in environment.keys() - known - _OTHER_VARIABLES:
        if variable.startswith(VARIABLE_PREFIX) and environment[variable].strip():
            name = variable.removeprefix(VARIABLE_PREFIX)
            if removed := REMOVED.get(name.lower()):
                found[variable] = f"It {removed}."
            elif nearest := resembling(name, names):
                found[variable] = f"Did you mean ${VARIABLE_PREFIX}{nearest}?"
            else:
                found[variable] = "No option has that name: docs/settings.md lists them."
    return dict(sorted(found.items()))


def _source_of(name: str, folders: tuple[Path, ...]) -> tuple[str, str | None]:
    """Return the folder, repository or demo model that is meant, and what it is called if it was found by its name."""
    is_path = "/" in name and not is_repository(name)
    if is_path or demo_path(name) is not None or Path(name).expanduser().exists():
        return name, None
    from mlx_backend.commands.local_models import LocalModels

    local = LocalModels(argparse.Namespace(models_dir=list(folders)))
    source = local.source(name)
    found = local.named(source)
    return (source, None) if found is None else (found.source, found.name)


@dataclass(frozen=True, slots=True)
class ChosenOptions:
    """What options and variables set: for the command alone, for the engines of models, and for the server."""

    serve: ServeOptions
    engine_values: Mapping[str, Any]
    settings: Settings

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Self:
        """Read a command line and the environment. Raises ConfigurationError."""
        serve = ServeOptions(**values_of(ServeOptions, arguments))
        find = partial(_source_of, folders=serve.models_dir)
        model, name = find(serve.model) if serve.model else (None, None)
        return cls(
            replace(
                serve,
                model=model,
                model_id=serve.model_id or name,
                embedding_model=tuple(find(each)[0] for each in serve.embedding_model),
                rerank_model=tuple(find(each)[0] for each in serve.rerank_model),
            ),
            values_of(EngineOptions, arguments),
            Settings(**values_of(Settings, arguments)),
        )

    @property
    def engine(self) -> EngineOptions:
        """The engine options of every model."""
        return EngineOptions(
            **{name: value for name, value in self.engine_values.items() if name not in _OF_ONE_MODEL},
            max_concurrent=self.settings.max_concurrent,
            max_waiting=self.settings.max_queue,
        )

    @property
    def names_other_models(self) -> bool:
        """Whether models are named in other ways than by --model."""
        chosen = self.serve
        others = (
            chosen.config,
            chosen.models_dir,
            chosen.hf_cache,
            chosen.embedding_model,
            chosen.rerank_model,
        )
        return any(others)

    @property
    def demo_name(self) -> str | None:
        """The name of the demo model that is served; None if --model names a real one, or others are served alone."""
        chosen = self.serve.model
        if chosen is None:
            return None if self.names_other_models else MODEL_NAME
        return chosen if not Path(chosen).is_dir() and demo_path(chosen) is not None else None

    def named_model(self) -> ModelSpec | None:
        """Return the model that is named with --model: the demo, unless other options name models."""
        options = self.serve
        if options.model is None and self.names_other_models:
            return None
        names = [name for name, _ in options.adapter_path]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigurationError(
                f"--adapter-path: there are two adapters called {duplicates[0]!r}; "
                "give each a name of its own (NAME=PATH)."
            )
        demo = self.demo_name
        source = str(demo_path(demo)) if demo is not None else str(options.model)
        engine = {name: value for name, value in self.engine_values.items() if name in _OF_ONE_MODEL}
        engine["adapters"] = dict(options.adapter_path)
        engine["adapter"] = _DEFAULT_ADAPTER if _DEFAULT_ADAPTER in names else None
        return ModelSpec(
            name=options.model_id or demo or _name_of(source),
            source=source,
            pinned=True,
            named_on_command_line=True,
            defaults=ModelDefaults(
                template_kwargs=options.chat_template_args,
                temperature=0.0 if demo and self.settings.temperature is None else None,
            ),
            engine=engine,
        )

    def embedding_and_rerank_models(self) -> list[ModelSpec]:
        """Return the models named with --embedding-model and --rerank-model; the demo, where none is named."""
        is_demo = self.serve.model is None and not self.names_other_models
        specs: list[ModelSpec] = []
        named: list[tuple[ModelType, tuple[str, ...]]] = [
            ("embedding", (EMBEDDING_MODEL_NAME,) if is_demo else self.serve.embedding_model),
            ("rerank", self.serve.rerank_model),
        ]
        for kind, sources in named:
            for source in sources:
                is_folder = Path(source).expanduser().is_dir()
                demo = None if is_folder or kind == "rerank" else demo_path(source)
                if not is_folder and not is_repository(source) and demo is None:
                    raise ConfigurationError(
                        f"--{kind}-model {source}: there is no such folder, and a repository is written owner/name."
                    )
                specs.append(
                    ModelSpec(
                        name=_name_of(source),
                        source=str(demo or source),
                        type=kind,
                        ttl=self.serve.ttl or None,
                        named_on_command_line=True,
                    )
                )
        return specs


def _name_of(source: str) -> str:
    folder = Path(source).expanduser()
    return folder.resolve().name if folder.is_dir() else source
