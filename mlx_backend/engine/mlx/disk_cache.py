"""The disk cache: prompt checkpoints in a folder, kept across restarts, within a number of bytes.

A checkpoint is a token prefix with its KV caches, in safetensors. The arrays are laid out as by mlx-lm's
`save_prompt_cache`, so that its `load_prompt_cache` reads them. The metadata holds the model's fingerprint and the
tokens.

A file appears whole, by being renamed when it is on the disk, and is never changed after that; its modification time is
the time of its last use. So several servers may share a folder without a lock. A file that has vanished is simply not
there, and whichever server writes next removes the least recently used files. A folder may hold other people's files:
only names of our own two patterns are ever counted or removed.

Threads: the engine's thread calls everything here. It hands what is to be written, as plain memory, to a writer thread,
which never touches MLX: a thread that has run MLX aborts the process if it is alive when the interpreter exits, while
the writer can be left running.

Which prefixes are worth storing is the caller's decision.
"""

from __future__ import annotations

import base64
import copy
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm import __version__ as mlx_lm_version
from mlx_lm.models import cache as mlx_lm_caches

from mlx_backend.engine.mlx.kv_cache import TOKEN_BYTES, as_bytes
from mlx_backend.errors import EngineRefused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

log = logging.getLogger(__name__)


FORMAT = "1"
MAX_HEADER_BYTES = 100 << 20
"""The limit of safetensors itself."""
_ALSO_OF_A_MODEL = {"config.json", "adapter_config.json", "model.safetensors.index.json"}
"""Names of files that decide, next to weights and code, what a network computes; the index which weights are read."""
# What reading a file that we did not write can raise.
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)

_DTYPES = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.uint16: "U16",
    mx.uint32: "U32",
    mx.uint64: "U64",
    mx.int8: "I8",
    mx.int16: "I16",
    mx.int32: "I32",
    mx.int64: "I64",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.float32: "F32",
    mx.float64: "F64",
    mx.complex64: "C64",
}


def model_fingerprint(folder: Path, extra: str = "") -> str:
    """Return a digest that differs between any two models, without reading the weights of the model in the folder.

    Of weight files the header, size and modification time count. The tokenizer does not: a cache depends on token ids
    alone. `extra` is whatever else changes a cache, for example an adapter's fingerprint.
    """
    digest = hashlib.sha256(f"{FORMAT}\n{mlx_lm_version}\n{len(extra)}\n{extra}\n".encode())
    for path in sorted(folder.iterdir()):
        if not path.is_file():  # such as a link to what has not been downloaded
            continue
        if path.suffix == ".safetensors":
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                length = int.from_bytes(file.read(8), "little")
                content = file.read(min(length, MAX_HEADER_BYTES))
            about = f"{path.name} {status.st_size} {status.st_mtime_ns}"
        elif path.suffix == ".py" or path.name in _ALSO_OF_A_MODEL:
            content = path.read_bytes()
            about = path.name
        else:
            continue
        digest.update(f"{about} {len(content)}\n".encode() + content)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A file's contents before it is written: the header and the arrays."""

    header: bytes
    arrays: list[np.ndarray[Any, Any]]  # views of evaluated MLX arrays, not copies

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return 8 + len(self.header) + sum(each.nbytes for each in self.arrays)

    def write_to(self, file: BinaryIO) -> None:
        """Write the file."""
        file.write(len(self.header).to_bytes(8, "little") + self.header)
        for each in self.arrays:
            file.write(np.ascontiguousarray(each).data)


