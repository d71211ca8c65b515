"""The BLAS under MLX on a Linux CPU, in processes of their own: in this one MLX has been imported."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING

import pytest
from server_process import ended, server_process

from mlx_backend.device.blas import default_threads, use_fast_blas

if TYPE_CHECKING:
    from pathlib import Path

    from server_process import ServerProcess

COMPILER = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
IS_CPU_WHEEL = sys.platform == "linux" and any(
    each.name == "mlx-cpu" for each in importlib.metadata.distributions()
)
pytestmark = [
    pytest.mark.skipif(not IS_CPU_WHEEL, reason="only MLX's wheel for Linux CPUs has the slow BLAS"),
    pytest.mark.skipif(COMPILER is None, reason="there is no C compiler"),
]

# Plain loops, in row-major order. HOOK is run by every call, and RESULT is what is written of a sum.
SOURCE = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
static void tell(void) {
  static int told;
  char *name = getenv("BLAS_CALLED");
  if (told++ || !name) return;
  FILE *file = fopen(name, "a");
  fprintf(file, "%d\\n", getpid());
  fclose(file);
}
#define PRODUCT(NAME, TYPE) \\
  void NAME(int order, int ta, int tb, INT m, INT n, INT k, TYPE alpha, const TYPE *a, INT lda, const TYPE *b, \\
            INT ldb, TYPE beta, TYPE *c, INT ldc) { \\
    HOOK; \\
    if (ldc < n) return; \\
    for (INT i = 0; i < m; i++) for (INT j = 0; j < n; j++) { \\
      TYPE sum = 0; \\
      for (INT p = 0; p < k; p++) \\
        sum += (ta == 111 ? a[i * lda + p] : a[p * lda + i]) * (tb == 111 ? b[p * ldb + j] : b[j * ldb + p]); \\
      c[i * ldc + j] = alpha * (RESULT) + (beta ? beta * c[i * ldc + j] : 0); \\
    } \\
  }
PRODUCT(cblas_sgemm, float)
PRODUCT(cblas_dgemm, double)
"""


def compiled(folder: Path, *, integer: str = "int", hook: str = "tell()", result: str = "sum") -> Path:
    source, library = folder / "plain.c", folder / "plain.so"
    source.write_text(SOURCE)
    defined = [f"-DINT={integer}", f"-DHOOK={hook}", f"-DRESULT={result}"]
    command = [str(COMPILER), "-O2", "-shared", "-fPIC", *defined, "-o", str(library), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return library


def answer(server: ServerProcess) -> str:
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


def in_a_process(code: str, **environment: str) -> str:
    """What is printed by code in which `blas` is the module."""
    command = [sys.executable, "-c", f"from mlx_backend.device import blas\n{code}"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=120, check=True
    )
    return done.stdout


def test_a_server_takes_a_fast_blas_and_says_so() -> None:
    with server_process() as server:
        line = server.logged("Matrix products: ")
        assert "INFO Matrix products: OpenBLAS 0." in line
        assert "thread" in line
        assert "Paris" in answer(server)


def test_matrix_products_are_computed_by_the_library_that_is_named(tmp_path: Path) -> None:
    library, called = compiled(tmp_path), tmp_path / "called"
    with server_process("--blas", str(library), BLAS_CALLED=str(called)) as server:
        assert f"Matrix products: {library}" in server.logged("Matrix products: ")
        assert "Paris" in answer(server)
        assert str(server.process.pid) in called.read_text().split()


def test_where_none_may_be_taken_mlx_keeps_its_own() -> None:
    printed = in_a_process("print(blas.use_fast_blas('off'))")
    assert printed.startswith("Matrix products: the reference BLAS of MLX's wheel")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"result": "sum+(m==33&&i==32&&j==64)"}, "it computes wrong products (33x65x129, cblas_sgemm)"),
        ({"result": "sizeof(sum)==8?0:sum"}, "cblas_dgemm)"),
        ({"integer": "int64_t"}, "it c"),  # crashed, or computes wrong products
        ({"hook": "abort()"}, "it crashed (SIGABRT)"),
        ({"hook": "exit(3)"}, "it ended the process"),
    ],
    ids=["one wrong number", "double precision", "64-bit integers", "a crash", "an exit"],
)
def test_a_library_that_is_not_right_is_refused_with_the_reason_and_another_is_taken(
    tmp_path: Path, wrong: dict[str, str], reason: str
) -> None:
    library = compiled(tmp_path, **wrong)
    printed = in_a_process(
        f"from pathlib import Path; found = blas.use_fast_blas(Path({str(library)!r})); print(found, found.refused)"
    )
    assert f"{library}: " in printed
    assert reason in printed
    assert "Matrix products: OpenBLAS 0." in printed


