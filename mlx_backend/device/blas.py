"""A fast BLAS for MLX on a Linux CPU. `use_fast_blas` has to run before MLX is imported.

MLX's wheel for such machines, mlx-cpu, links the reference BLAS, whose matrix products take ten to forty times as long.
Of libraries that are loaded globally the linker takes the first one that has a name, so one that is loaded before MLX
takes its place. Candidates, best first:

    the library that was named
    NumPy's OpenBLAS     is there wherever this project is, and as new as NumPy is. It has names of its own and 64-bit
                         integers, so a few lines of C are compiled that forward the usual names to it; nothing else
                         of it gets a name that MLX looks for
    the system's         needs no compiler, but can be old, and takes the place of LAPACK as well

Old builds compute wrong results on some processors, and a library for other processors ends the process: each is tried
by `blas_check.py`, in a process of its own, before it is loaded here.

Threads of OpenBLAS wait for each other without sleeping. If there is no free core for one of them, a product of
microseconds takes until the scheduler's next turn, 4 to 28 ms. So only half of the cores are used, unless the
environment says how many: on 16 cores eight threads took a seventh of one's time, with four cores busy otherwise too,
where sixteen took up to a hundred times as long as eight.

Nothing is done on macOS, with MLX for NVIDIA, or with an MLX that was built here, for a BLAS of choice. Standard
library only, and nothing of this package: benchmarks load this file by its path.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any, Final, Literal

type BlasChoice = Literal["auto", "off"] | Path

SYSTEM_LIBRARIES: Final = (
    "libopenblas.so.0",
    "libopenblasp.so.0",
)  # Debian's and most others'; Fedora's with threads
_COMPILERS: Final = ("gcc", "cc", "clang")
_THREADS: Final = "OPENBLAS_NUM_THREADS"
_THREAD_VARIABLES: Final = (_THREADS, "GOTO_NUM_THREADS", "OMP_NUM_THREADS")  # what OpenBLAS reads
_CHECK: Final = Path(__file__).with_name("blas_check.py")
_CHECK_SECONDS: Final = 30
_CPU_WHEEL: Final = "mlx-cpu"
_CUDA_WHEELS: Final = ("mlx-cuda-12", "mlx-cuda-13", "mlx-cuda")
_NOT_THERE: Final = "cannot open shared object file: No such file"
_SLOW: Final = "the reference BLAS of MLX's wheel, which is slow"

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Blas:
    """What computes MLX's matrix products. `refused` says of each library that was not taken why not."""

    name: str
    threads: int | None = None
    is_slow: bool = False
    refused: tuple[str, ...] = ()

    def __str__(self) -> str:
        threads = "" if self.threads is None else f", {self.threads} thread{'s' * (self.threads != 1)}"
        return f"Matrix products: {self.name}{threads}"


class _RefusedError(Exception):
    """A library is not used. Says why."""


def use_fast_blas(choice: BlasChoice = "auto") -> Blas | None:
    """Load a fast BLAS for MLX, which is imported next, and return what it will use; None where nothing is to be done.

    A library that is not good is no error: the next one is tried.
    """
    if sys.platform != "linux" or "mlx.core" in sys.modules or not _is_cpu_wheel():
        return None
    process = ctypes.CDLL(None)
    if hasattr(process, "cblas_sgemm"):  # LD_PRELOAD, or a call before
        refused_choice = (
            () if choice == "auto" else (f"{choice}: another one is already loaded (LD_PRELOAD)",)
        )
        return _described(process, "a library that was already loaded", refused_choice)
    if choice == "off":
        return Blas(name=_SLOW, is_slow=True)
    if not any(os.environ.get(each) for each in _THREAD_VARIABLES):
        os.environ[_THREADS] = str(default_threads())  # read when a library is loaded
    refused: list[str] = []
    with ExitStack() as scratch:
        for name, find in _candidates(choice):
            library = ""
            try:
                library = find(scratch)
                _check(library)
                loaded = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
            except (_RefusedError, OSError) as error:
                text = str(error).removeprefix(f"{library}: ")
                if library not in SYSTEM_LIBRARIES or not text.startswith(_NOT_THERE):
                    refused.append(f"{name}: {text}")
            else:
                return _described(loaded, name, tuple(refused))
    return Blas(name=_SLOW, is_slow=True, refused=tuple(refused))


