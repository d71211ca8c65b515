"""Bounded caches, safe to share between threads. They know nothing of what they hold.

`TtlCache`    values that are fetched: kept for a while, and fetched by one caller at a time
`BoundedMap`  values that are stored: kept until newer ones take their place
`LastValues`  values that outlive the process: in memory, and in a folder of small files if there is one
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import threading
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT_TTL = 30.0
"""Seconds a value, or a failure to get one, is kept."""

DEFAULT_MAX_ENTRIES = 64

MAX_FILES = 64
"""Files of one folder."""

MAX_FILE_BYTES = 256 * 1024
"""Bytes of one value. A server that lists a thousand models takes about this much."""


class TtlCache[T]:
    """Values by key, each fetched again `ttl` seconds after it came. `clock` returns seconds.

    `ttl` may depend on the value that a fetch returned (None is a failure), so that a failure is soon tried again.
    """

    def __init__(
        self,
        ttl: float | Callable[[T | None], float] = DEFAULT_TTL,
        *,
        max_entries: int = DEFAULT_MAX_ENTRIES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ttl = ttl
        self._max_entries, self._clock = max_entries, clock
        self._lock = threading.Lock()
        self._fetch_locks: dict[str, threading.Lock] = {}
        self._entries: dict[str, tuple[float, T | None]] = {}

    def get(self, key: str, fetch: Callable[[], T | None]) -> T | None:
        """Return the cached value, or fetch it. A fetch that returns None keeps the value known before."""
        value, is_fresh = self._lookup(key)
        if is_fresh:
            return value
        with self._lock:
            fetch_lock = self._fetch_locks.setdefault(key, threading.Lock())
        with fetch_lock:
            value, is_fresh = self._lookup(key)
            if is_fresh:
                return value
            fetched = fetch()
            ttl = self._ttl(fetched) if callable(self._ttl) else self._ttl
            value = value if fetched is None else fetched
            with self._lock:
                if self._fetch_locks.get(key) is not fetch_lock:
                    return value  # cleared meanwhile: later callers must get something newer
                self._entries.pop(key, None)
                self._entries[key] = (self._clock() + ttl, value)
                while len(self._entries) > self._max_entries:
                    self._fetch_locks.pop(next(iter(self._entries)), None)
                    del self._entries[next(iter(self._entries))]
            return value

    def forget(self, key: str) -> None:
        """Fetch this key's value again when it is asked for next. If that fails, the value known before stays."""
        with self._lock:
            if (entry := self._entries.get(key)) is not None:
                self._entries[key] = (0.0, entry[1])

    def clear(self) -> None:
        """Forget everything, also what is being fetched now."""
        with self._lock:
            self._entries.clear()
            self._fetch_locks.clear()

    def _lookup(self, key: str) -> tuple[T | None, bool]:
        with self._lock:
            expires, value = self._entries.get(key, (0.0, None))
            return value, key in self._entries and self._clock() < expires


class BoundedMap[K, V]:
    """The latest value of each key; the ones written longest ago are dropped first."""

    def __init__(self, *, max_entries: int = 256) -> None:
        self._max_entries = max_entries
        self._lock = threading.Lock()
        self._entries: dict[K, V] = {}

    def get(self, key: K, default: V) -> V:
        """Return the key's value."""
        with self._lock:
            return self._entries.get(key, default)

    def set(self, key: K, value: V) -> None:
        """Write the key's value."""
        with self._lock:
            self._entries.pop(key, None)
            self._entries[key] = value
            while len(self._entries) > self._max_entries:
                del self._entries[next(iter(self._entries))]


class LastValues[T]:
    """Values of one type, by key. Without a folder (`keep_in`) they live as long as the process.

    One file a key, named by a digest of the key, so that several processes may use one folder: each file is written
    whole next to its place and then moved there. What cannot be read (spoilt, of another version, too large) counts as
    never written, and what cannot be written (a read-only folder, a full disk) is kept in memory only. The files are
    bounded in number and in bytes; the ones written longest ago go first. Never raises.
    """

    def __init__(
        self, value_type: type[T], *, max_files: int = MAX_FILES, max_file_bytes: int = MAX_FILE_BYTES
    ) -> None:
        self._value_type = value_type
        self._max_files, self._max_file_bytes = max_files, max_file_bytes
        self._values: BoundedMap[str, T | None] = BoundedMap(max_entries=max_files)
        self._folder: Path | None = None

    def keep_in(self, folder: Path) -> None:
        """Keep the values in a folder from now on; it is made when the first one is written."""
        self._folder = folder

    def get(self, key: str) -> T | None:
        """Return the key's last value, whichever process set it."""
        value = self._read(_file(self._folder, key)) if self._folder is not None else None
        return self._values.get(key, None) if value is None else value

    def set(self, key: str, value: T) -> None:
        """Keep the key's value. One that this process set last is not written again."""
        if self._values.get(key, None) == value:
            return
        self._values.set(key, value)
        if self._folder is not None:
            with suppress(OSError, ValueError):
                self._write(_file(self._folder, key), self._adapter.dump_json(value))
                self._remove_oldest(self._folder)

    @cached_property
    def _adapter(self) -> TypeAdapter[T]:
        return TypeAdapter(self._value_type)

    def _read(self, file: Path) -> T | None:
        with suppress(OSError, ValueError):
            # Not opened unless it is a file: a pipe in its place would never end.
            if stat.S_ISREG(file.stat().st_mode):
                with file.open("rb") as opened:
                    content = opened.read(self._max_file_bytes + 1)
                return self._adapter.validate_json(content) if len(content) <= self._max_file_bytes else None
        return None

    def _write(self, file: Path, content: bytes) -> None:
        if len(content) > self._max_file_bytes:
            return
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".tmp", delete=False) as temporary:
            try:
                temporary.write(content)
                temporary.close()
                Path(temporary.name).replace(file)
            except OSError:
                Path(temporary.name).unlink(missing_ok=True)
                raise

    def _remove_oldest(self, folder: Path) -> None:
        files = sorted(os.scandir(folder), key=lambda entry: entry.stat().st_mtime, reverse=True)
        for entry in files[self._max_files :]:
            Path(entry.path).unlink(missing_ok=True)


def _file(folder: Path, key: str) -> Path:
    return folder / f"{hashlib.sha256(key.encode(errors='replace')).hexdigest()}.json"
