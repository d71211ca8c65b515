"""Where MLX keeps the kernels that it compiles for an NVIDIA GPU, which takes minutes the first time.

By default that is a folder below /tmp, which is emptied when a machine starts, and where other users of it could put
files that MLX would then run. Here it is a folder of the user's own.
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
    """Have MLX keep them in the user's cache folder, unless the variable names another one.

    There is one for each version of MLX and kind of GPU: MLX itself tells its files apart by the kernels' names alone.
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
    """Remove kernels that were not written to their end: MLX would try, and fail, to load them for ever.

    It writes a kernel, the names in it, and at last its source.
    """
    for kernel in folder.glob("*.ptx"):
        source = kernel.with_suffix(".cu")
        if not source.is_file() or not source.stat().st_size:
            log.info("A compiled kernel was not written to its end and is compiled again: %s", kernel.name)
            with suppress(FileNotFoundError):  # another process may have removed it
                kernel.unlink()
