"""How MLX is first imported in a process: after a fast BLAS is loaded, without PyTorch, and lowering no limit on files.

Every module that does not itself import MLX imports one that does in this block; a test checks that. Logs which BLAS
is used.

`mlx_lm.utils` sets the limit on open files to 2,048, with 4,096 as the hard limit, for models with many files. That
lowers a limit that was raised for connections, takes away the right to raise it again, and fails where the hard limit
is lower, so that no model could be loaded there.
"""

from __future__ import annotations

import logging
import resource
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mlx_backend.device.blas import use_fast_blas

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlx_backend.device.blas import Blas, BlasChoice

log = logging.getLogger(__name__)


_lock = threading.Lock()


@contextmanager
def file_limit_only_raised() -> Iterator[None]:
    """Within the block `resource.setrlimit` raises the soft limit on open files as far as allowed, and lowers none."""
    with _lock:  # what is replaced is the whole process's
        original = resource.setrlimit

        def raise_only(which: int, limits: tuple[int, int], /) -> None:
            if which != resource.RLIMIT_NOFILE:
                original(which, limits)
                return
            soft, hard = resource.getrlimit(which)
            wanted = limits[0] if hard == resource.RLIM_INFINITY else min(limits[0], hard)
            if soft != resource.RLIM_INFINITY and wanted > soft:
                original(which, (wanted, hard))

        resource.setrlimit = raise_only
        try:
            yield
        finally:
            resource.setrlimit = original


@contextmanager
def without_torch() -> Iterator[None]:
    """Within the block transformers, if it is imported for the first time, finds no PyTorch, now and later.

    It would import it wherever it is installed, which takes seconds, and nothing here uses it.
    Code of a model's own may import it afterwards.
    """
    if not sys.modules.keys().isdisjoint(("torch", "transformers")):
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # as documented: it cannot be imported then
    try:
        yield
        if (looks := sys.modules.get("transformers.utils.import_utils")) is not None:
            looks.is_torch_available()  # which remembers what it finds
    finally:
        del sys.modules["torch"]


_ADVICE = (
    "which makes prompts many times slower. Install an optimised BLAS (Debian and Ubuntu: apt install "
    "libopenblas0-pthread), or a C compiler so that NumPy's can be used (apt install gcc libc6-dev), and start again"
)


@contextmanager
def importing_mlx(blas: BlasChoice) -> Iterator[None]:
    """Within the block MLX and mlx-lm may be imported; the first time, `blas` is arranged for before."""
    with file_limit_only_raised(), without_torch():  # in one thread at a time
        found = use_fast_blas(blas)
        if found is not None:
            _log(found, blas)
        yield


def _log(found: Blas, choice: BlasChoice) -> None:
    for reason in found.refused:
        level = logging.WARNING if found.is_slow or reason.startswith(f"{choice}: ") else logging.INFO
        log.log(level, "BLAS not used: %s.", reason)
    if found.is_slow and choice != "off":
        log.warning("%s, %s.", found, _ADVICE)
    else:
        log.info("%s.", found)
