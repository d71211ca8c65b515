"""Loads the tensors of a file that PyTorch wrote, without PyTorch and without running the pickle's code.

Such a file is a zip archive: one pickle that describes the tensors (state_dict.py reads it), and a file for each
storage, a block of numbers. PyTorch does not compress them, so no more memory is needed than the file has bytes.

Some very popular models (bge-m3) were only ever published like this.
"""

from __future__ import annotations

import zipfile
from math import prod
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_backend.embedding.mlx.state_dict import MAX_BYTES, read_state_dict

if TYPE_CHECKING:
    from pathlib import Path

    from mlx_backend.embedding.mlx.state_dict import Storage, TensorView

_MAX_DIMENSIONS = 8
_MAX_SIZE = (1 << 31) - 1  # of a dimension, as MLX counts


def load_tensors(file: Path) -> dict[str, mx.array]:
    """Return a file's tensors by name. Raises ValueError for anything but a file of plain tensors."""
    try:
        with zipfile.ZipFile(file) as archive:
            return _tensors(_Archive(archive))
    except Exception as error:  # a manipulated file may fail in any way
        raise ValueError(f"{file.name} is not a file of tensors that can be loaded: {error}") from error


class _Archive:
    """The files in an archive, none of which is compressed, and which together are no larger than it."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        [index] = [name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl"]
        self.folder = index.removesuffix("data.pkl")
        self._archive = archive
        self._names = frozenset(archive.namelist())
        self._left = _size(archive)

    def __contains__(self, name: str) -> bool:
        return self.folder + name in self._names

    def read(self, name: str, *, most: int | None = None) -> bytes:
        """Return a file's bytes."""
        info = self._archive.getinfo(self.folder + name)
        if info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{name} is compressed, which PyTorch's files never are")
        self._left -= info.file_size
        if self._left < 0:
            raise ValueError("its parts overlap")
        if most is not None and info.file_size > most:
            raise ValueError(f"{name} has {info.file_size} bytes; at most {most} are read")
        return self._archive.read(info)


def _size(archive: zipfile.ZipFile) -> int:
    stream: Any = archive.fp
    stream.seek(0, 2)
    size: int = stream.tell()
    return size


def _tensors(archive: _Archive) -> dict[str, mx.array]:
    if "byteorder" in archive and archive.read("byteorder", most=16) != b"little":
        raise ValueError("its byte order is not little-endian")
    views = read_state_dict(archive.read("data.pkl", most=MAX_BYTES))
    storages: dict[str, mx.array] = {}
    tensors: dict[str, mx.array] = {}
    for name, view in views.items():
        if view.storage.key not in storages:
            storages[view.storage.key] = _numbers(archive, view.storage)
        tensors[name] = _tensor(storages[view.storage.key].view(_dtype(view.storage)), view)
    return tensors


def _dtype(storage: Storage) -> mx.Dtype:
    dtype: mx.Dtype = getattr(mx, storage.dtype)
    return dtype


def _numbers(archive: _Archive, storage: Storage) -> mx.array:
    """Return a storage's bytes."""
    data = archive.read(f"data/{storage.key}")
    nbytes = storage.count * _dtype(storage).size
    if len(data) != nbytes:
        raise ValueError(f"a storage has {len(data)} bytes instead of {nbytes}")
    buffer: Any = memoryview(data)
    return mx.array(buffer) if data else mx.zeros((0,), mx.uint8)


def _tensor(storage: mx.array, view: TensorView) -> mx.array:
    """Return a tensor. Raises ValueError for one that is larger than its storage, or reaches beyond it."""
    shape, strides, offset = view.shape, view.strides, view.offset
    if (
        len(shape) != len(strides)
        or len(shape) > _MAX_DIMENSIONS
        or any(type(number) is not int or not 0 <= number <= _MAX_SIZE for number in [*shape, *strides])
        or type(offset) is not int
        or offset < 0
    ):
        raise ValueError(f"a tensor has shape {shape}, strides {strides} and offset {offset}"[:300])
    if not prod(shape):
        return mx.zeros(shape, storage.dtype)
    last = offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    if last >= storage.size or prod(shape) > storage.size:
        raise ValueError("a tensor reaches beyond its storage")
    return mx.as_strided(storage, shape, strides, offset)
