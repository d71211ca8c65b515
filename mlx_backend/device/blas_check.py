"""Whether a BLAS multiplies matrices rightly: `python blas_check.py LIBRARY` exits with 0, or says why not.

A program of its own, because a library that is not right can also end the process: built for another processor, or with
64-bit integers. Of what MLX calls it tries `cblas_sgemm` and `cblas_dgemm`, in row-major order. The matrices are of
small whole numbers, so that every sum is exact in any order, and the product is compared times a vector, which takes
far less time than the product itself in Python and misses no single wrong number. Standard library only.
"""

import ctypes
import random
import sys
from array import array
from operator import mul
from typing import Any

ROW_MAJOR, PLAIN, TRANSPOSED = 101, 111, 112
# m, n, k: a row and a column by themselves, sizes of which no kernel's blocks are a divisor, and one for all threads
SMALL = ((1, 130, 257), (65, 1, 70), (5, 7, 3), (33, 65, 129))
LARGE = (258, 129, 259)
# Elements between the rows.
_PADDING = 3
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
    numbers = [each % 9 - 4 for each in random.Random(7).randbytes(150_000)]
    for code, real, multiply in (
        ("f", ctypes.c_float, library.cblas_sgemm),
        ("d", ctypes.c_double, library.cblas_dgemm),
    ):
        multiply.restype = None
        multiply.argtypes = [
            *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int),
            *(
                real,
                ctypes.c_void_p,
                ctypes.c_int,
                ctypes.c_void_p,
                ctypes.c_int,
                real,
                ctypes.c_void_p,
                ctypes.c_int,
            ),
        ]
        trials = [(size, a, b) for size in SMALL for a in (PLAIN, TRANSPOSED) for b in (PLAIN, TRANSPOSED)]
        trials += [(LARGE, PLAIN, PLAIN), (LARGE, PLAIN, TRANSPOSED)]
        for size, a, b in trials:
            if not _is_right(multiply, code, numbers, size, a, b):
                return f"it computes wrong products ({'x'.join(map(str, size))}, {multiply.__name__})"
    return None


def _is_right(
    multiply: Any, code: str, numbers: list[int], size: tuple[int, int, int], a_order: int, b_order: int
) -> bool:
    m, n, k = size
    a, a_rows = _matrix(code, numbers, 11, (m, k) if a_order == PLAIN else (k, m))
    b, b_rows = _matrix(code, numbers, 50_000, (k, n) if b_order == PLAIN else (n, k))
    before = float("nan")  # which a product overwrites, if nothing is added to it
    c = array(code, [before]) * (m * (n + _PADDING))
    multiply(
        *(ROW_MAJOR, a_order, b_order, m, n | _UPPER_HALF, k, 1.0),
        *(a.buffer_info()[0], len(a) // len(a_rows), b.buffer_info()[0], len(b) // len(b_rows)),
        *(0.0, c.buffer_info()[0], n + _PADDING),
    )
    vector = [each or 5 for each in numbers[-n:]]
    b_plain = b_rows if b_order == PLAIN else list(zip(*b_rows, strict=True))
    a_plain = a_rows if a_order == PLAIN else list(zip(*a_rows, strict=True))
    inner = [sum(map(mul, row, vector)) for row in b_plain]
    for i, row in enumerate(a_plain):
        start = i * (n + _PADDING)
        if sum(map(mul, c[start : start + n], vector)) != sum(map(mul, row, inner)):
            return False
        if any(each == each for each in c[start + n : start + n + _PADDING]):  # not to be written
            return False
    return True


def _matrix(
    code: str, numbers: list[int], start: int, shape: tuple[int, int]
) -> tuple["array[float]", list[list[int]]]:
    """Return a matrix as it lies in memory, with padding, and its rows."""
    rows, columns = shape
    values: array[float] = array(code)
    listed = []
    for row in range(rows):
        listed.append(numbers[start + row * columns : start + (row + 1) * columns])
        values.extend(listed[-1])
        values.extend([99.0] * _PADDING)
    return values, listed


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
