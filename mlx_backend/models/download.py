"""Downloads a model from Hugging Face into its cache, and goes on where an earlier download was interrupted.

huggingface_hub begins a file anew when its download was interrupted, and leaves what it had behind (its issue 4196).
So the files that are stored with a checksum, the large ones, are fetched by resumable.py and put where the library
looks for them. The rest is the library's.
"""

from __future__ import annotations

import logging
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import HfApi, constants, hf_hub_url, snapshot_download
from huggingface_hub.utils import tqdm as library_bar

from mlx_backend.errors import EngineStopped, first_line
from mlx_backend.models.contents import any_match, check_names, check_weights, needed_patterns, read_config
from mlx_backend.models.download_errors import explain_download_errors, no_space
from mlx_backend.models.folders import cached_snapshot
from mlx_backend.models.resumable import ResumableFile
from mlx_backend.models.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)

MAX_AT_ONCE = 4  # files
LISTING_SECONDS = 10
MAX_HTTP_BYTES = (
    50_000_000_000  # of one file; what is larger the Hub gives to the library's own protocol alone
)
REPORTED_BYTES = 1 << 18  # that come between two reports
_SHA256 = re.compile(r"[0-9a-f]{64}")


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
        patterns = needed_patterns(config, names)
        needed = [file for file in files if any_match([file.name], *patterns)]
        missing = [file for file in needed if not (folder / file.name).exists()]
        if missing:
            _fetch(repository, commit, needed, missing, on_progress)
        folder = _snapshot(repository, patterns)
        if missing:
            total = sum(file.size for file in needed)
            on_progress(total, total)
        return folder


def downloaded(repository: str) -> Path:
    """Return the folder of a repository that has been downloaded. Raises EngineError."""
    with explain_download_errors(repository):
        folder = _snapshot(repository, ["config.json"], local_only=True)
        names = [file.name for file in folder.iterdir()]
        return _snapshot(repository, needed_patterns(read_config(folder, repository), names), local_only=True)


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
    found = HfApi().model_info(repository, files_metadata=True, timeout=LISTING_SECONDS)
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
