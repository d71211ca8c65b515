"""What holds for every test, before anything imports MLX."""

import gc
import os
from pathlib import Path

# Collecting makes hundreds of thousands of objects that stay: to look through them again and again took a third of it.
gc.disable()

# Each server that a test starts would compile the whole package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# An M5's GPU computes float32 as TF32 (10 bits of mantissa) from macOS 26.2 on, unless it is told not to when MLX is
# imported. What tests compare to within 1e-5 would then differ in the third digit.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

# Nothing is kept for the user: models are tried in every test that loads one, whatever other tests found right.
# Hugging Face's own folders stay where they are, which it looks for there too.
os.environ.setdefault(
    "HF_HOME", str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface").expanduser())
)
os.environ["XDG_CACHE_HOME"] = f"{os.devnull}/cache"

# MLX is imported before any engine can arrange for a fast BLAS. Tests in this process compare replies alone and in a
# crowd to the last token, and OpenBLAS rounds a row differently among others, as a GPU does. Servers in processes of
# their own have one.
import mlx.core  # noqa: E402, F401


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
