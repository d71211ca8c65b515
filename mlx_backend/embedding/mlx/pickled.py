"""The tensors of a file that PyTorch wrote, read without running what it says.

Such a file is a zip archive: one pickle that names tensors and where their numbers are, and a file for each block of
numbers. A pickle is a program; this reader lets it build dictionaries and tensors, and call nothing else.

Some of the models people use most (bge-m3) were only ever published like this.
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


def tensors(file: Path) -> dict[str, mx.array]:
    """Return a file's tensors by name. Raises ValueError for what is not a file of plain tensors."""
    try:
        with zipfile.ZipFile(file) as archive:
            [index] = [name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl"]
            folder = index.removesuffix("data.pkl")
            if f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder") != b"little":
                raise ValueError("its numbers are written in another order of bytes")
            with archive.open(index) as stream:
                found = _Reader(stream, archive, folder).load()
    except Exception as error:  # a pickle that was tampered with fails in any way it likes
        raise ValueError(f"{file.name} is not a file of tensors that can be read here: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file.name} holds a {type(found).__name__}, and no tensors by name")
    return {str(name): value for name, value in found.items() if isinstance(value, mx.array)}


@dataclass(frozen=True, slots=True)
class _Type:
    """Stands for a class of PyTorch's, which is only ever named."""

    dtype: mx.Dtype


class _Reader(pickle.Unpickler):
    def __init__(self, stream: Any, archive: zipfile.ZipFile, folder: str) -> None:
        super().__init__(stream)
        self._archive, self._folder = archive, folder
        self._blocks: dict[str, mx.array] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the few things that such a file may name."""
        if module == "torch" and name in _DTYPES:
            return _Type(_DTYPES[name])
        known: dict[tuple[str, str], Callable[..., Any]] = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("torch._utils", "_rebuild_parameter"): _parameter,
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it wants to use {module}.{name}")
        return known[module, name]

    def persistent_load(self, pid: Any) -> mx.array:
        """Return a block of numbers."""
        word, kind, key, _place, count = pid
        if word != "storage" or not isinstance(kind, _Type):
            raise pickle.UnpicklingError(f"it holds {word!r}")
        if key not in self._blocks:
            data = self._archive.read(f"{self._folder}data/{key}")
            if len(data) != count * kind.dtype.size:
                raise pickle.UnpicklingError(
                    f"a block has {len(data)} bytes instead of {count * kind.dtype.size}"
                )
            numbers: Any = memoryview(data)
            plain = mx.array(numbers) if data else mx.zeros((0,), mx.uint8)
            self._blocks[key] = plain.view(kind.dtype)
        return self._blocks[key]


def _tensor(block: mx.array, offset: int, shape: Sequence[int], strides: Sequence[int], *_: Any) -> mx.array:
    """Cut a tensor out of its block; one that would reach beyond it is an error."""
    numbers = [offset, *shape, *strides]
    if len(shape) != len(strides) or any(type(number) is not int or number < 0 for number in numbers):
        raise pickle.UnpicklingError(f"a tensor of {shape} in steps of {strides} from {offset}")
    if not prod(shape):
        return mx.zeros(shape, block.dtype)
    last = offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    if last >= block.size:
        raise pickle.UnpicklingError("a tensor reaches beyond its numbers")
    return mx.as_strided(block, shape, strides, offset)


def _parameter(data: mx.array, *_: Any) -> mx.array:
    return data
