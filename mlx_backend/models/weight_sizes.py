"""How many bytes loading will put into memory, before anything is loaded or downloaded.

A folder says it by its files' sizes, a repository by its listing on Hugging Face, which is one request. Counts the
files that would be loaded and no others. What cannot be found out is None: the load then reports what is wrong.
"""

from __future__ import annotations

import logging
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from mlx_backend.models.folders import PICKLED_WEIGHTS, WEIGHTS, weight_sizes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

log = logging.getLogger(__name__)

LISTING_SECONDS = 10
_ADAPTER_WEIGHTS = "adapters.safetensors"  # what mlx-lm loads


def folder_bytes(folder: Path) -> int | None:
    """Return the size of the weights in a model's folder."""
    return sum(weight_sizes(folder)) or None


def adapter_bytes(folder: Path) -> int | None:
    """Return the size of a LoRA adapter's weights."""
    try:
        return (folder.expanduser() / _ADAPTER_WEIGHTS).stat().st_size
    except OSError:
        return None


def repository_bytes(repository: str, endpoint: str | None = None) -> int | None:
    """Return the size of the weights in a repository, from its listing at `endpoint` (None: the configured one)."""
    from huggingface_hub import HfApi

    try:
        found = HfApi(endpoint=endpoint).model_info(repository, files_metadata=True, timeout=LISTING_SECONDS)
        sizes = {file.rfilename: file.size or 0 for file in found.siblings or ()}
    except Exception as error:  # of whatever kind: the download that follows explains it
        log.debug("The size of %s is not known: %s", repository, error)
        return None
    return _matching(sizes, WEIGHTS) or _matching(sizes, PICKLED_WEIGHTS) or None


def _matching(sizes: Mapping[str, int], pattern: str) -> int:
    """Return the total size of the files at the top that match, as a folder would be searched."""
    return sum(size for name, size in sizes.items() if "/" not in name and fnmatchcase(name, pattern))
