"""Where MLX stores the kernels that it compiles for an NVIDIA GPU. Compiling them takes minutes the first time.

By default that is a folder below /tmp. It is emptied when the machine starts, and other users of the machine could put
files there that MLX would then run. So a folder in the user's own cache folder is used.
"""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from mlx_backend.device.mlx import gpu_name

log = logging.getLogger(__name__)

VARIABLE = "MLX_PTX_CACHE_DIR"  # MLX reads it when it compiles or loads its first kernel


def keep_compiled_kernels() -> None:
    """Have MLX store compiled kernels in the user's cache folder, unless the variable names another folder.

    Each version of MLX and kind of GPU gets a folder of its own: MLX tells its files apart by the kernels' names alone.
    """
    name = gpu_name()
    if not name or VARIABLE in os.environ:
        return
    device = re.sub(r"\W+", "-", name)
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(root).expanduser() / "mlx-backend" / "cuda" / f"mlx-{version('mlx')}-{device}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_incomplete(folder)
    except (OSError, RuntimeError) as error:  # no home folder
        log.debug("Compiled kernels stay in MLX's own folder: %s", error)
        return
    os.environ[VARIABLE] = str(folder)


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
