"""The API keys that are accepted, by name. They are kept as digests and compared in constant time.

They come from `--api-key`, from `--api-keys` and from the file of `--api-key-file`, which `reload` reads again:

    [defaults]                      # for all keys of the file
    requests_per_minute = 60

    [keys]
    carol = "sk-…"                  # a key that has the defaults

    [keys.alice]                    # the name in logs and metrics
    key = "sk-…"                    # or key_sha256 = "…", the SHA-256 of the key in hexadecimal digits
    tokens_per_minute = 200_000
    models = ["gpt-oss-20b", "mlx-community/*"]
    priority = 1

A key's own table wins over `[defaults]`. All mistakes of a file are reported at once, and no message repeats a key.

Knows no HTTP, and not how limits are counted.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import PlainValidator

from mlx_backend.declaration import Kind, Setting, SettingError, text, whole
from mlx_backend.registry.config_file import check_names
from mlx_backend.registry.errors import ConfigurationError
from mlx_backend.registry.toml_tables import TableParser, decode, read_text, table_model, toml_key
from mlx_backend.settings import check_key, key_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mlx_backend.settings import Settings

DEFAULT_NAME = "default"
"""The name of the key that is given without one (`--api-key`)."""
_SECRET = ("key", "key_sha256")
_MAX_PRIORITY = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """What a key allows. None for a limit is no limit, no `models` are all of them."""

    name: str
    digest: bytes = field(repr=False)
    """SHA-256 of the key in UTF-8."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    models: tuple[str, ...] = ()
    """Names of models, or patterns of them as a shell has them."""
    priority: int = 0
    is_shared: bool = False
    """Whether it is one key for all clients, which then differ only by their addresses."""


