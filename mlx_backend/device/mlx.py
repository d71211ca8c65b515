"""What MLX reports about the device, where it stores compiled kernels, and what loads a network's weights.

Engines and embedding models both need this, and neither may import the other's modules. Knows no requests and no
caches.
"""

from __future__ import annotations

import logging
import os
import platform
import re
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_backend.device.machine import this_machine
from mlx_backend.device.memory import RAM_SHARE, WORKING_SET_SHARE

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

MAX_CACHED_SHARE = 1 / 8
"""Share of an NVIDIA GPU's memory that MLX may hold in freed buffers."""
_CHUNK_BYTES = 1 << 30
"""Bytes of weights that are read between two reports."""
_ADAPTER_PARTS = ("lora_a", "lora_b", "m")


def is_gpu() -> bool:
    """Whether MLX computes on a GPU."""
    return mx.default_device() != mx.Device(mx.cpu)


def prepares_for_lengths() -> bool:
    """Whether MLX computes with CUDA: it needs time for every length of a matrix that it has not seen."""
    return is_gpu() and not mx.metal.is_available()


def gpu_memory() -> int:
    """Return how many bytes an NVIDIA GPU has of its own; 0 if MLX does not compute on one."""
    return int(mx.device_info().get("total_memory", 0)) if prepares_for_lengths() else 0


def gpu_name() -> str:
    """Return the name of the NVIDIA GPU that MLX computes on; empty if it computes on none."""
    return device_name() if prepares_for_lengths() else ""


def device_name() -> str:
    """Return the name of what MLX computes on, by which results of one device are told from those of another."""
    return str(mx.device_info().get("device_name", "GPU")) if is_gpu() else f"CPU {platform.machine()}"


def used_memory() -> int:
    """Return how many bytes arrays take now; freed buffers that MLX keeps are not among them."""
    return int(mx.get_active_memory())


def trim_buffers(*, shares_model: bool = False) -> None:
    """Give freed buffers, which MLX keeps for reuse, back; on an NVIDIA GPU only above `MAX_CACHED_SHARE`.

    Giving them back and getting them again took 5 to 15 % of a prompt's time on an H100. A process that shares a model
    with others gives all of them back: it is one of several for want of memory.
    """
    if mx.get_cache_memory() > (0 if shares_model else gpu_memory() * MAX_CACHED_SHARE):
        mx.clear_cache()


def working_set_limit() -> int | None:
    """Return how many bytes macOS recommends for the GPU, which is also all it wires; None on other systems.

    That is `iogpu.wired_limit_mb` where that is set.
    """
    limit = mx.device_info().get("max_recommended_working_set_size") if mx.metal.is_available() else None
    return int(limit) if limit else None


def set_wired_limit(limit: int) -> None:
    """Let MLX keep `limit` bytes resident. Only on macOS 15 or newer does this do anything."""
    mx.synchronize()
    mx.clear_cache()  # so that freed buffers are not wired in place of weights
    mx.set_wired_limit(limit)


def recommended_memory() -> int:
    """Return how many bytes models and caches may take on this machine if no limit was given."""
    info = mx.device_info()
    recommended = info.get("max_recommended_working_set_size") or info.get("total_memory")
    if recommended:
        return int(int(recommended) * WORKING_SET_SHARE)
    return int(this_machine().memory * RAM_SHARE)


def weight_bytes(network: Any, *, adapter_only: bool = False) -> int:
    """Return how many bytes a network's weights take, or those of its LoRA adapter alone."""
    return sum(
        value.nbytes
        for name, value in tree_flatten(network.parameters())
        if not adapter_only or name.rpartition(".")[2] in _ADAPTER_PARTS
    )


def set_precision(network: Any, name: str) -> None:
    """Use float32 on a CPU: half precision is slower there, and a mixture's experts cannot run in it at all."""
    if is_gpu():
        return
    dtypes = {value.dtype for _, value in tree_flatten(network.parameters())}
    if dtypes & {mx.bfloat16, mx.float16}:
        log.info("%s is in half precision; on this CPU it runs in float32.", name)
        network.set_dtype(mx.float32)


def load_weights(network: Any, on_progress: Callable[[float], None], ranks: int = 1) -> None:
    """Read lazily loaded weights into memory, a gigabyte at a time; `on_progress` gets the share, up to 0.95.

    The rest is for the warm-up. Where several ranks share the network, whole tensors are read for this one's parts, and
    no more of them than a gigabyte is in memory at once.
    """
    weights = [value for _, value in tree_flatten(network.parameters())]
    total, done = sum(value.nbytes for value in weights) or 1, 0
    chunk: list[mx.array] = []
    for value in weights:
        chunk.append(value)
        if sum(each.nbytes for each in chunk) * ranks >= _CHUNK_BYTES or value is weights[-1]:
            mx.eval(chunk)
            mx.clear_cache()  # of what they were made from
            done += sum(each.nbytes for each in chunk)
            chunk = []
            on_progress(0.95 * done / total)


def user_cache_folder() -> Path:
    """Return where what can be made again is kept for the user. Raises RuntimeError if there is no home folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mlx-backend"


# Read by MLX when it compiles or loads its first kernel.
KERNEL_FOLDER_VARIABLE = "MLX_PTX_CACHE_DIR"


def keep_compiled_kernels() -> None:
    """Have MLX store the kernels that it compiles for an NVIDIA GPU in the user's cache folder.

    Compiling them takes minutes the first time. MLX's own folder below /tmp is emptied when the machine starts, and
    other users of the machine could put files there that MLX would then run. Where the variable names a folder, that is
    used. Each version of MLX and kind of GPU gets a folder of its own: MLX tells its files apart by the kernels' names
    alone.
    """
    name = gpu_name()
    if not name or KERNEL_FOLDER_VARIABLE in os.environ:
        return
    device = re.sub(r"\W+", "-", name)
    try:
        folder = user_cache_folder() / "cuda" / f"mlx-{version('mlx')}-{device}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_incomplete(folder)
    except (OSError, RuntimeError) as error:  # no home folder
        log.debug("Compiled kernels stay in MLX's own folder: %s", error)
        return
    os.environ[KERNEL_FOLDER_VARIABLE] = str(folder)


def _remove_incomplete(folder: Path) -> None:
    """Remove kernels that were only partly written: MLX would try, and fail, to load them every time.

    MLX writes a kernel, then the names in it, and its source last.
    """
    for kernel in folder.glob("*.ptx"):
        source = kernel.with_suffix(".cu")
        if not source.is_file() or not source.stat().st_size:
            log.info("A compiled kernel was only partly written, and will be compiled again: %s", kernel.name)
            with suppress(FileNotFoundError):  # another process may have removed it
                kernel.unlink()
