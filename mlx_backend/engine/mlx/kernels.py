"""The kernels that a model's networks need for many rows, and what computes until they are compiled.

Knows networks; how kernels are compiled is in layers/kernel_compiler.py.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from mlx_backend.device.mlx import KERNEL_FOLDER_VARIABLE, prepares_for_lengths
from mlx_backend.engine.mlx.arrays import coarsest_dtype
from mlx_backend.layers.dequantize import dequantized, dequantized_by_kernel
from mlx_backend.layers.few_rows import ALIGNED_OUTPUTS, use_few_rows
from mlx_backend.layers.kernel_compiler import KernelCompiler, jobs_for
from mlx_backend.layers.many_rows import kind_of, many_rows_candidates

if TYPE_CHECKING:
    from collections.abc import Callable

    import mlx.core as mx

    from mlx_backend.engine.mlx.loading import Networks
    from mlx_backend.layers.dequantize import Dequantizer

log = logging.getLogger(__name__)


class Kernels:
    """The kernels that networks need for many rows: compiled in other processes, if they are not there.

    Until they are, products of many rows are computed a few rows at a time. `on_done` may be set to a function to be
    called, on another thread, when they are.
    """

    def __init__(self, networks: Networks, folder: Path) -> None:
        every = networks.every
        layers = [
            layer
            for network in every
            for layer in network.modules()
            if isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding)
            or (type(layer) is QuantizedSwitchLinear and layer.output_dims % ALIGNED_OUTPUTS == 0)
        ]
        candidates = many_rows_candidates(every, dequantize=networks.options.dequantize)
        self._jobs = jobs_for(layers, candidates, coarsest_dtype(every[0]))
        self.on_done: Callable[[], None] = lambda: None
        self._compiler = KernelCompiler(self._jobs, folder, lambda: self.on_done())
        self._stop = None if self.is_done else use_few_rows()
        if not self.is_done:
            log.info(
                "Kernels for %d operations are compiled in the background, since this machine has none yet. "
                "Until then long prompts take longer, and so do many replies at once.",
                len(self._jobs) - len(self._compiler.found),
            )

    @classmethod
    def of(cls, networks: Networks) -> Kernels | None:
        """Return those of a model's networks; None where MLX has no such kernels, or no folder to store them in."""
        folder = os.environ.get(KERNEL_FOLDER_VARIABLE)
        return cls(networks, Path(folder)) if prepares_for_lengths() and folder else None

    @property
    def is_done(self) -> bool:
        """Whether all have been compiled, or cannot be."""
        return self._compiler.is_done

    @property
    def progress(self) -> str:
        """How many have been compiled, for people."""
        return f"{len(self._compiler.found)} of {len(self._jobs)}"

    def find(self, layer: Any, _: mx.Dtype) -> Dequantizer | None:
        """Return what dequantises layers like this one; None if they are not to be."""
        kind = kind_of(layer)
        for job, layers in self._jobs.items():
            if job.operation == "many" and any(kind_of(each) == kind for each in layers):
                found = self._compiler.found.get(job)
                if found is None or not found["is_right"]:
                    return None
                return dequantized_by_kernel if found["by_kernel"] else dequantized
        return None

    def close(self) -> None:
        """End what is being compiled, and go back to MLX's own functions."""
        self._compiler.close()
        if self._stop is not None:
            self._stop()
            self._stop = None