def has_fast_blas() -> bool:
    """Whether MLX, once it is imported, multiplies by another BLAS than the slow one that its wheel for CPUs has."""
    return not _is_cpu_wheel() or hasattr(ctypes.CDLL(None), "cblas_sgemm")


def default_threads() -> int:
    """Return half of the processor cores that this process may use, at least one."""
    if sys.platform != "linux":
        return 1
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        cores = min(cores, int(quota) // int(period))  # a container's share
    except (OSError, ValueError):  # there is none, or it is "max"
        pass
    return max(1, cores // 2)


def _is_cpu_wheel() -> bool:
    """Whether MLX is the wheel for CPUs. MLX for NVIDIA is installed in its place, and sometimes over it."""

    def has(name: str) -> bool:
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            return False
        return True

    return has(_CPU_WHEEL) and not any(map(has, _CUDA_WHEELS))


def _candidates(choice: BlasChoice) -> list[tuple[str, Callable[[ExitStack], str]]]:
    """Return the libraries to try: what to call each, and what returns its file, which lives as long as the stack."""

    def just(library: str) -> Callable[[ExitStack], str]:
        return lambda _: library

    named = [(str(choice), just(str(choice.resolve())))] if isinstance(choice, Path) else []
    numpy = [("NumPy's wheel", partial(_forwarder, file)) for file in _of_numpy()]
    return [*named, *numpy, *((name, just(name)) for name in SYSTEM_LIBRARIES)]


def _of_numpy() -> list[Path]:
    """Return the file of the OpenBLAS in NumPy's wheel, if NumPy was installed from that."""
    numpy = importlib.util.find_spec("numpy")
    if numpy is None or numpy.origin is None:
        return []
    return sorted(Path(numpy.origin).parents[1].glob("numpy.libs/libscipy_openblas64_*.so"))[:1]


def _forwarder(openblas: Path, scratch: ExitStack) -> str:
    """Compile a library that has the usual names and calls NumPy's OpenBLAS."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise _RefusedError("its OpenBLAS needs a C compiler, and none was found")
    folder = Path(scratch.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
    source, library = folder / "forward.c", folder / "forward.so"
    source.write_text(_FORWARD, encoding="ascii")
    finding = ["-Xlinker", "-rpath", "-Xlinker", str(openblas.parent)]
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source), str(openblas), *finding]
    done = _run(command, f"{compiler} did not end")
    if done.returncode:
        raise _RefusedError(f"{compiler} failed: {_first_error(done.stderr)}")
    return str(library)


def _check(library: str) -> None:
    """Have a library tried. Raises _RefusedError."""
    if not sys.executable:
        raise _RefusedError("it cannot be tested: the path of the Python interpreter is unknown")
    command = [sys.executable, "-I", str(_CHECK), library]
    done = _run(command, "its test did not end")
    if done.returncode < 0:
        raise _RefusedError(f"it crashed ({Signals(-done.returncode).name})")
    if done.returncode:
        raise _RefusedError(_last_line(done.stdout) or _last_line(done.stderr) or "it ended the process")


def _run(command: list[str], failure: str) -> subprocess.CompletedProcess[str]:
    """Run a command. Raises _RefusedError, which begins with `failure`, if that takes too long."""
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",  # its messages may be in another encoding
            timeout=_CHECK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _RefusedError(f"{failure} within {_CHECK_SECONDS} seconds") from None


def _first_error(text: str) -> str:
    """Return the line of a compiler's messages that says what was wrong; the linker's last one only says that."""
    errors = [line for line in text.splitlines() if "error:" in line or "ld: " in line]
    return errors[0].strip()[:300] if errors else _last_line(text)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2][:300]


def _described(library: Any, origin: str, refused: tuple[str, ...] = ()) -> Blas:
    """Return what a loaded library says of itself, where it is an OpenBLAS."""
    for prefix, suffix in (("openblas_", ""), ("scipy_openblas_", "64_")):
        if hasattr(library, f"{prefix}get_config{suffix}"):
            config = library[f"{prefix}get_config{suffix}"]
            config.restype = ctypes.c_char_p
            version = " ".join((config() or b"").decode(errors="replace").split()[:2])
            threads = int(library[f"{prefix}get_num_threads{suffix}"]())
            return Blas(name=f"{version} in {origin}", threads=threads, refused=refused)
    return Blas(name=origin, refused=refused)
