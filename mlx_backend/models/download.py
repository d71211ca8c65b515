"""From a model's name to the folder that holds it: one that is there, or a download from Hugging Face into its cache.

huggingface_hub begins a file anew when its download was interrupted, and does not delete the part (its issue 4196).
So the files that are stored with a checksum, the large ones, are fetched here and put where the library looks for them;
until all bytes are there they are in `CHECKSUM.incomplete`, which stays when the process ends, and where the next
download goes on. The rest is the library's. What goes wrong is reported in a sentence that says what to do.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx2
from filelock import Timeout
from huggingface_hub import constants, get_session, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import WeakFileLock, build_hf_headers, hf_raise_for_status
from huggingface_hub.utils import tqdm as library_bar

from mlx_backend.errors import EngineError, EngineStopped, first_line
from mlx_backend.models.folders import (
    NEEDED_FILES,
    any_match,
    cached_snapshot,
    check_names,
    check_weights,
    format_size,
    gguf,
    listing,
    read_config,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

log = logging.getLogger(__name__)

MAX_AT_ONCE: Final = 4
"""Files that are fetched at the same time."""
MAX_HTTP_BYTES: Final = 50_000_000_000
"""Bytes of one file; what is larger the Hub gives to the library's own protocol alone."""
REPORTED_BYTES: Final = 1 << 18
"""Bytes that come between two reports."""
SILENCE_SECONDS: Final = 30
"""Seconds for which the other end may send nothing."""
MAX_FAILURES: Final = 6
"""Failures in a row, none of which got further than those before."""
MAX_RETRY_SECONDS: Final = 16.0
LOCK_SECONDS = 1.0
"""Seconds between two looks at how far another program is."""
pause = time.sleep  # tests put another in its place
_RETRIED_STATUSES: Final = frozenset([408, 429, 500, 502, 503, 504])
_HUB: Final = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/+([^/?#]+/[^/?#]+)")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_RANGE: Final = re.compile(r"bytes (\d+)-")
_TOKEN: Final = "set HF_TOKEN to a token (huggingface.co/settings/tokens)"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def find_folder(
    model: str, *, allow_download: bool, on_progress: Callable[[int, int], None] = lambda _done, _total: None
) -> tuple[Path, str]:
    """Return the model's folder, downloaded if need be, and its name.

    `on_progress` is called with the bytes that are there and those there will be. Raises EngineError with advice.
    """
    path, is_folder, is_file = _look_at(model)
    if is_folder:
        return path, path.resolve().name
    if is_file:
        if path.suffix.lower() == ".gguf":
            raise EngineError(gguf(model))
        raise EngineError(
            f"{model!r} is a file; name the folder that holds the model's config.json and weights."
        )
    if (address := _HUB.match(model)) is not None:
        raise EngineError(f"{model!r} is the address of a page; name the repository as {address[1]}.")
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise EngineError(
            f"There is no folder {model!r}. Name a folder with an MLX model, or a Hugging Face repository "
            "such as mlx-community/gpt-oss-20b-MXFP4-Q8."
        )
    return (download(model, on_progress) if allow_download else downloaded(model)), model


def _look_at(model: str) -> tuple[Path, bool, bool]:
    """Return the path that a name is, and whether it is a folder or a file."""
    path = Path(model)
    try:
        path = path.expanduser()
        return path, path.is_dir(), path.is_file()
    except (OSError, RuntimeError):  # too long for a path; the home of a user that does not exist
        return path, False, False


@dataclass(frozen=True, slots=True)
class _RemoteFile:
    name: str
    size: int
    sha256: str  # empty for a small file, which has none


def download(repository: str, on_progress: Callable[[int, int], None]) -> Path:
    """Return the folder of a repository's current files, after downloading those that are missing.

    `on_progress` is called with the bytes that are there and those there will be, from any thread but one at a time;
    what it raises ends the download. Without a network the files of an earlier download do. Raises EngineError.
    """
    with explain_download_errors(repository):
        try:
            commit, files = _listing(repository)
        except Exception as error:
            if (folder := cached_snapshot(repository)) is None:
                raise
            log.info(
                "Hugging Face did not list %s (%s): its files here are used.", repository, first_line(error)
            )
            return folder
        names = [file.name for file in files]
        check_names(repository, names, "the repository")
        folder = _snapshot(repository, ["config.json"])  # what cannot run here is known before the gigabytes
        config = read_config(folder, repository)
        check_weights(repository, names, config, "the repository")
        needed = [file for file in files if any_match([file.name], *NEEDED_FILES)]
        missing = [file for file in needed if not (folder / file.name).exists()]
        if missing:
            _fetch(repository, commit, needed, missing, on_progress)
        folder = _snapshot(repository, NEEDED_FILES)
        if missing:
            total = sum(file.size for file in needed)
            on_progress(total, total)
        return folder


def downloaded(repository: str) -> Path:
    """Return the folder of a repository that has been downloaded. Raises EngineError."""
    with explain_download_errors(repository):
        folder = _snapshot(repository, ["config.json"], local_only=True)
        read_config(folder, repository)
        return _snapshot(repository, NEEDED_FILES, local_only=True)


class _NoBar(library_bar):
    """The library's progress bar, which shows nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        options["disable"] = True
        super().__init__(*arguments, **options)  # type: ignore[no-untyped-call]  # tqdm's


def _snapshot(repository: str, patterns: Sequence[str], *, local_only: bool = False) -> Path:
    return Path(
        snapshot_download(
            repository, allow_patterns=list(patterns), local_files_only=local_only, tqdm_class=_NoBar
        )
    )


def _listing(repository: str) -> tuple[str, list[_RemoteFile]]:
    """Return the current commit of a repository, and its files."""
    found = listing(repository)
    files = [
        # The checksum becomes a file's name here.
        _RemoteFile(
            file.rfilename,
            file.size or 0,
            file.lfs.sha256 if file.lfs and _SHA256.fullmatch(file.lfs.sha256) else "",
        )
        for file in found.siblings or ()
    ]
    return found.sha or constants.DEFAULT_REVISION, files


def _fetch(
    repository: str,
    commit: str,
    needed: Sequence[_RemoteFile],
    missing: Sequence[_RemoteFile],
    on_progress: Callable[[int, int], None],
) -> None:
    """Fetch the missing files that have a checksum, several at once; the others are left to the library.

    What is reported is out of all files.
    """
    folder = f"models--{repository.replace('/', '--')}"  # as the library names it
    cache = Path(constants.HF_HUB_CACHE)
    blobs, locks = cache / folder / "blobs", cache / ".locks" / folder
    for each in (blobs, locks):
        each.mkdir(parents=True, exist_ok=True)
    progress = _Progress(sum(file.size for file in needed), on_progress)
    absent = [file for file in missing if not (file.sha256 and (blobs / file.sha256).exists())]
    resumable = {
        file.sha256: ResumableFile(
            blobs / file.sha256,
            name=file.name,
            url=hf_hub_url(repository, file.name, revision=commit),
            size=file.size,
            sha256=file.sha256,
            count=progress.add,
        )
        for file in absent
        if file.sha256 and file.size <= MAX_HTTP_BYTES
    }
    left = sum(file.size for file in absent) - sum(file.begun for file in resumable.values())
    free = shutil.disk_usage(blobs).free
    if left > free:
        raise no_space(
            repository, f" ({format_size(left)} more are needed, and {format_size(free)} are free)"
        )
    there = progress.total - left
    shown = "" if there < left // 100 else f" more; {format_size(there)} are there"
    log.info("Downloading %s: %s%s.", repository, format_size(left), shown)
    progress.add(there)
    executor = ThreadPoolExecutor(MAX_AT_ONCE, thread_name_prefix="download")
    try:
        futures = [
            executor.submit(file.fetch, locks / f"{sha256}.lock") for sha256, file in resumable.items()
        ]
        for future in as_completed(futures):
            future.result()
    except BaseException:
        progress.give_up()
        raise
    finally:
        # After a failure the others end with their next piece. That is not waited for: it may not come for a while.
        executor.shutdown(wait=False, cancel_futures=True)


class _Progress:
    """Counts the bytes of all files together, for a callback that no two threads call at once."""

    def __init__(self, total: int, on_progress: Callable[[int, int], None]) -> None:
        self.total = total
        self._is_over = False
        self._done = self._reported = 0
        self._on_progress = on_progress
        self._lock = threading.Lock()

    def add(self, size: int) -> None:
        """Count bytes; fewer than none if some have to be fetched again. Raises when the download has been given up."""
        with self._lock:
            if self._is_over:
                raise EngineStopped("The download has been given up.")
            self._done += size
            if size > 0 and self._done < min(self._reported + REPORTED_BYTES, self.total):
                return
            self._reported = self._done
            self._on_progress(self._done, self.total)

    def give_up(self) -> None:
        """End the other files' downloads; nothing more is reported."""
        with self._lock:
            self._is_over = True


# -- one file -------------------------------------------------------------------------------------------------


class ResumableFile:
    """One large file of `size` bytes; `begun` of them are there already.

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
            broken: Exception = httpx2.RemoteProtocolError("the connection ended early")
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
    return isinstance(error, httpx2.TransportError)


# -- what can go wrong ----------------------------------------------------------------------------------------


@contextmanager
def explain_download_errors(repository: str) -> Iterator[None]:
    """Turn what the library and the system raise while a repository is downloaded into an EngineError with advice."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        if (explained := _explained(repository, error)) is None:
            raise
        raise explained from error


def no_space(repository: str, detail: str = "") -> EngineError:
    """Return the error for a disk that is full, or will be."""
    folder = Path(constants.HF_HUB_CACHE)
    return EngineError(
        f"There is no room for {repository!r} on the disk of {folder}{detail}: free some, or set HF_HOME to a folder "
        "on another disk. What has been downloaded is kept."
    )


def _explained(repository: str, error: Exception) -> EngineError | None:
    match error:
        case GatedRepoError():
            text = f"{repository!r} is given only to those who have accepted its terms: do so on its page on Hugging "
            return EngineError(f"{text}Face, then {_TOKEN}.")
        case RepositoryNotFoundError() | HFValidationError():
            text = f"There is no folder and no Hugging Face repository {repository!r}, or it is private: check the "
            return EngineError(f"{text}spelling, or {_TOKEN}.")
        case DisabledRepoError():
            return EngineError(f"Hugging Face has disabled the repository {repository!r}: choose another.")
        case OfflineModeIsEnabled():
            return _not_here(repository, "HF_HUB_OFFLINE forbids downloading", "Unset that")
        case LocalEntryNotFoundError():
            return _not_here(
                repository, "Nothing may be downloaded here", f"`mlx-backend pull {repository}` does"
            )
        case HfHubHTTPError():
            return _refused(repository, error.response.status_code)
        case OSError() if error.errno in _FULL:
            return no_space(repository)
        case OSError():
            return EngineError(
                f"{repository!r} could not be written to {constants.HF_HUB_CACHE} ({first_line(error)}): make that "
                "folder writable, or set HF_HOME to another."
            )
        case KeyError() | TypeError() | ValueError():
            why = f"What answers is not Hugging Face, or a mirror of it ({type(error).__name__})"
            return _not_here(repository, why, "Check HF_ENDPOINT")
        case httpx2.TransportError():
            why = f"Hugging Face cannot be reached ({first_line(error)})"
            return _not_here(repository, why, "Check the network")
    return None


def _not_here(repository: str, why: str, cure: str) -> EngineError:
    return EngineError(
        f"{why}, and {repository!r} is not, or not completely, on this machine. {cure}, or name a folder that holds "
        "the model."
    )


def _refused(repository: str, status: int) -> EngineError:
    if status == 401:
        return EngineError(
            f"Hugging Face refuses the token it was sent for {repository!r}: {_TOKEN} that works."
        )
    if status == 403:
        return EngineError(f"Hugging Face does not let this token read {repository!r}: {_TOKEN} that may.")
    return EngineError(
        f"Hugging Face could not deliver {repository!r} (HTTP status {status}): try again later. What has been "
        "downloaded is kept."
    )
