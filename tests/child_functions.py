"""What tests have done in a process of its own: `child_process.ChildProcesses("child_functions:…")`."""

from __future__ import annotations

import ctypes
import json
import os
import signal


def echo(request: bytes) -> bytes:
    """Return what came, after printing it."""
    print(request)
    return request


def described(_request: bytes) -> bytes:
    """Return what the process is."""
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    return json.dumps({"pid": os.getpid(), "priority": priority, "variables": sorted(os.environ)}).encode()


def loop(_request: bytes) -> bytes:
    """Never return."""
    while True:
        pass


def fill(_request: bytes) -> bytes:
    """Take 4 GB."""
    return b"a" * (1 << 32)


def fill_in_c(_request: bytes) -> bytes:
    """Take 4 GB as a C program that does not look whether it got them."""
    malloc = ctypes.CDLL(None).malloc
    malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    ctypes.memset(malloc(1 << 32) or 0, 1, 1 << 32)
    return b""


def fill_in_rust(_request: bytes) -> bytes:
    """Take ever more in a library that is written in Rust."""
    from tokenizers import NormalizedString

    taken = []
    while True:
        taken.append(NormalizedString("a" * (1 << 24)))


def fail(request: bytes) -> bytes:
    """Raise, or end the process by a signal."""
    if request:
        os.kill(os.getpid(), signal.Signals[request.decode()])
    raise ZeroDivisionError


def write(request: bytes) -> bytes:
    """Write a file."""
    try:
        with open(request, "w") as file:  # noqa: PTH123
            file.write("a")
    except OSError as error:
        return str(error.strerror).encode()
    return b"written"
