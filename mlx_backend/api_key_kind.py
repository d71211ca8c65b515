"""The kinds of settings that hold API keys: one, or named ones (alice=KEY,bob=KEY). No error repeats a key."""

import re

from mlx_backend.declaration import Kind, SettingError

type NamedKeys = tuple[tuple[str, str], ...]


def key_name(value: object) -> str:
    """Return the name of an API key, which is written to logs and metrics. Raises SettingError."""
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", value):
        raise SettingError("must be 1 to 64 letters, digits, dots, hyphens or underscores")
    return value


def check_key(key: str) -> str:
    """Return an API key that a header can hold. Raises SettingError."""
    if not key.strip():
        raise SettingError("is empty (an unset variable?)")
    if key != key.strip() or not key.isprintable():
        raise SettingError("must be on one line, without blanks at either end")
    return key


def _named_keys(value: str) -> NamedKeys:
    """Return the keys in alice=KEY,bob=KEY. The errors repeat none of them."""
    pairs = [part.strip().partition("=") for part in value.split(",") if part.strip()]
    for position, (name, equals, key) in enumerate(pairs, 1):
        if not equals or not key:
            raise SettingError(f"key {position} is not written NAME=KEY")
        try:
            key_name(name)
        except SettingError as error:
            raise SettingError(f"the name of key {position} {error}") from None
        try:
            check_key(key)
        except SettingError as error:
            raise SettingError(f"key {position} {error}") from None
    if not pairs:
        raise SettingError("is empty (an unset variable?)")
    return tuple((name, key) for name, _, key in pairs)


API_KEY = Kind(words="a key", metavar="KEY", type=str, parse=check_key, show=lambda _: "…")
NAMED_KEYS = Kind(
    words="names with a key each, such as alice=KEY,bob=KEY",
    metavar="NAME=KEY,…",
    type=tuple[tuple[str, str], ...],
    parse=_named_keys,
    show=lambda _: "…",
)
