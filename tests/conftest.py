"""What holds for every test, before anything imports MLX."""

import os

# An M5's GPU computes float32 as TF32 (10 bits of mantissa) from macOS 26.2 on, unless it is told not to when MLX is
# imported. What tests compare to within 1e-5 would then differ in the third digit.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

# MLX is imported before any engine can arrange for a fast BLAS. Tests in this process compare replies alone and in a
# crowd to the last token, and OpenBLAS rounds a row differently among others, as a GPU does. Servers in processes of
# their own have one.
import mlx.core  # noqa: F401
