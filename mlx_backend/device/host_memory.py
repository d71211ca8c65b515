"""Memory that the process has freed and its C library still holds.

glibc gives every thread an arena of its own and keeps what was freed in it: ten requests of a few megabytes, each
prepared in another thread, leave gigabytes behind. Other C libraries give it back by themselves; there nothing is done.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

_M_ARENA_MAX = -8  # of <malloc.h>
_ARENAS = 2


def limit_arenas() -> None:
    """Have all threads share a few arenas. Without effect on those that there are: call it before threads start."""
    if (library := _glibc()) is not None:
        library.mallopt(_M_ARENA_MAX, _ARENAS)


def give_back_free_memory() -> None:
    """Give what is free in whole pages back to the system. Takes some milliseconds."""
    if (library := _glibc()) is not None:
        library.malloc_trim(0)


@cache
def _glibc() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None
