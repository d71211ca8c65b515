"""Loads the tensors of a file that PyTorch wrote, without PyTorch and without running the pickle's code.

Such a file is a zip archive: one pickle that describes the tensors, and a file for each storage, a block of numbers. A
pickle is a program; this unpickler lets it build dictionaries and tensors, and call nothing else.

Some very popular models (bge-m3) were only ever published like this.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_DTYPES = {
    "FloatStorage": mx.float32,
    "HalfStorage": mx.float16,
    "BFloat16Storage": mx.bfloat16,
    "LongStorage": mx.int64,
    "IntStorage": mx.int32,
    "ShortStorage": mx.int16,
    "CharStorage": mx.int8,
    "ByteStorage": mx.uint8,
    "BoolStorage": mx.bool_,
}


def load_tensors(file: Path) -> dict[str, mx.array]:
    """Return a file's tensors by name. Raises ValueError for anything but a file of plain tensors."""
    try:
        with zipfile.ZipFile(file) as archive:
            [index] = [name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl"]
            folder = index.removesuffix("data.pkl")
            if f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder") != b"little":
                raise ValueError("its byte order is not little-endian")
            with archive.open(index) as stream:
                loaded = _Unpickler(stream, archive, folder).load()
    except Exception as error:  # a manipulated pickle may fail in any way
        raise ValueError(f"{file.name} is not a file of tensors that can be loaded: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{file.name} holds a {type(loaded).__name__} instead of tensors by name")
    return {str(name): value for name, value in loaded.items() if isinstance(value, mx.array)}


@dataclass(frozen=True, slots=True)
class _StorageType:
    """Stands for one of PyTorch's storage classes, which a pickle only refers to."""

    dtype: mx.Dtype


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: Any, archive: zipfile.ZipFile, folder: str) -> None:
        super().__init__(stream)
        self._archive, self._folder = archive, folder
        self._storages: dict[str, mx.array] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the few names that such a file may refer to."""
        if module == "torch" and name in _DTYPES:
            return _StorageType(_DTYPES[name])
        known: dict[tuple[str, str], Callable[..., Any]] = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("torch._utils", "_rebuild_parameter"): _parameter,
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it wants to use {module}.{name}")
        return known[module, name]

    def persistent_load(self, pid: Any) -> mx.array:
        """Return a storage's numbers."""
        tag, storage_type, key, _location, count = pid
        if tag != "storage" or not isinstance(storage_type, _StorageType):
            raise pickle.UnpicklingError(f"it holds {tag!r}")
        if key not in self._storages:
            data = self._archive.read(f"{self._folder}data/{key}")
            if len(data) != count * storage_type.dtype.size:
                raise pickle.UnpicklingError(
                    f"a storage has {len(data)} bytes instead of {count * storage_type.dtype.size}"
                )
            buffer: Any = memoryview(data)
            plain = mx.array(buffer) if data else mx.zeros((0,), mx.uint8)
            self._storages[key] = plain.view(storage_type.dtype)
        return self._storages[key]


def _tensor(
    storage: mx.array, offset: int, shape: Sequence[int], strides: Sequence[int], *_: Any
) -> mx.array:
    """Return the view of a storage that a tensor is. Raises UnpicklingError for one that reaches beyond it."""
    numbers = [offset, *shape, *strides]
    if len(shape) != len(strides) or any(type(number) is not int or number < 0 for number in numbers):
        raise pickle.UnpicklingError(f"a tensor has shape {shape}, strides {strides} and offset {offset}")
    if not prod(shape):
        return mx.zeros(shape, storage.dtype)
    last = offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    if last >= storage.size:
        raise pickle.UnpicklingError("a tensor reaches beyond its storage")
    return mx.as_strided(storage, shape, strides, offset)


def _parameter(data: mx.array, *_: Any) -> mx.array:
    return data
