from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

from mlx_backend.device.threads import NativeThread

MICROSECONDS = 100_000


@pytest.mark.skipif(sys.platform != "linux", reason="the system's threads are listed in /proc")
def test_a_thread_is_joined_once_what_c_keeps_for_it_is_freed() -> None:
    libc = ctypes.CDLL(None)
    key = ctypes.c_uint()
    assert libc.pthread_key_create(ctypes.byref(key), libc.usleep) == 0  # usleep(MICROSECONDS) frees it

    thread = NativeThread(target=lambda: libc.pthread_setspecific(key, ctypes.c_void_p(MICROSECONDS)))
    thread.start()
    thread.join()
    assert not Path(f"/proc/self/task/{thread.native_id}").exists()
