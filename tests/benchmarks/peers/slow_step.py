"""Run a module as `python -m` would, with a fast BLAS under MLX and, if wanted, every model step slowed and counted.

    [BENCH_STEP_SECONDS=0.01] [BENCH_STEP_FILE=steps] python slow_step.py MODULE [argument …]

Every server is started through this, ours too, so that only the servers differ. Each forward of gpt_oss first sleeps
for BENCH_STEP_SECONDS, then does its work, and appends one byte to BENCH_STEP_FILE: the file's size is the number of
steps.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

MODELS = (("mlx_lm.models.gpt_oss", "Model"), ("mlx_vlm.models.gpt_oss.language", "LanguageModel"))
BLAS = Path(__file__).resolve().parents[3] / "mlx_backend" / "device" / "blas.py"


def use_fast_blas() -> object:
    """Give MLX the matrix product of this environment's NumPy."""
    spec = importlib.util.spec_from_file_location("fast_blas", BLAS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.use_fast_blas()


def slow_down(seconds: float, file: str) -> None:
    """Slow and count the steps of every gpt_oss in this environment."""
    for module, name in MODELS:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            continue
        try:
            owner = getattr(importlib.import_module(module), name)
        except ImportError:
            continue
        _wrap(owner, seconds, os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND))


def _wrap(owner: Any, seconds: float, descriptor: int) -> None:
    forward = owner.__call__

    @functools.wraps(forward)
    def step(*arguments: Any, **named: Any) -> Any:
        os.write(descriptor, b".")
        time.sleep(seconds)
        return forward(*arguments, **named)

    owner.__call__ = step


def main() -> None:
    """Prepare, then become the module."""
    print(use_fast_blas() or "MLX's own matrix products", file=sys.stderr, flush=True)
    if "BENCH_STEP_SECONDS" in os.environ:
        slow_down(float(os.environ["BENCH_STEP_SECONDS"]), os.environ["BENCH_STEP_FILE"])
    module, sys.argv = sys.argv[1], sys.argv[1:]
    sys.path.pop(0)
    if module.endswith(".py"):
        runpy.run_path(module, run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
