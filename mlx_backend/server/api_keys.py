"""The API keys that are accepted, by name. They are kept as digests and compared in constant time.

They come from `--api-key`, from `--api-keys` and from the file of `--api-key-file` (api_key_file.py), which `reload`
reads again. Knows no HTTP, and not how limits are counted.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from typing import TYPE_CHECKING

from mlx_backend.registry.errors import ConfigurationError
from mlx_backend.server import api_key_file
from mlx_backend.server.api_key_file import ApiKey

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mlx_backend.settings import Settings

DEFAULT_NAME = "default"
"""The name of the key that is given without one (`--api-key`)."""


def check_exposure(settings: Settings) -> None:
    """Raise ConfigurationError if other machines could use the server without a key and nobody said that they may."""
    has_key = bool(settings.api_key or settings.api_keys or settings.api_key_file)
    if has_key and not settings.auth:
        raise ConfigurationError("--no-auth lets everybody in, but a key is set too: leave out one of them.")
    if not (has_key or _is_loopback(settings.host)) and settings.auth:
        raise ConfigurationError(
            f"On {settings.host or 'every address'} other machines can connect: set a key with --api-key or "
            "--api-key-file, or say --no-auth to let everybody in without one."
        )


def _is_loopback(host: str) -> bool:
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
        """Whether a request needs one. A file that has lost all its keys lets nobody in."""
        settings = self._settings
        return bool(self._keys or settings.api_key_file is not None)

    @property
    def names(self) -> list[str]:
        """The names of all keys."""
        return [key.name for key in self._keys]

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
        keys += api_key_file.read(settings.api_key_file)
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
