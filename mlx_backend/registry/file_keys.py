"""The keys of the models file: a pydantic model for each kind of table, made from the declarations of settings.

Declares the keys that exist only in the file. Knows where paths lead; nothing of TOML, and nothing of mistakes but
what a value would have to be.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, PlainValidator, ValidationInfo

from mlx_backend.declaration import (
    Kind,
    Setting,
    SettingError,
    declared,
    one_of_words,
    seconds,
    switch,
    text,
)
from mlx_backend.demo import demo_path
from mlx_backend.embedding.embedding_config import EmbeddingOptions
from mlx_backend.models.engine_options import EngineOptions
from mlx_backend.models.model_type import TYPES
from mlx_backend.models.spec import RESERVED_KWARGS, ModelDefaults, is_repository
from mlx_backend.registry.toml_tables import table_model

if TYPE_CHECKING:
    from collections.abc import Mapping

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


def _names(value: object) -> tuple[str, ...]:
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
    "aliases": Annotated[tuple[str, ...], PlainValidator(_names)],
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
        help="unload the model after so many seconds without a request; 0: never",
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
        help="the model itself, or `mlx-demo`, `mlx-demo-vision`, which are included; required",
    ),
    "aliases": Setting(
        kind=_kind('a list of names: ["one", "two"]', tuple), help="further names that clients may use"
    ),
    "pinned": Setting(kind=switch(), help="load the model at start and never unload it"),
    "type": Setting(
        kind=one_of_words(*TYPES), help="what the model is made for", default="what its files say"
    ),
    **EMBEDDING,
    **SHARED_KEYS,
}


SharedTable = table_model("SharedTable", SHARED_KEYS, _TYPES)
ModelTable = table_model("ModelTable", MODEL_KEYS, _TYPES)
