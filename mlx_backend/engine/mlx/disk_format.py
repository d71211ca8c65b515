"""The file format of a prompt checkpoint: a token prefix and its KV caches, in safetensors.

Knows bytes and mlx-lm's cache layers; nothing of folders, limits or threads. The arrays are laid out as by mlx-lm's
`save_prompt_cache`, so that its `load_prompt_cache` reads them. The metadata holds the model's fingerprint, the
tokens, and a checksum of everything else, data and header.

`serialise` is for the thread that owns MLX. It returns plain memory, which any thread may write.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import os
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm import __version__ as mlx_lm_version
from mlx_lm.models import cache as mlx_lm_caches

from mlx_backend.engine.mlx.kv_cache import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FORMAT = "1"
MAX_HEADER_BYTES = 100 << 20  # the limit of safetensors itself
CHUNK_BYTES = 8 << 20
# What reading a file that we did not write can raise.
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)

_NO_CHECKSUM = b"0" * 8
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
        if path.suffix == ".safetensors":
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                length = int.from_bytes(file.read(8), "little")
                content = file.read(min(length, MAX_HEADER_BYTES))
            about = f"{path.name} {status.st_size} {status.st_mtime_ns}"
        elif path.suffix == ".py" or path.name in {"config.json", "adapter_config.json"}:
            content = path.read_bytes()
            about = path.name
        else:
            continue
        digest.update(f"{about} {len(content)}\n".encode() + content)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A file's contents before it is written: the header, still without a checksum, and the arrays."""

    header: bytes
    arrays: list[np.ndarray[Any, Any]]  # views of evaluated MLX arrays, not copies

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return 8 + len(self.header) + sum(each.nbytes for each in self.arrays)

    def write_to(self, file: BinaryIO, before_chunk: Callable[[], object]) -> None:
        """Write the file; `before_chunk` is called before each chunk, and may raise to abandon it."""
        file.write(len(self.header).to_bytes(8, "little") + self.header)
        checksum = zlib.crc32(self.header)
        for each in self.arrays:
            plain = np.ascontiguousarray(each).reshape(-1).view(np.uint8)
            for at in range(0, plain.size, CHUNK_BYTES):
                before_chunk()
                chunk = plain[at : at + CHUNK_BYTES].data
                file.write(chunk)
                checksum = zlib.crc32(chunk, checksum)
        file.seek(8 + self.header.index(_NO_CHECKSUM))
        file.write(b"%08x" % checksum)


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
        "checksum": _NO_CHECKSUM.decode(),  # the first eight zeros of the header
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
        return _read_header(file, fingerprint)[1]


def read_layers(path: Path, tokens: bytes, fingerprint: str) -> list[Any]:
    """Read the layers and evaluate them. Raises one of UNREADABLE unless the file is intact and holds the tokens."""
    with path.open("rb") as file:
        header, held, expected = _read_header(file, fingerprint)
        if held != tokens:
            raise ValueError("it holds other tokens")
        checksum = zlib.crc32(header.replace(expected, _NO_CHECKSUM, 1))
        while chunk := file.read(CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
        if b"%08x" % checksum != expected:
            raise ValueError("its checksum is wrong")
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


def _read_header(file: BinaryIO, fingerprint: str) -> tuple[bytes, bytes, bytes]:
    """Return the header's bytes, the tokens, and the checksum."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
        raise ValueError("it is truncated or not a safetensors file")
    header = file.read(length)
    entries = json.loads(header)
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
    return header, tokens, about["0.checksum"].encode()
