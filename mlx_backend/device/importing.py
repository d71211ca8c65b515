"""The one way to MLX's first import in a process: with a fast BLAS in its place, and the limit on open files kept.

Whoever imports a module that imports MLX, from one that does not, does it in this block; a test holds that. What was
found is logged here, for people.
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
    "with which prompts take many times as long as they need to. Install a fast one (Debian and Ubuntu: apt install "
    "libopenblas0-pthread) or a C compiler (apt install gcc), with which NumPy's is used, and start again"
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
        log.log(level, "A BLAS is not used. %s.", reason)
    if found.is_slow and choice != "off":
        log.warning("%s, %s.", found, _ADVICE)
    else:
        log.info("%s.", found)
