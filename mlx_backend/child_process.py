"""Functions of ours that run in processes of their own, with limits on time and memory.

What strangers wrote and a server has to run or compile (a model's chat template, a JSON schema) may take for ever or
fill the memory, and no thread can be stopped while it does that in C. A process can be. Here each has

    processor time   which a timer of the system ends (`ITIMER_PROF`), so that a busy machine accepts the same things
    memory           `MAX_MEMORY` bytes of address space; macOS, which does not limit that, is asked what is resident
    nothing else     no variables of the environment, such as keys; no files to write; no signals of a terminal

A process reads requests from a pipe and answers them one at a time until the pipe ends, as it does with the server,
however that ends. One that goes beyond a limit dies, and the next request gets a new one. How it died tells which limit
that was (`_OUT_OF_MEMORY`); any other end is a fault of this program or of its installation, and no request's. Knows
nothing of what the functions do.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from math import inf
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from mlx_backend.errors import EngineBusy, EngineError
from mlx_backend.preparation import Slots, current

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_MEMORY: Final = 1 << 30
"""Bytes of one process."""
_MAX_ANSWER: Final = 1 << 28
"""Bytes. A function bounds its answers itself; this is for one that no longer does."""
_WATCH_SECONDS: Final = 0.25
"""Seconds between two looks at the memory of a process, where the system does not limit it."""
_HEADER: Final = Struct("<Qd")
"""What comes before a request or an answer: its bytes, and the seconds that it may take or has taken."""
_MEMORY_STATUS: Final = 86
"""The status of a process that Python's MemoryError has ended."""
_OUT_OF_MEMORY: Final = {
    _MEMORY_STATUS,
    *(-each for each in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGKILL)),
}
"""The statuses of a process that could get no more memory.

Rust and C++ abort then, and C may write to an address that is not its own. SIGKILL comes from the system, or from here
for more than `MAX_MEMORY` or `_MAX_ANSWER`.
"""
_MAX_LOGGED: Final = 4000
"""Characters of what a process wrote before it ended for another reason: the last ones."""
_PASSED_VARIABLES: Final = ("TZ", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
_PROGRAM: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from mlx_backend.child_process import serve; serve(sys.argv[2], int(sys.argv[3]))"
)


log = logging.getLogger(__name__)


class Overrun(Exception):
    """A request took more time or memory than it may; the text says which of them."""


class ChildAnswer(NamedTuple):
    """What a function returned, and the seconds of processor time that it took."""

    data: bytes
    seconds: float


class ChildProcesses:
    """Runs one function, `module:name`, of bytes to bytes. Safe to use from several threads.

    There are `at_once` processes at most, `max_of_client` of them for one client. Where they are `reused`, each waits
    for the next request, so that a steady load starts none; else a request has a process of its own. `niceness` is how
    far they yield the processor to the server.
    """

    def __init__(
        self,
        function: str,
        *,
        at_once: int,
        max_of_client: int | None = None,
        reused: bool = False,
        niceness: int = 0,
    ) -> None:
        self._function = function
        self._niceness = niceness
        self._slots = Slots(at_once, max_of_client=max_of_client)
        self._reused = reused
        self._guard = threading.Lock()
        self._idle: list[_Child] = []
        atexit.register(self.close)

    def call(self, request: bytes, *, seconds: float, client: str = "") -> ChildAnswer:
        """Return the function's answer, which may take up to `seconds` of processor time.

        Raises Overrun, EngineBusy if no process can be started, EngineError if one ends for any other reason, and what
        `Preparation.check` raises once the request that needs the answer has no time left or was cancelled.
        """
        preparation = current()
        with self._slots.slot_for(preparation, preparation.seconds_left, client):
            preparation.check()
            while True:
                child, is_new = self._take()
                with preparation.cancelled_by(child.kill):
                    answer = child.ask(request, seconds, preparation.seconds_left)
                if answer is not None:
                    self._give_back(child)
                    return answer
                status, written = child.close()
                preparation.check()
                if status == -signal.SIGPROF:
                    raise Overrun(f"it takes more than {seconds:g} seconds of processor time")
                if not is_new:
                    continue  # one that waited may have been ended from outside
                if status in _OUT_OF_MEMORY:
                    raise Overrun("it takes too much memory")
                log.error("The process of %s ended with status %d:\n%s", self._function, status, written)
                raise EngineError(f"The process of {self._function} ended unexpectedly; the log says more.")

    def close(self) -> None:
        """End the processes that wait."""
        with self._guard:
            idle, self._idle = self._idle, []
        for child in idle:
            child.kill()
            child.close()

    def _take(self) -> tuple[_Child, bool]:
        """Return a process, and whether it is a new one."""
        with self._guard:
            if self._idle:
                return self._idle.pop(), False
        try:
            return _Child(self._function, self._niceness), True
        except OSError as error:
            raise EngineBusy(f"No further process can be started: {error.strerror}.") from error

    def _give_back(self, child: _Child) -> None:
        with self._guard:
            if self._reused:
                self._idle.append(child)
                return
        child.kill()
        child.close()


