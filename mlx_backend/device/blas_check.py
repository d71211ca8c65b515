"""Whether a BLAS multiplies matrices rightly: `python blas_check.py LIBRARY` exits with 0, or says why not.

A program of its own, because a library that is not right can also end the process: built for another processor, or with
64-bit integers. Of what MLX calls it tries `cblas_sgemm` and `cblas_dgemm`, in row-major order, with matrices of small
whole numbers, whose products NumPy computes exactly without any BLAS. Nothing of this package.
"""

import ctypes
import sys
from itertools import product
from typing import Any

import numpy as np

ROW_MAJOR, PLAIN, TRANSPOSED = 101, 111, 112
# m, n, k: a row and a column by themselves, sizes of which no kernel's blocks are a divisor, and one for all threads
SIZES = ((1, 130, 257), (65, 1, 70), (5, 7, 3), (33, 65, 129), (258, 129, 259))
_PADDING = 3  # elements between the rows
# A library of 32-bit integers does not see the upper half of a register. One of 64-bit integers sees a row that is
# longer than the matrix, and refuses.
_UPPER_HALF = 1 << 32


def problem_of(library: Any) -> str | None:
    """Return why a loaded library cannot be used, or None."""
    for name in ("cblas_sgemm", "cblas_dgemm"):
        if not hasattr(library, name):
            return f"it has no {name}"
    if hasattr(library, "openblas_get_config"):
        library.openblas_get_config.restype = ctypes.c_char_p
        if b"USE64BITINT" in (library.openblas_get_config() or b""):
            return "it takes 64-bit integers"
    for number, real, multiply in (
        (np.float32, ctypes.c_float, library.cblas_sgemm),
        (np.float64, ctypes.c_double, library.cblas_dgemm),
    ):
        matrix = [ctypes.c_void_p, ctypes.c_int]
        sizes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int]
        multiply.restype = None
        multiply.argtypes = [*[ctypes.c_int] * 3, *sizes, real, *matrix, *matrix, real, *matrix]
        for size, *orders in product(SIZES, (PLAIN, TRANSPOSED), (PLAIN, TRANSPOSED)):
            if not _is_right(multiply, number, size, orders):
                return f"it computes wrong products ({'x'.join(map(str, size))}, {multiply.__name__})"
    return None


def _is_right(multiply: Any, number: Any, size: tuple[int, int, int], orders: list[int]) -> bool:
    m, n, k = size
    random = np.random.default_rng(7)
    a, b = random.integers(-4, 5, (m, k)), random.integers(-4, 5, (k, n))
    inputs = [
        np.pad(each if order == PLAIN else each.T, ((0, 0), (0, _PADDING)), constant_values=99).astype(
            number, "C"
        )
        for each, order in zip((a, b), orders, strict=True)
    ]
    found = np.full(
        (m, n + _PADDING), np.nan, number
    )  # which a product overwrites, if nothing is added to it
    given = [value for each in inputs for value in (each.ctypes.data, each.shape[1])]
    multiply(ROW_MAJOR, *orders, m, n | _UPPER_HALF, k, 1.0, *given, 0.0, found.ctypes.data, found.shape[1])
    return np.array_equal(found[:, :n], a @ b) and bool(np.isnan(found[:, n:]).all())


def main() -> int:
    """Try the library that is named; return the exit status."""
    try:
        library = ctypes.CDLL(sys.argv[1])
    except OSError as error:
        print(error)
        return 1
    if problem := problem_of(library):
        print(problem)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
