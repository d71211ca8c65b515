"""What this machine is, as far as advice and refusals depend on it: its system, its processor and its memory.

And how short of memory its system says it is: only macOS says it, and that was not tried on a Mac.

Standard library only, and nothing of this package: `make setup` runs this file with the Python that it found, before
anything is installed. Tests make a `Machine` of their own.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

MIN_MACOS = 14
"""The oldest version that MLX is built for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine. `macos` is the version's first number, 0 elsewhere; `memory` is in bytes."""

    system: str = "Linux"
    processor: str = "x86_64"
    macos: int = 0
    is_translated: bool = False  # an Intel program on Apple silicon, by Rosetta
    memory: int = 0

    @property
    def is_mac(self) -> bool:
        """Whether it runs macOS."""
        return self.system == "Darwin"

    def refusal(self) -> str | None:
        """Return why MLX cannot run here, as a sentence with advice; None where it can."""
        if not self.is_mac:
            return None
        if self.is_translated:
            return (
                "This Python is built for Intel and runs under Rosetta, for which there is no MLX. Install one for "
                "Apple silicon (brew install python@3.12, with the Homebrew in /opt/homebrew), and use that."
            )
        if self.processor != "arm64":
            return "MLX needs a Mac with Apple silicon; this one has an Intel processor."
        if 0 < self.macos < MIN_MACOS:
            return f"MLX needs macOS {MIN_MACOS} or newer; this is macOS {self.macos}."
        return None


def this_machine() -> Machine:
    """Return the machine that this process runs on."""
    system, processor = platform.system(), platform.machine()
    return Machine(
        system=system,
        processor=processor,
        macos=int(platform.mac_ver()[0].partition(".")[0] or 0) if system == "Darwin" else 0,
        is_translated=system == "Darwin" and processor == "x86_64" and _is_translated(),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def _is_translated() -> bool:
    try:
        done = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "sysctl.proc_translated"],
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.stdout.strip() == "1"


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


if __name__ == "__main__":
    sys.exit(this_machine().refusal())
