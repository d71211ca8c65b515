"""How MLX is first imported in a process: after a fast BLAS is loaded, and without changing the limit on open files.

Every module that does not itself import MLX imports one that does in this block; a test checks that. Logs which BLAS
is used.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mlx_backend.device.blas import use_fast_blas
from mlx_backend.device.open_files import file_limit_only_raised

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlx_backend.device.blas import Blas, BlasChoice

log = logging.getLogger(__name__)

_ADVICE = (
    "which makes prompts many times slower. Install an optimised BLAS (Debian and Ubuntu: apt install "
    "libopenblas0-pthread), or a C compiler so that NumPy's can be used (apt install gcc libc6-dev), and start again"
)


@contextmanager
def importing_mlx(blas: BlasChoice) -> Iterator[None]:
    """Within the block MLX and mlx-lm may be imported; the first time, `blas` is arranged for before."""
    with file_limit_only_raised():  # in one thread at a time
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