def serialise(tokens: bytes, layers: list[Any], fingerprint: str) -> Checkpoint:
    """Serialise a checkpoint: arrays by their paths in the layers' states, and scalars as arrays among them."""
    arrays: dict[str, mx.array] = {}
    scalars: list[Any] = [""]  # mlx-lm's own first entry: an empty list would be dropped
    for name, value in tree_flatten([layer.state for layer in layers]):
        match value:
            case mx.array():
                arrays[name] = value
                continue
            case None:
                kind, arrays[name] = "none", mx.array([])
            case str():
                kind, arrays[name] = "string", mx.array([ord(char) for char in value])
            case _:
                kind, arrays[name] = "scalar", mx.array(value)
        scalars.append((name, kind))
    if {int(name.partition(".")[0]) for name in arrays} != set(range(len(layers))):
        raise ValueError("a layer without a state cannot be stored")
    about = {
        "format": FORMAT,
        "fingerprint": fingerprint,
        "tokens": base64.b64encode(tokens).decode(),
    }
    classes = [_class_name(layer) for layer in layers]
    header: dict[str, Any] = {"__metadata__": dict(tree_flatten([about, classes, scalars]))}
    at = 0
    for name, value in arrays.items():
        end = at + value.nbytes
        header[name] = {"dtype": _DTYPES[value.dtype], "shape": value.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # Arrays of our own over the same memory: writing to a layer then copies, and these stay as they are. NumPy has no
    # bfloat16. And what is not evaluated here could not be evaluated on another thread.
    plain = [
        value.view(mx.uint16) if value.dtype == mx.bfloat16 else copy.copy(value) for value in arrays.values()
    ]
    mx.eval(plain)
    return Checkpoint(text + b" " * (-len(text) % 8), [np.asarray(value) for value in plain])


def read_tokens(path: Path, fingerprint: str) -> bytes:
    """Read only the header and return the file's tokens. Raises one of UNREADABLE unless it is this model's."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            raise ValueError("it is truncated or not a safetensors file")
        entries = json.loads(file.read(length))
    about = entries.pop("__metadata__")
    end = 8 + length + max(entry["data_offsets"][1] for entry in entries.values())
    if end != size:
        raise ValueError(f"it has {size:,} bytes, not {end:,}")
    if about["0.format"] != FORMAT:
        raise ValueError(f"its format is {about['0.format']!r}, not {FORMAT!r}")
    if about["0.fingerprint"] != fingerprint:
        raise ValueError("it is of another model")
    tokens = base64.b64decode(about["0.tokens"], validate=True)
    if not tokens or len(tokens) % TOKEN_BYTES:
        raise ValueError("its tokens are not readable")
    return tokens


def read_layers(path: Path, tokens: bytes, fingerprint: str) -> list[Any]:
    """Read the layers and evaluate them. Raises one of UNREADABLE unless the file is whole and holds the tokens."""
    if read_tokens(path, fingerprint) != tokens:
        raise ValueError("it holds other tokens")
    try:
        layers: list[Any] = mlx_lm_caches.load_prompt_cache(str(path))
        mx.eval([layer.state for layer in layers])
    except RuntimeError as error:  # MLX raises it for every failure
        if not path.exists():
            raise FileNotFoundError(path) from error
        raise ValueError(str(error)) from error
    length = len(tokens) // TOKEN_BYTES
    if any(getattr(layer, "offset", length) != length and not layer.empty() for layer in layers):
        raise ValueError(f"its layers do not hold {length} tokens")
    return layers


def _class_name(layer: Any) -> str:
    """Return the name of the layer's class, or of its nearest base class that mlx-lm can load."""
    for each in type(layer).__mro__:
        name: str = each.__name__
        if getattr(mlx_lm_caches, name, None) is each:
            return name
    raise ValueError(f"{type(layer).__name__} is not one of mlx-lm's cache layers")


__all__ = ["DiskCheckpoints", "StoredCheckpoint", "model_fingerprint"]


MAX_QUEUED, MAX_QUEUED_BYTES = 4, 1 << 30
"""Checkpoints in the write queue, each of which holds on to its arrays, and their bytes if there is more than one."""
MAX_CLOSE_SECONDS = 10.0
"""The time to finish writing when the cache is closed."""
LEFTOVER_SECONDS = 600.0
"""Age of a partial file from which on no server can still be writing it."""

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


class DiskCheckpoints:
    """One model's checkpoints, in a folder that may hold those of other models too."""

    def __init__(self, folder: Path, *, max_bytes: int, fingerprint: str) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self._fingerprint = fingerprint
        self._model = hashlib.sha256(fingerprint.encode()).hexdigest()[:16]
        self._thread: threading.Thread | None = None
        self._has_warned = False
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
        self._closing = False
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
        """Stop the writer, once it has finished writing if there is time."""
        if self._thread is None:
            return
        with self._lock:
            self._closing = True
            self._lock.notify_all()
            has_finished = self._lock.wait_for(self._is_idle, timeout=MAX_CLOSE_SECONDS)
            self._queued.clear()
        if has_finished:
            self._thread.join()
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
                checkpoint.write_to(file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            _remove(partial)
            raise

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
