"""The disk cache: prompt checkpoints in a folder, kept across restarts, within a number of bytes.

Knows files and their names; disk_format.py knows what is in them. Which prefixes are worth storing is the caller's
decision.

A file appears whole, by being renamed, and is never changed after that; its modification time is the time of its last
use. So several servers may share a folder without a lock. A file that has vanished is simply not there, and whichever
server writes next removes the least recently used files.

Threads: the engine's thread calls everything here. It hands what is to be written to a writer thread, which never
touches MLX: a thread that has run MLX aborts the process if it is alive when the interpreter exits, while the writer
can be left behind.

A folder may hold other people's files. Only names of our own two patterns are ever counted or removed.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import secrets
import shutil
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlx_backend.engine.mlx.disk_format import (
    UNREADABLE,
    model_fingerprint,
    read_layers,
    read_tokens,
    serialise,
)
from mlx_backend.engine.mlx.kv_cache import TOKEN_BYTES, as_bytes
from mlx_backend.errors import EngineRefused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from mlx_backend.engine.mlx.disk_format import Checkpoint

__all__ = ["DiskCheckpoints", "StoredCheckpoint", "model_fingerprint"]

log = logging.getLogger(__name__)

MAX_QUEUED = 4  # checkpoints in the write queue; each holds on to its arrays
MAX_QUEUED_BYTES = 1 << 30  # of the queue, if it has more than one
MAX_CLOSE_SECONDS = 10.0  # to finish writing in when the cache is closed
LEFTOVER_SECONDS = 600.0  # after which no server can still be writing a partial file

_NAME = re.compile(r"prompt-([0-9a-f]{16})-[0-9a-f]{40}\.safetensors")
_PARTIAL = re.compile(r"prompt-[0-9a-f]{32}\.partial")


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint in the folder."""

    path: Path
    tokens: bytes = field(repr=False)

    @property
    def length(self) -> int:
        """How many tokens it holds."""
        return len(self.tokens) // TOKEN_BYTES


class _AbandonedError(Exception):
    """The cache was closed and has no time left to finish writing."""


