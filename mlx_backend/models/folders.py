"""Where models lie on disk: which folders hold one that is whole, and what would tell that this has changed.

Reads names and sizes, and the list of a model's parts; never a weight. Whatever cannot be read is not there.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_backend.models.model_type import ENCODERS, read_json

if TYPE_CHECKING:
    from collections.abc import Iterator

_WEIGHTS = "model*.safetensors"  # what mlx-lm loads
_PICKLED = "pytorch_model*.bin"  # what models that only read may have instead
_WHOLE = {"model.safetensors", "pytorch_model.bin"}
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SETTLED = 2_000_000_000  # nanoseconds; a younger time stamp may stand for several changes


class Watch:
    """The places a listing was made from, and their time stamps from before they were read."""

    def __init__(self) -> None:
        self._stamps: dict[Path, int | None] = {}

    def add(self, place: Path) -> None:
        """Remember a place that is about to be read; it need not exist."""
        stamp = _stamp(place)
        unsettled = stamp is not None and time.time_ns() - stamp < _SETTLED
        self._stamps.setdefault(place, 0 if unsettled else stamp)

    def changed(self) -> bool:
        """Whether any place is not as it was, or may not be."""
        return any(_stamp(place) != stamp for place, stamp in self._stamps.items())


def _stamp(place: Path) -> int | None:
    try:
        return place.stat().st_mtime_ns
    except OSError:
        return None


def models_below(root: Path, watch: Watch) -> Iterator[tuple[str, Path]]:
    """Give every model's name and folder: directly below `root`, or one level deeper (owner/name)."""
    for child in _folders(root, watch):
        if holds_model(child, watch):
            yield child.name, child
            continue
        for grandchild in _folders(child, watch):
            if holds_model(grandchild, watch):
                yield f"{child.name}/{grandchild.name}", grandchild


def models_in_hugging_face_cache(watch: Watch) -> Iterator[str]:
    """Give the repositories whose current snapshot is a whole model."""
    for folder in _folders(_hugging_face_cache(), watch):
        kind, _, repository = folder.name.partition("--")
        if kind == "models" and repository.count("--") == 1:
            name = repository.replace("--", "/")
            if snapshot(name, watch) is not None:
                yield name


def snapshot(repository: str, watch: Watch | None = None) -> Path | None:
    """Return the folder of a repository in the Hugging Face cache, if it is there and whole."""
    watch = watch or Watch()
    folder = _hugging_face_cache() / f"models--{repository.replace('/', '--')}"
    revision = folder / "refs" / "main"
    for place in (folder, revision):
        watch.add(place)
    try:
        commit = revision.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    files = folder / "snapshots" / commit
    return files if commit.isalnum() and holds_model(files, watch) else None


def holds_model(folder: Path, watch: Watch | None = None) -> bool:
    """Whether a configuration and all the weights are there."""
    if watch is not None:
        watch.add(folder)
    try:
        if not (folder / "config.json").is_file():
            return False
        there = {file.name for file in _weights(folder)}
        index = next((folder / name for name in _INDEXES if (folder / name).is_file()), None)
        if not there or there & _WHOLE or index is None:
            return bool(there)
        return there.issuperset(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return False


def weight_sizes(folder: Path) -> list[int]:
    """List how many bytes each file of weights has."""
    try:
        return [file.stat().st_size for file in _weights(folder)]
    except OSError:  # it is being replaced just now
        return []


def _weights(folder: Path) -> list[Path]:
    # A link into the cache whose file has not come yet is none.
    found = [file for file in folder.glob(_WEIGHTS) if file.is_file()]
    if not found and read_json(folder / "config.json").get("model_type") in ENCODERS:
        found = [file for file in folder.glob(_PICKLED) if file.is_file()]
    return found


def _folders(place: Path, watch: Watch) -> list[Path]:
    watch.add(place)
    try:
        with os.scandir(place) as entries:
            names = [entry.name for entry in entries if entry.is_dir() and entry.name.isprintable()]
    except OSError:
        return []
    return [place / name for name in sorted(names, key=str.casefold) if not name.startswith(".")]


def _hugging_face_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)
