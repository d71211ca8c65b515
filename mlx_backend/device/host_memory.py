"""Memory that the process has freed and its C library still holds, and objects that Python's collector goes through.

glibc gives every thread an arena of its own and keeps what was freed in it: ten requests of a few megabytes, each
prepared in another thread, leave gigabytes. It also raises, with every large block that is freed, the size from
which on a block is mapped on its own and goes back when it is freed: the buffers of a network, which on a CPU come from
malloc, soon lie among small blocks that stay. Other C libraries give memory back by themselves; there nothing is done.

A loaded model, with all that was imported for it, is some 120,000 objects which stay, and a full collection that goes
through them stops every thread for 60 ms. So those that are there once a model is loaded are left out of collections,
until a model is unloaded.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from functools import cache
from typing import Any

# Parameters of <malloc.h>, and their values.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
# Free bytes at the end of an arena above which they go back, and bytes of a block from which on it is mapped by itself.
_FREE_AT_THE_END, _MAPPED_FROM = 1 << 20, 256 << 10
_ARENAS = 2


def keep_little_free_memory() -> None:
    """Have all threads share a few arenas, and large blocks go back when they are freed.

    Without effect on the arenas that there are: call it before threads start.
    """
    if (library := _glibc()) is not None:
        library.mallopt(_M_ARENA_MAX, _ARENAS)
        library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM)
        library.mallopt(_M_TRIM_THRESHOLD, _FREE_AT_THE_END)


def give_back_free_memory() -> None:
    """Give what is free in whole pages back to the system. Takes some milliseconds."""
    if (library := _glibc()) is not None:
        library.malloc_trim(0)


def leave_out_loaded_objects() -> None:
    """Have Python's collector go only through what is made from now on. Collects all garbage first."""
    gc.collect()
    gc.freeze()


def collect_all_again() -> None:
    """Have it go through everything again: what is left of a model that is gone may be garbage."""
    gc.unfreeze()


@cache
def _glibc() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None
