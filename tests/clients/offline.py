"""Runs a Python program where there is no network but loopback: `python offline.py -m pytest tests/clients`.

On Linux it gets a network namespace of its own. Where there is none to be had (macOS, some containers) it runs as it
is, and says so.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

_GET_FLAGS, _SET_FLAGS, _IS_UP = 0x8913, 0x8914, 0x1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP of Linux


def isolate() -> None:
    """Leave the network. Raises OSError where the system does not allow it."""
    user, group = os.getuid(), os.getgid()
    os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket() as control:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("16xH", fcntl.ioctl(control, _GET_FLAGS, request))
        fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _IS_UP))


if __name__ == "__main__":
    try:
        isolate()
    except (OSError, AttributeError) as error:
        print(f"The clients are not kept from the network here: {error}", file=sys.stderr)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
