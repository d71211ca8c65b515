"""Tables of a TOML file: read, checked by pydantic, and every mistake in them named with what would be right.

Knows no tables and keys: those of the models file are in config_file.py, those of API keys in server/api_keys.py.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from mlx_backend.conversation.json_values import excerpt
from mlx_backend.declaration import SettingError
from mlx_backend.registry.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from pathlib import Path

    from pydantic_core import ErrorDetails

    from mlx_backend.declaration import Setting


def read_text(path: Path) -> str:
    """Read a file. Raises ConfigurationError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigurationError(f"There is no file {str(path)!r}.") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: byte {error.start} is not UTF-8; save it as UTF-8.") from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from None


def decode(text: str, name: str) -> dict[str, Any]:
    """Return the tables of a file's text; `name` is the file's, for messages. Raises ConfigurationError."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{name} is not TOML: {error}.") from None
    except RecursionError:
        raise ConfigurationError(f"{name} is nested too deeply.") from None


def toml_key(key: str) -> str:
    """Return a key as TOML spells it."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else excerpt(key)


class _Table(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)


def table_model(name: str, keys: Mapping[str, Setting], types: Mapping[str, Any]) -> type[BaseModel]:
    """Return the type of a table with these keys; `types` has those that a setting's kind does not say."""
    fields: dict[str, Any] = {
        key: (types.get(key) or setting.kind.annotation(), None) for key, setting in keys.items()
    }
    return create_model(name, __base__=_Table, **fields)


class TableParser:
    """Parses the tables of one file, and goes on after a mistake so that all of them are reported.

    `keys` are those of one thing's own table, `thing` is what it describes ("a model"), `header` how that table begins.
    The values of `secret` keys are not repeated. `removed` are keys of earlier versions, and what became of them.
    """

    def __init__(
        self,
        keys: Mapping[str, Setting],
        *,
        thing: str,
        header: str,
        folder: Path | None = None,
        secret: Collection[str] = (),
        removed: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.mistakes: list[str] = []
        self._keys = keys
        self._thing = thing
        self._header = header
        self._folder = folder
        self._secret = secret
        self._removed = removed

    def raise_mistakes(self, name: str) -> None:
        """Raise the ConfigurationError that names every mistake, if there is one; `name` is the file's."""
        if self.mistakes:
            raise ConfigurationError("\n".join(f"{name}: {mistake}" for mistake in self.mistakes))

    def check_tables(self, tables: Mapping[str, Any], known: Collection[str]) -> None:
        """Refuse what is no table of such a file."""
        for key in tables:
            if key not in known:
                self.refuse_unknown(toml_key(key), key, known, "a table of this file")

    def values(self, where: str, table: Any, model: type[BaseModel]) -> dict[str, Any]:
        """Return the values of one table, without those that are wrong."""
        if not isinstance(table, dict):
            self.refuse(where, table, f"must be a table: [{where}]")
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

    def check_name(self, where: str, name: str, check: Callable[[str], object]) -> None:
        """Add the mistake of a table's name, if `check` raises SettingError for it."""
        try:
            check(name)
        except SettingError as error:
            self.mistakes.append(f"{where}: the name {error}.")

    def refuse(self, where: str, value: Any, right: str) -> None:
        """Add the mistake of a value."""
        self.mistakes.append(f"{where} = {excerpt(value)}: {right}.")

    def refuse_unknown(self, path: str, key: str, known: Iterable[str], what: str) -> None:
        """Add the mistake of a key that means nothing, with the one it resembles."""
        names = sorted(known)
        near = difflib.get_close_matches(key.replace("-", "_").lower(), names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}."
        self.mistakes.append(f"{path} is not {what}; {hint}")

    def _report(self, where: str, key: str, value: Any, error: ErrorDetails, model: type[BaseModel]) -> None:
        path = f"{where}.{toml_key(key)}"
        if error["type"] != "extra_forbidden":
            reason = error.get("ctx", {}).get("error")
            right = (
                str(reason) if isinstance(reason, SettingError) else f"must be {self._keys[key].kind.words}"
            )
            if key in self._secret:
                self.mistakes.append(f"{path}: {right}.")
            else:
                self.refuse(path, value, right)
        elif key in self._keys:
            right = f"belongs to {self._thing.replace('a ', 'one ', 1)}: write it below its {self._header}"
            self.refuse(path, "…" if key in self._secret else value, right)
        elif key in self._removed:
            self.mistakes.append(f"{path} {self._removed[key]}.")
        else:
            self.refuse_unknown(path, key, model.model_fields, f"a setting of {self._thing}")
