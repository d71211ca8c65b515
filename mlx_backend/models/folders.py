"""Where models lie on disk: which folders hold a complete one, and whether that may have changed.

Reads names, sizes and the index of a model's parts; never weights. What cannot be read counts as absent.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_backend.models.files import read_json_or_empty
from mlx_backend.models.model_type import ENCODERS

if TYPE_CHECKING:
    from collections.abc import Iterator

WEIGHTS = "model*.safetensors"  # what mlx-lm loads
PICKLED_WEIGHTS = "pytorch_model*.bin"  # what encoders may have instead
_UNSPLIT = {"model.safetensors", "pytorch_model.bin"}
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_MTIME_MARGIN = 2_000_000_000  # nanoseconds; a younger modification time may stand for several changes


class ChangeDetector:
    """The paths a listing was made from, with their modification times before they were read."""

    def __init__(self) -> None:
        self._mtimes: dict[Path, int | None] = {}

    def add(self, path: Path) -> None:
        """Record a path that is about to be read; it need not exist."""
        mtime = _mtime(path)
        too_recent = mtime is not None and time.time_ns() - mtime < _MTIME_MARGIN
        self._mtimes.setdefault(path, 0 if too_recent else mtime)

    def detected(self) -> bool:
        """Whether any path has changed, or may have."""
        return any(_mtime(path) != mtime for path, mtime in self._mtimes.items())


def _mtime(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def models_below(root: Path, changes: ChangeDetector) -> Iterator[tuple[str, Path]]:
    """Yield the name and folder of each model directly below `root` or one level deeper (owner/name)."""
    for child in _subfolders(root, changes):
        if holds_model(child, changes):
            yield child.name, child
            continue
        for grandchild in _subfolders(child, changes):
            if holds_model(grandchild, changes):
                yield f"{child.name}/{grandchild.name}", grandchild


def models_in_hugging_face_cache(changes: ChangeDetector) -> Iterator[str]:
    """Yield the repositories whose current snapshot is a complete model."""
    for folder in _subfolders(_hugging_face_cache(), changes):
        kind, _, repository = folder.name.partition("--")
        if kind == "models" and repository.count("--") == 1:
            name = repository.replace("--", "/")
            if cached_snapshot(name, changes) is not None:
                yield name


def cached_snapshot(repository: str, changes: ChangeDetector | None = None) -> Path | None:
    """Return the folder of a repository in the Hugging Face cache, if it is there and complete."""
    changes = changes or ChangeDetector()
    folder = _hugging_face_cache() / f"models--{repository.replace('/', '--')}"
    revision = folder / "refs" / "main"
    for path in (folder, revision):
        changes.add(path)
    try:
        commit = revision.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if commit.isalnum() and holds_model(snapshot, changes) else None


def holds_model(folder: Path, changes: ChangeDetector | None = None) -> bool:
    """Whether a folder holds a configuration and all the weights."""
    if changes is not None:
        changes.add(folder)
    try:
        if not (folder / "config.json").is_file():
            return False
        present = {file.name for file in _weight_files(folder)}
        index = next((folder / name for name in _INDEXES if (folder / name).is_file()), None)
        if not present or present & _UNSPLIT or index is None:
            return bool(present)
        return present.issuperset(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return False


def weight_sizes(folder: Path) -> list[int]:
    """Return the size in bytes of each file of weights."""
    try:
        return [file.stat().st_size for file in _weight_files(folder)]
    except OSError:  # a file is being replaced
        return []


def _weight_files(folder: Path) -> list[Path]:
    # A link into the cache whose target has not been downloaded yet is not a file.
    found = [file for file in folder.glob(WEIGHTS) if file.is_file()]
    if not found and read_json_or_empty(folder / "config.json").get("model_type") in ENCODERS:
        found = [file for file in folder.glob(PICKLED_WEIGHTS) if file.is_file()]
    return found


def _subfolders(folder: Path, changes: ChangeDetector) -> list[Path]:
    changes.add(folder)
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir() and entry.name.isprintable()]
    except OSError:
        return []
    return [folder / name for name in sorted(names, key=str.casefold) if not name.startswith(".")]


def _hugging_face_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)
