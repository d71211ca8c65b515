"""How short of memory the operating system says it is. Only macOS says it; it was not tried on a Mac.

Knows nothing of what is done about it.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

type Pressure = Literal["none", "warning", "critical"]

_NAME = b"kern.memorystatus_vm_pressure_level"
_WARNING, _CRITICAL = 2, 4  # 1 is normal: DISPATCH_MEMORYPRESSURE_… of <dispatch/source.h>


def memory_pressure() -> Pressure:
    """Return what macOS says now, "none" elsewhere. Takes microseconds."""
    function = _sysctlbyname()
    return "none" if function is None else read_pressure(function)


def read_pressure(sysctlbyname: Callable[..., int]) -> Pressure:
    """Return what the C function of this name says; "none" where it does not know."""
    level, size = ctypes.c_uint(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_uint))
    if sysctlbyname(_NAME, ctypes.byref(level), ctypes.byref(size), None, 0) != 0:
        return "none"
    if level.value >= _CRITICAL:
        return "critical"
    return "warning" if level.value >= _WARNING else "none"


@cache
def _sysctlbyname() -> Any:
    if sys.platform != "darwin":
        return None
    function = ctypes.CDLL(None).sysctlbyname
    pointers = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    function.argtypes = [ctypes.c_char_p, *pointers, ctypes.c_size_t]
    return function
