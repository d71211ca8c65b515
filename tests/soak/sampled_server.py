"""`mlx-backend` as usual, and one thread more: every few seconds a line of JSON on what the process holds.

    python tests/soak/sampled_server.py SAMPLES SECONDS serve …        # the server's own arguments follow

With 0 seconds it writes one for each line on its standard input, once what is garbage has been collected, and answers
`sampled`.

Each line: seconds since the start, resident memory, MLX's memory in use and its cache, what malloc has given out and
what it keeps though it was freed (bytes; the last two with glibc alone), threads, open files. A sample for which the
system has nothing left, such as a process for `ps`, is left out.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

TASKS, STATM = Path("/proc/self/task"), Path("/proc/self/statm")


class MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`, of all arenas."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def malloc() -> tuple[int, int]:
    """Return the bytes that malloc has given out, and those it keeps though they were freed; zeros without glibc."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return 0, 0
    library.mallinfo2.restype = MallInfo
    info = library.mallinfo2()
    return info.uordblks + info.hblkhd, info.fordblks


def resident() -> int:
    """Return the bytes of memory that are resident. Linux says so without another process."""
    if STATM.exists():
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    command = ["ps", "-o", "rss=", "-p", str(os.getpid())]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) * 1024


def sample() -> dict[str, float]:
    """Return what this process holds now."""
    import mlx.core as mx

    used, free = malloc()
    return {
        "malloc_used": used,
        "malloc_free": free,
        "rss": resident(),
        "mlx_active": mx.get_active_memory(),
        "mlx_cache": mx.get_cache_memory(),
        "threads": len(list(TASKS.iterdir())) if TASKS.exists() else threading.active_count(),
        "files": len(os.listdir("/dev/fd")) - 1,  # noqa: PTH208  # without the one that lists
    }


def write_samples(path: Path, seconds: float) -> None:
    """Write samples for as long as the process lives."""
    started = time.monotonic()
    with path.open("w") as file:
        while seconds or sys.stdin.readline():
            if not seconds:
                gc.collect()
            with suppress(OSError, subprocess.SubprocessError):
                file.write(json.dumps({"seconds": round(time.monotonic() - started, 1), **sample()}) + "\n")
                file.flush()
            if not seconds:
                print("sampled", flush=True)
            time.sleep(seconds)


def main() -> int:
    """Serve, sampled."""
    from mlx_backend.cli import main as serve

    path, seconds, *arguments = sys.argv[1:]
    threading.Thread(target=write_samples, args=(Path(path), float(seconds)), daemon=True).start()
    return serve(arguments)


if __name__ == "__main__":
    sys.exit(main())