def test_what_a_compiler_says_in_another_encoding_is_no_error(tmp_path: Path) -> None:
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\nprintf 'forward.c: \\305\\344\\377\\n' >&2\nexit 1\n")
    compiler.chmod(0o755)
    code = "blas.SYSTEM_LIBRARIES = (); print(ascii(blas.use_fast_blas().refused))"
    printed = in_a_process(code, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert f"NumPy's wheel: {compiler} failed: forward.c: " in printed


def test_a_library_that_is_not_there_is_an_error_for_people() -> None:
    done = ended("--blas", "/no/such/libopenblas.so")
    assert done.returncode == 2
    assert "--blas: '/no/such/libopenblas.so' is neither auto nor off, nor a file" in done.stderr
    done = ended(MLX_BACKEND_BLAS="fast")
    assert done.returncode == 1
    assert "MLX_BACKEND_BLAS: 'fast' is neither auto nor off" in done.stderr


def test_without_a_compiler_and_a_library_a_warning_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import logging; logging.basicConfig(format='%(levelname)s %(message)s', stream=__import__('sys').stdout)\n"
        "blas.SYSTEM_LIBRARIES = ('libnone.so.0',)\n"
        "from mlx_backend.device.importing import importing_mlx\n"
        "with importing_mlx('auto'): pass"
    )
    first, second = in_a_process(code, PATH=str(tmp_path)).splitlines()
    assert first.startswith("WARNING BLAS not used: NumPy's wheel: its OpenBLAS needs a C compiler")
    assert second.startswith("WARNING Matrix products: the reference BLAS of MLX's wheel")
    assert "apt install libopenblas0-pthread" in second


def test_half_of_the_cores_are_used_unless_the_environment_says_how_many() -> None:
    cores = len(os.sched_getaffinity(0))
    assert 1 <= default_threads() <= max(1, cores // 2)
    code = "found = blas.use_fast_blas(); print(found.threads, blas.os.environ.get('OPENBLAS_NUM_THREADS'))"
    unset = dict.fromkeys(("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"), "")
    assert in_a_process(code, **unset).split() == [str(default_threads())] * 2
    assert in_a_process(code, **unset | {"OPENBLAS_NUM_THREADS": str(cores)}).split() == [str(cores)] * 2


@pytest.mark.parametrize(
    "before",
    [
        "import sys; sys.platform = 'darwin'",
        "import importlib.metadata as found; found.distribution = lambda name: name",  # a CUDA wheel as well
        "import mlx.core",
    ],
    ids=["macOS", "NVIDIA", "MLX was imported"],
)
def test_nothing_is_done_where_nothing_is_to_be_gained(before: str) -> None:
    assert in_a_process(f"{before}\nprint(blas.use_fast_blas())").strip() == "None"


def test_a_library_that_the_process_was_started_with_stays(tmp_path: Path) -> None:
    library = compiled(tmp_path)
    printed = in_a_process("print(blas.use_fast_blas())", LD_PRELOAD=str(library))
    assert printed.strip() == "Matrix products: a library that was already loaded"
    printed = in_a_process("print(blas.use_fast_blas('off').refused)", LD_PRELOAD=str(library))
    assert "off: another one is already loaded (LD_PRELOAD)" in printed, (
        "a choice that has no effect is not ignored"
    )


def test_in_this_process_mlx_keeps_its_own_so_that_replies_are_the_same_in_a_crowd() -> None:
    assert use_fast_blas() is None
