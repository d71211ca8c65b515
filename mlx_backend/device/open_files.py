"""The process's limit on open files while mlx-lm is imported.

`mlx_lm.utils` sets it to 2,048, with 4,096 as the hard limit, for models with many files. That lowers a limit that was
raised for connections, takes away the right to raise it again, and fails where the hard limit is lower, so that no
model could be loaded there.
"""

from __future__ import annotations

import resource
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

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
