"""What can go wrong while a model is downloaded, each in a sentence that says what to do. Downloads nothing itself."""

from __future__ import annotations

import errno
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import constants
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from mlx_backend.errors import EngineError, first_line

if TYPE_CHECKING:
    from collections.abc import Iterator

_TOKEN = "log in with `hf auth login`, or set HF_TOKEN"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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


class BrokenOff(Exception):
    """A connection that ended before all had come."""


def is_transport_error(error: BaseException) -> bool:
    """Whether a connection could not be made, or broke."""
    # httpx's error, or httpx2's: that depends on the version of huggingface_hub.
    return isinstance(error, BrokenOff) or any(
        each.__name__ == "TransportError" for each in type(error).__mro__
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
            return _not_here(repository, "HF_HUB_OFFLINE forbids downloading it. Unset that")
        case LocalEntryNotFoundError():
            return _not_here(repository, "nothing may be downloaded here. Download it")
        case HfHubHTTPError():
            return _refused(repository, error.response.status_code)
        case OSError() if error.errno in _FULL:
            return no_space(repository)
        case OSError():
            return EngineError(
                f"{repository!r} could not be written to {constants.HF_HUB_CACHE} ({first_line(error)}): make that "
                "folder writable, or set HF_HOME to another."
            )
    if is_transport_error(error):
        return _not_here(
            repository, f"Hugging Face cannot be reached ({first_line(error)}). Check the network"
        )
    return None


def _not_here(repository: str, why: str) -> EngineError:
    return EngineError(
        f"There is no folder {repository!r}, and the repository of that name is not, or not completely, in the cache: "
        f"{why}, or name a folder that holds the model."
    )


def _refused(repository: str, status: int) -> EngineError:
    if status == 401:
        return EngineError(
            f"Hugging Face refuses the token it was sent for {repository!r}: {_TOKEN} to one that works."
        )
    if status == 403:
        return EngineError(
            f"Hugging Face does not let this token read {repository!r}: {_TOKEN} to one that may."
        )
    return EngineError(
        f"Hugging Face could not deliver {repository!r} (HTTP status {status}): try again later. What has been "
        "downloaded is kept."
    )
