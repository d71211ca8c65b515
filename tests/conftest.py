"""What holds for every test, before anything imports MLX."""

import os

# An M5's GPU computes float32 as TF32 (10 bits of mantissa) from macOS 26.2 on, unless it is told not to when MLX is
# imported. What tests compare to within 1e-5 would then differ in the third digit.
os.environ.setdefault("MLX_ENABLE_TF32", "0")