class DiskCheckpoints:
    """One model's checkpoints, in a folder that may hold those of other models too."""

    def __init__(self, folder: Path, *, max_bytes: int, fingerprint: str) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self._fingerprint = fingerprint
        self._model = hashlib.sha256(fingerprint.encode()).hexdigest()[:16]
        self._thread: threading.Thread | None = None
        self._has_warned = False
        self._abandoned = False
        self._lock = threading.Condition()  # guards everything below
        self._stored: dict[bytes, StoredCheckpoint] = {}
        self._queued: dict[bytes, Checkpoint] = {}  # oldest first
        self._writing: bytes | None = None
        self._closing = False

    def __len__(self) -> int:
        return len(self._stored)

    def open(self) -> None:
        """Make the folder, list what is in it, and start the writer. Raises EngineRefused if it cannot be used."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(self.folder, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            self._rescan()
        except OSError as error:
            raise EngineRefused(
                f"{self.folder} cannot hold prompt checkpoints: {_reason(error)}. "
                "Name a folder that can be written to, or none."
            ) from error
        self._closing = self._abandoned = False
        self._thread = threading.Thread(target=self._write_queued, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def find_longest(self, tokens: Sequence[int] | bytes, *, beyond: int = 0) -> StoredCheckpoint | None:
        """Find the longest stored prefix of the tokens that is longer than `beyond`."""
        key = as_bytes(tokens)
        with self._lock:
            prefixes = (
                stored
                for stored in self._stored.values()
                if stored.length > beyond and key.startswith(stored.tokens)
            )
            return max(prefixes, key=lambda stored: stored.length, default=None)

    def has(self, tokens: Sequence[int] | bytes) -> bool:
        """Whether exactly this prefix is stored or queued to be written."""
        key = as_bytes(tokens)
        with self._lock:
            return key in self._stored or key in self._queued or key == self._writing

    def read(self, stored: StoredCheckpoint) -> list[Any] | None:
        """Return the layers, evaluated; None if the file has vanished or is damaged. A damaged file is removed."""
        try:
            os.utime(stored.path)
            return read_layers(stored.path, stored.tokens, self._fingerprint)
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("The prompt checkpoint %s cannot be read: %s.", stored.path, _reason(error))
        except UNREADABLE as error:
            _remove_damaged(stored.path, error)
        with self._lock:
            self._stored.pop(stored.tokens, None)
        return None

    def write(self, tokens: Sequence[int] | bytes, layers: list[Any]) -> None:
        """Queue a checkpoint to be written. Its arrays must never be changed afterwards."""
        if self._thread is None or self._closing or self.max_bytes <= 0 or self.has(tokens):
            return
        key = as_bytes(tokens)
        try:
            checkpoint = serialise(key, layers, self._fingerprint)
        except Exception as error:  # a reply must not fail because a checkpoint does
            self._warn_once(error)
            return
        if checkpoint.size > self.max_bytes:
            return
        with self._lock:
            self._queued[key] = checkpoint
            while len(self._queued) > 1 and (
                len(self._queued) > MAX_QUEUED
                or sum(each.size for each in self._queued.values()) > MAX_QUEUED_BYTES
            ):
                del self._queued[next(iter(self._queued))]
            self._lock.notify_all()

    def flush(self) -> None:
        """Wait until the write queue is empty."""
        with self._lock:
            self._lock.wait_for(self._is_idle)

    def close(self) -> None:
        """Finish writing if there is time, leave no partial file, and stop the writer."""
        if self._thread is None:
            return
        with self._lock:
            self._closing = True
            self._lock.notify_all()
            if not self._lock.wait_for(self._is_idle, timeout=MAX_CLOSE_SECONDS):
                self._queued.clear()
                self._abandoned = True
        self._thread.join(MAX_CLOSE_SECONDS)
        self._thread = None

    def _is_idle(self) -> bool:
        return not self._queued and self._writing is None

    def _warn_once(self, error: Exception) -> None:
        """Warn once, and again only after something was written in between."""
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "Prompt checkpoints cannot be written to %s: %s. Replies are not affected; after a restart "
                "their prompts are prefilled again.",
                self.folder,
                _reason(error),
            )

    # -- the writer thread, and `open` -----------------------------------------------------------------------

    def _write_queued(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._queued or self._closing)
                if not self._queued:
                    return
                key = next(iter(self._queued))
                checkpoint = self._queued.pop(key)
                self._writing = key
            try:
                self._save(key, checkpoint)
                self._rescan()
                self._has_warned = False
            except _AbandonedError:
                pass
            except Exception as error:  # whatever it was, the next one may succeed
                self._warn_once(error)
            del checkpoint  # and its arrays
            with self._lock:
                self._writing = None
                self._lock.notify_all()

    def _save(self, key: bytes, checkpoint: Checkpoint) -> None:
        if shutil.disk_usage(self.folder).free < checkpoint.size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path = self.folder / f"prompt-{self._model}-{hashlib.sha256(key).hexdigest()[:40]}.safetensors"
        partial = self.folder / f"prompt-{secrets.token_hex(16)}.partial"
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "wb") as file:
                checkpoint.write_to(file, self._check_abandoned)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            _remove(partial)
            raise

    def _check_abandoned(self) -> None:
        if self._abandoned:
            raise _AbandonedError

    def _rescan(self) -> None:
        """List what the folder holds now, and remove leftovers and whatever is over the limit."""
        with self._lock:
            known = {stored.path.name: stored for stored in self._stored.values()}
        found: dict[str, StoredCheckpoint] = {}
        sizes: list[tuple[int, str, int]] = []  # last use, name and size
        for name, status in _files(self.folder):
            ours = _NAME.fullmatch(name)
            if ours is None:
                if _PARTIAL.fullmatch(name) and status.st_mtime < time.time() - LEFTOVER_SECONDS:
                    _remove(self.folder / name)
                continue
            if ours[1] == self._model:
                stored = known.get(name) or self._recognise(self.folder / name)
                if stored is None:
                    continue
                found[name] = stored
            sizes.append((status.st_mtime_ns, name, status.st_size))
        total = sum(size for _, _, size in sizes)
        for _, name, size in sorted(sizes):
            if total <= self.max_bytes:
                break
            _remove(self.folder / name)
            found.pop(name, None)
            total -= size
        with self._lock:
            self._stored = {stored.tokens: stored for stored in found.values()}

    def _recognise(self, path: Path) -> StoredCheckpoint | None:
        try:
            return StoredCheckpoint(path, read_tokens(path, self._fingerprint))
        except OSError:
            return None
        except UNREADABLE as error:
            _remove_damaged(path, error)
            return None


def _files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                if entry.is_file(follow_symlinks=False):
                    yield entry.name, entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # another server has just removed it
                continue


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be removed: %s.", path, _reason(error))


def _remove_damaged(path: Path, error: Exception) -> None:
    log.warning("The prompt checkpoint %s is damaged and was removed: %s.", path, error)
    _remove(path)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
