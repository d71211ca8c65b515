"""The last value of each key, kept beyond the process: in memory, and in a folder of small files if there is one.

One file a key, named by a digest of the key, so that several processes may use one folder: each file is written whole
beside its place and then moved there, and nobody merges anything. What cannot be read (spoilt, of another version, too
large) counts as never written, and what cannot be written (a read-only folder, a full disk) is kept in memory only.
The files are bounded in number and in bytes; the ones written longest ago go first. Never raises; knows nothing of
what it keeps.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from pydantic import TypeAdapter

from dify_mlx_provider.upstream.cache import BoundedMap

MAX_FILES = 64
MAX_FILE_BYTES = 256 * 1024
"""Of one value. A server that lists a thousand models takes about this much."""


class LastValues[T]:
    """Values of one type, by key. Without a folder (`keep_in`) they live as long as the process."""

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