def check_exposure(settings: Settings) -> None:
    """Raise ConfigurationError if others could use the server without a key, and no option says that they may."""
    has_key = bool(settings.api_key or settings.api_keys or settings.api_key_file)
    if has_key and not settings.auth:
        raise ConfigurationError("--no-auth lets everybody in, but a key is set too: leave out one of them.")
    if not (has_key or is_loopback(settings.host)) and settings.auth:
        raise ConfigurationError(
            f"On {settings.host or 'every address'} other machines can connect: set a key with --api-key or "
            "--api-key-file, or say --no-auth to let everybody in without one."
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class ApiKeys:
    """The keys of one server. Safe to use from any thread."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigurationError for a file that is wrong, and for keys that contradict each other."""
        self._settings = settings
        self._keys = _keys_of(settings)

    @property
    def are_required(self) -> bool:
        """Whether a request needs one. A file that has lost all its keys lets no one in."""
        settings = self._settings
        return bool(self._keys or settings.api_key_file is not None)

    def find(self, given: bytes) -> ApiKey | None:
        """Return the key that was sent; None if it is none of them."""
        digest = hashlib.sha256(given).digest()
        found = None
        for key in self._keys:  # all of them, so that the time says nothing
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found

    def reload(self) -> None:
        """Read the file again. Raises ConfigurationError, and then everything stays as it was."""
        self._keys = _keys_of(self._settings)


def _keys_of(settings: Settings) -> tuple[ApiKey, ...]:
    keys: list[ApiKey] = []
    if settings.api_key is not None:
        keys.append(ApiKey(name=DEFAULT_NAME, digest=_digest(settings.api_key), is_shared=True))
    keys += [ApiKey(name=name, digest=_digest(key)) for name, key in settings.api_keys or ()]
    if settings.api_key_file is not None:
        keys += parse(read_text(settings.api_key_file), name=str(settings.api_key_file))
    if (refusal := _contradiction(keys)) is not None:
        raise ConfigurationError(refusal)
    return tuple(keys)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _contradiction(keys: Iterable[ApiKey]) -> str | None:
    by_name: dict[str, ApiKey] = {}
    by_digest: dict[bytes, ApiKey] = {}
    for key in keys:
        if by_name.setdefault(key.name, key) is not key:
            return f"There are two API keys called {key.name!r}; give each a name of its own."
        if (other := by_digest.setdefault(key.digest, key)) is not key:
            return f"The API keys {other.name!r} and {key.name!r} are the same; give each person another."
    return None


def parse(text: str, *, name: str = "keys.toml") -> list[ApiKey]:
    """Parse a file's text. Raises ConfigurationError."""
    tables = decode(text, name)
    parser = _Parser()
    keys = parser.parse(tables)
    parser.raise_mistakes(name)
    return keys


def _key(value: object) -> bytes:
    if not isinstance(value, str):
        raise SettingError("must be a text in quotes")
    return hashlib.sha256(check_key(value).encode()).digest()


def _key_sha256(value: object) -> bytes:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", value):
        raise SettingError("must be the 64 hexadecimal digits of a SHA-256, in quotes")
    return bytes.fromhex(value)


def _models(value: object) -> tuple[str, ...]:
    if not value:
        raise ValueError
    return check_names(value)


LIMITS: Mapping[str, Setting] = {
    "requests_per_minute": Setting(
        kind=whole(1), help="how many requests it may send in a minute", default="no limit"
    ),
    "tokens_per_minute": Setting(
        kind=whole(1), help="how many tokens its prompts and replies may have in a minute", default="no limit"
    ),
    "models": Setting(
        kind=Kind(words='a list of names: ["one", "owner/*"]', metavar="", type=tuple, parse=str),
        help="the models that it may use and is shown; `*` stands for anything",
        default="all",
    ),
    "priority": Setting(
        kind=whole(-_MAX_PRIORITY, _MAX_PRIORITY),
        help="lower is served sooner; the `priority` of a request can only add to it",
        default="0",
    ),
}
KEYS: Mapping[str, Setting] = {
    "key": Setting(kind=text("KEY"), help="what clients send; this or `key_sha256` is required"),
    "key_sha256": Setting(
        kind=text("DIGEST", "64 hexadecimal digits"),
        help="its SHA-256 instead, so that the file tells no key",
    ),
    **LIMITS,
}
_TYPES: Mapping[str, Any] = {
    "key": Annotated[bytes, PlainValidator(_key)],
    "key_sha256": Annotated[bytes, PlainValidator(_key_sha256)],
    "models": Annotated[tuple[str, ...], PlainValidator(_models)],
}


_DefaultsTable = table_model("DefaultsTable", LIMITS, _TYPES)
_KeyTable = table_model("KeyTable", KEYS, _TYPES)


class _Parser(TableParser):
    """Parses one file."""

    def __init__(self) -> None:
        super().__init__(KEYS, thing="a key", header='[keys."name"]', secret=_SECRET)

    def parse(self, tables: Mapping[str, Any]) -> list[ApiKey]:
        self.check_tables(tables, ("defaults", "keys"))
        shared = self.values("defaults", tables.get("defaults", {}), _DefaultsTable)
        keys = tables.get("keys", {})
        if not isinstance(keys, dict):  # not `refuse`, which would repeat it
            self.mistakes.append('keys must be tables: [keys."name"].')
            return []
        found = [self._api_key(name, table, shared) for name, table in keys.items()]
        return [key for key in found if key is not None]

    def _api_key(self, name: str, table: Any, shared: Mapping[str, Any]) -> ApiKey | None:
        where = f"keys.{toml_key(name)}"
        self.check_name(where, name, key_name)
        if isinstance(table, str):
            table = {"key": table}
        if not isinstance(table, dict):  # not `values`, which would repeat it
            self.mistakes.append(f"{where}: must be a key in quotes, or a table: [{where}].")
            return None
        own = self.values(where, table, _KeyTable)
        given = [each for each in _SECRET if each in table]
        if len(given) != 1:
            self.mistakes.append(f"{where} needs a key or key_sha256{', not both' if given else ''}.")
        digests = [own.pop(each) for each in _SECRET if each in own]
        if len(digests) != 1:
            return None
        return ApiKey(name=name, digest=digests[0], **{**shared, **own})
