"""A faster BLAS for MLX's CPU build on Linux, if one is available. Call `use_fast_blas` before MLX is imported.

MLX's wheel for Linux links the reference BLAS, some forty times slower than a tuned one. NumPy's wheel contains
OpenBLAS under other names and with 64-bit integers: a few lines of C forward the usual names to it, and the library
whose symbols were loaded globally first wins. On macOS none of this is needed or done. Knows nothing of models.
"""

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

_FORWARD: Final = """
#include <stdint.h>
#define FORWARD(NAME, TYPE) \\
  extern void scipy_##NAME##64_(int, int, int, int64_t, int64_t, int64_t, TYPE, const TYPE *, int64_t, \\
                                const TYPE *, int64_t, TYPE, TYPE *, int64_t); \\
  void NAME(int order, int ta, int tb, int m, int n, int k, TYPE alpha, const TYPE *a, int lda, \\
            const TYPE *b, int ldb, TYPE beta, TYPE *c, int ldc) { \\
    scipy_##NAME##64_(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc); \\
  }
FORWARD(cblas_sgemm, float)
FORWARD(cblas_dgemm, double)
"""


def use_fast_blas() -> str:
    """Make MLX use NumPy's OpenBLAS, on one thread by default; return a line that says what happened."""
    if sys.platform != "linux":
        return "BLAS: the system's"
    if "mlx.core" in sys.modules:
        return "BLAS: MLX's own (MLX was imported too early to change it)"
    numpy = importlib.util.find_spec("numpy")
    openblas = (
        sorted(Path(numpy.origin).parents[1].glob("numpy.libs/libscipy_openblas64_*.so"))
        if numpy and numpy.origin
        else []
    )
    compiler = shutil.which("gcc") or shutil.which("cc")
    if not openblas or compiler is None:
        return "BLAS: MLX's own, slow (no NumPy with OpenBLAS, or no C compiler)"
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        for library_file in sorted(openblas[0].parent.glob("lib*fortran*.so*")) + openblas[:1]:
            ctypes.CDLL(str(library_file), mode=ctypes.RTLD_GLOBAL)
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder) / "forward.c", Path(folder) / "forward.so"
            source.write_text(_FORWARD, encoding="ascii")
            command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source), str(openblas[0])]
            subprocess.run(command, check=True, capture_output=True)
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"BLAS: MLX's own, slow ({error})"
    return f"BLAS: OpenBLAS of NumPy, {os.environ['OPENBLAS_NUM_THREADS']} thread(s)"
