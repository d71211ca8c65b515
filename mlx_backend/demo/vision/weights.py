"""Weights in a safetensors file: written and read with NumPy alone, float32. Knows no names of weights."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np


def save(weights: Mapping[str, np.ndarray], path: Path) -> None:
    """Write weights, as MLX marks its own; an older file stays whole until the new one is."""
    header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    start = 0
    for name, value in weights.items():
        end = start + value.size * 4
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for value in weights.values():
            file.write(np.ascontiguousarray(value, np.float32).tobytes())
    part.replace(path)


def load(path: Path) -> dict[str, np.ndarray]:
    """Return the weights of a file that `save` wrote."""
    content = path.read_bytes()
    (size,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + size])
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            values = np.frombuffer(content, np.float32, (end - start) // 4, 8 + size + start)
            found[name] = values.reshape(entry["shape"])
    return found
