"""Fetches one large file from Hugging Face, and goes on where an earlier attempt was interrupted.

The bytes go to `NAME.incomplete` beside the file, which stays when the process ends. Knows checksums, ranges and a
lock; nothing of models, and nothing of the other files.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from filelock import Timeout
from huggingface_hub import get_session
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import WeakFileLock, build_hf_headers, hf_raise_for_status

from mlx_backend.errors import EngineError, first_line
from mlx_backend.models.download_errors import BrokenOff, is_transport_error

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger(__name__)

SILENCE_SECONDS = 30
"""How long the other end may send nothing."""
MAX_FAILURES = 6  # in a row, none of which got further than those before
MAX_RETRY_SECONDS = 16.0
LOCK_SECONDS = 1.0  # between two looks at how far another program is
_RETRIED_STATUSES = frozenset([408, 429, 500, 502, 503, 504])
pause = time.sleep  # tests put another in its place
_RANGE = re.compile(r"bytes (\d+)-")


class ResumableFile:
    """One file of `size` bytes; `begun` of them are there already.

    `count` is called with the number of bytes that come, below zero if some are thrown away; what it raises ends the
    download.
    """

    def __init__(
        self,
        target: Path,
        *,
        name: str,
        url: str,
        size: int,
        sha256: str,
        count: Callable[[int], None],
    ) -> None:
        self.size = size
        self._target = target
        self._partial = target.with_name(f"{target.name}.incomplete")
        self._name = name
        self._url = url
        self._sha256 = sha256
        self._count = count
        self.begun = self._counted = min(self._received(), size)

    def fetch(self, lock: Path) -> None:
        """Fetch what is missing of the file, or wait until another program that holds the lock has.

        Raises HfHubHTTPError, a transport error or OSError.
        """
        with ExitStack() as stack:
            self._acquire(lock, stack)
            if self._target.exists():
                self._count_up_to(self.size)
                return
            begun = self._received()
            self._count_up_to(begun)
            parts = self._receive()
            if (begun or parts > 1) and not self._is_whole():
                log.warning("What was there of %s was damaged; it is downloaded anew.", self._name)
                self._start_over()
                self._receive()
                if not self._is_whole():
                    self._start_over()
                    raise EngineError(
                        f"{self._name} arrives damaged, with a wrong checksum: try again later."
                    )
            with self._partial.open("rb") as file:
                os.fsync(file.fileno())  # or a power failure could leave a name without its bytes
            self._partial.replace(self._target)

    def _receive(self) -> int:
        """Receive what is missing; return in how many parts it came."""
        self._partial.touch()
        parts = failures = 0
        furthest = self._received()
        while (have := self._received()) != self.size:
            parts += 1
            broken: Exception = BrokenOff("the connection ended early")
            try:
                self._receive_once(have)
            except Exception as error:
                if not _may_pass(error):
                    raise
                broken = error
            if (now := self._received()) == self.size:
                break
            # A server that cannot begin in the middle sends the same beginning again and again.
            failures = 1 if now > furthest else failures + 1
            furthest = max(furthest, now)
            if failures > MAX_FAILURES:
                raise broken
            seconds = min(MAX_RETRY_SECONDS, 2.0 ** (failures - 1))
            log.warning(
                "The download of %s stopped (%s); it goes on in %.0f s.",
                self._name,
                first_line(broken),
                seconds,
            )
            pause(seconds)
            self._count(0)  # raises if the download has been given up
        return parts

    def _receive_once(self, have: int) -> None:
        """Ask for what follows the first bytes, and write what comes."""
        headers = {**build_hf_headers(), "Range": f"bytes={have}-", "Accept-Encoding": "identity"}
        with get_session().stream("GET", self._url, headers=headers, timeout=SILENCE_SECONDS) as response:
            if response.status_code == 416:  # what is there is longer than the file
                self._start_over()
                return
            hf_raise_for_status(response)
            if have and not _begins_at(have, response.status_code, response.headers.get("Content-Range", "")):
                self._start_over()
                if response.status_code == 206:  # another part than the one that was asked for
                    return
                have = 0
            with self._partial.open("ab") as file:
                for piece in response.iter_bytes():
                    taken = piece[: self.size - have]
                    file.write(taken)
                    have += len(taken)
                    self._count_up_to(have)
                    if have == self.size:
                        return

    def _received(self) -> int:
        try:
            return self._partial.stat().st_size
        except OSError:
            return 0

    def _count_up_to(self, received: int) -> None:
        before, self._counted = self._counted, min(received, self.size)
        self._count(self._counted - before)

    def _start_over(self) -> None:
        self._partial.write_bytes(b"")
        self._count_up_to(0)

    def _is_whole(self) -> bool:
        with self._partial.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == self._sha256

    def _acquire(self, lock: Path, stack: ExitStack) -> None:
        has_said = False
        while True:
            try:
                stack.enter_context(WeakFileLock(lock, timeout=LOCK_SECONDS))
                return
            except Timeout:
                if not has_said:
                    log.info("Another program is downloading %s: waiting for it.", self._name)
                has_said = True
                self._count_up_to(self._received())


def _begins_at(position: int, status: int, content_range: str) -> bool:
    found = _RANGE.match(content_range)
    return status == 206 and found is not None and int(found[1]) == position


def _may_pass(error: Exception) -> bool:
    """Whether another attempt may succeed."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in _RETRIED_STATUSES
    return is_transport_error(error)
