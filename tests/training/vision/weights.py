"""Weights in a safetensors file, as NumPy's arrays of float32. Knows no names of weights."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file


def save(weights: Mapping[str, np.ndarray], path: Path) -> None:
    """Write weights, as MLX marks its own; an older file stays whole until the new one is."""
    part = path.with_name(f"{path.name}.part")
    arrays = {name: np.ascontiguousarray(value, np.float32) for name, value in weights.items()}
    save_file(arrays, part, metadata={"format": "mlx"})
    part.replace(path)


def load(path: Path) -> dict[str, np.ndarray]:
    """Return the weights of a file that `save` wrote."""
    return load_file(path)