class _Child:
    """One process. Used by one thread at a time, but for `kill`."""

    def __init__(self, function: str, niceness: int) -> None:
        folders = [str(Path(__file__).parents[1]), *filter(None, sys.path)]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _PROGRAM, json.dumps(folders), function, str(niceness)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._errors = self._process.stderr
        self._selector = DefaultSelector()
        self._selector.register(self._answers, EVENT_READ)

    def ask(self, request: bytes, seconds: float, wait_seconds: float) -> ChildAnswer | None:
        """Return the answer; None if there is none after `wait_seconds` on the clock, or none will come."""
        try:
            self._requests.write(_HEADER.pack(len(request), max(seconds, 0.001)) + request)
            self._requests.flush()
        except OSError:
            return None
        if not self._has_answer(wait_seconds):
            self.kill()
        head = self._answers.read(_HEADER.size)
        if len(head) < _HEADER.size:
            return None
        size, used = _HEADER.unpack(head)
        if size > _MAX_ANSWER:
            self.kill()
            return None
        data = self._answers.read(size)
        return ChildAnswer(data, used) if len(data) == size else None

    def _has_answer(self, wait_seconds: float) -> bool:
        """Wait for the beginning of an answer, or the end of the process; False after `wait_seconds`."""
        if sys.platform == "linux":
            return bool(self._selector.select(None if wait_seconds == inf else wait_seconds))
        deadline = time.monotonic() + wait_seconds
        while not self._selector.select(_WATCH_SECONDS):
            if time.monotonic() > deadline:
                return False
            if resident_bytes(self._process.pid) > MAX_MEMORY:
                self.kill()
        return True

    def kill(self) -> None:
        """End it, from any thread."""
        self._process.kill()

    def close(self) -> tuple[int, str]:
        """Wait for its end, which has come or is about to.

        Return its status, below 0 for the signal that ended it, and the end of what it wrote to its standard error.
        """
        try:
            status = self._process.wait(1)
        except subprocess.TimeoutExpired:
            self.kill()
            status = self._process.wait()
        self._selector.close()
        with suppress(OSError):
            self._requests.close()
        self._answers.close()
        with self._errors as errors:
            return status, errors.read().decode(errors="replace")[-_MAX_LOGGED:].strip()


def resident_bytes(pid: int) -> int:
    """Return the memory that a process has in use; 0 if the system does not say."""
    try:
        found = subprocess.run(
            ["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, check=True, timeout=5
        )
        return int(found.stdout) << 10
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0


def serve(function: str, niceness: int) -> None:
    """Answer requests on standard input until it ends. This is what the processes run."""
    import importlib

    # The server decides when it ends.
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    os.nice(niceness)
    module, _, name = function.partition(":")
    answer: Callable[[bytes], bytes] = getattr(importlib.import_module(module), name)
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints is no answer
    os.set_blocking(2, False)  # the server reads errors at the end, and what the pipe does not hold is lost
    _limit()
    try:
        while head := requests.read(_HEADER.size):
            size, seconds = _HEADER.unpack(head)
            request = requests.read(size)
            started = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, seconds)
            data = answer(request)
            signal.setitimer(signal.ITIMER_PROF, 0)
            answers.write(_HEADER.pack(len(data), time.process_time() - started) + data)
            answers.flush()
    except MemoryError:
        os._exit(_MEMORY_STATUS)


def _limit() -> None:
    import resource

    for kind, value in (
        (resource.RLIMIT_AS, MAX_MEMORY),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        with suppress(ValueError, OSError):  # a system that does not limit it, or less already
            resource.setrlimit(kind, (value, value))
