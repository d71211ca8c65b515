"""Folders and repositories of models: where they lie, whether one can run here, whether it is whole, and its size.

Goes by names, sizes and small JSON files; reads no weights and downloads nothing. A folder and the listing of a
repository are looked at alike. What cannot be read counts as absent.
"""

from __future__ import annotations

import json
import logging
import os
import time
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mlx_backend.errors import EngineError, EngineStopped, first_line
from mlx_backend.models.files import ENCODERS, read_json

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

log = logging.getLogger(__name__)

WEIGHTS: Final = "model*.safetensors"
"""The files that are loaded, at the top of a folder."""
NEEDED_FILES: Final = (
    *("*.json", "*.jinja", "*.txt", "*.jsonl", "*.model", "*.py", "*.tiktoken"),
    *(WEIGHTS, "[0-9]_*/*.safetensors"),
)
"""What is downloaded, by the path inside the repository; a star may stand for a slash.

Python code and tiktoken's vocabularies are for models that need --trust-remote-code, the numbered folders for further
layers of sentence transformers.
"""
LISTING_SECONDS: Final = 10
_INDEX: Final = "model.safetensors.index.json"
_ADAPTER_WEIGHTS: Final = "adapters.safetensors"  # what mlx-lm loads
_PYTORCH: Final = ("*.bin", "*.pt", "*.pth", "consolidated*.safetensors")
_MLX_VERSION: Final = (
    "choose the model's MLX version, which most have on Hugging Face (mlx-community has thousands)"
)
_CONVERT: Final = (
    "import torch; from safetensors.torch import save_file; save_file({name: value.contiguous().clone() for name, "
    "value in torch.load('pytorch_model.bin', weights_only=True).items()}, 'model.safetensors')"
)
_MTIME_MARGIN: Final = 2_000_000_000
"""Nanoseconds. A younger modification time may stand for several changes."""
_UNITS: Final = ((10**9, "GB", 1), (10**6, "MB", 1), (10**3, "kB", 0), (1, "bytes", 0))


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
        if not present or "model.safetensors" in present or not (folder / _INDEX).is_file():
            return bool(present)
        return present.issuperset(json.loads((folder / _INDEX).read_bytes())["weight_map"].values())
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return False


# -- whether it can run here ---------------------------------------------------------------------------------


def any_match(names: Iterable[str], *patterns: str) -> bool:
    """Whether one of the names matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """Read a folder's config.json. Raises EngineError if it is not that of a model that can run."""
    check_names(name, [file.name for file in folder.iterdir()], str(folder))
    try:
        config = read_json(folder / "config.json")
    except OSError as error:
        raise EngineError(
            f"{name!r} cannot be loaded: its config.json cannot be read: {error.strerror}."
        ) from error
    except ValueError as error:
        raise EngineError(f"{name!r} cannot be loaded: its {error}.") from error
    if "model_type" not in config:
        raise EngineError(f"The config.json of {name!r} names no model_type: it is not a language model's.")
    return config


def check_names(name: str, names: Collection[str], place: str) -> None:
    """Raise EngineError unless there is a config.json; `place` is where that was looked for."""
    if "config.json" in names:
        return
    if any_match(names, "*.gguf"):
        raise EngineError(gguf(name))
    if "adapter_config.json" in names:
        raise EngineError(
            f"{name!r} holds a LoRA adapter: name the model that it is for with --model, and the adapter with "
            "--adapter-path."
        )
    if not names:
        raise EngineError(f"{name!r} is empty: there is no config.json in {place}, and nothing else.")
    raise EngineError(f"{name!r} holds no model: there is no config.json in {place}.")


def check_weights(name: str, names: Collection[str], config: Mapping[str, Any], place: str) -> None:
    """Raise EngineError unless there are weights in a format that can be read."""
    if any_match(names, WEIGHTS):
        return
    if any_match(names, "*.gguf"):
        raise EngineError(gguf(name))
    if any_match(names, *_PYTORCH) and config.get("model_type") in ENCODERS:
        raise EngineError(
            f"{name!r} has weights in PyTorch's format only, which is a program and is not run here. Convert them "
            "once, in their folder and with a Python that has PyTorch (pip install torch safetensors): "
            f'python -c "{_CONVERT}"'
        )
    if any_match(names, *_PYTORCH):
        raise EngineError(f"{name!r} has weights in PyTorch's format only: {_MLX_VERSION}.")
    raise EngineError(
        f"{name!r} has no weights: there is no {WEIGHTS} in {place}. If a download or a copy was interrupted, do it "
        "again; if it is no MLX model, see `mlx_lm.convert`."
    )


def gguf(name: str) -> str:
    """Say that a model is in the format of another program."""
    return f"{name!r} is in GGUF, the format of llama.cpp, which MLX cannot read: {_MLX_VERSION}."


@contextmanager
def explain_load_errors(name: str) -> Iterator[None]:
    """Turn whatever mlx-lm raises while it loads a model into an EngineError with advice."""
    try:
        yield
    except EngineStopped:
        raise
    except Exception as error:
        reason = first_line(error)
        if "not supported" in reason:
            advice = "A newer mlx-lm may know this architecture."
        elif "trust_remote_code" in str(error):
            advice = (
                "It comes with Python code of its own; --trust-remote-code runs it, if you trust its makers."
            )
        else:
            advice = (
                "If its files are incomplete, fetch them again; if it is no MLX model, see `mlx_lm.convert`."
            )
        raise EngineError(f"The model {name!r} could not be loaded: {reason}. {advice}") from error


# -- sizes ---------------------------------------------------------------------------------------------------


def folder_bytes(folder: Path) -> int | None:
    """Return the size of the weights in a model's folder; None if it has none, or they are being replaced."""
    try:
        return sum(file.stat().st_size for file in _weight_files(folder)) or None
    except OSError:
        return None


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
    return sum(size for name, size in sizes.items() if "/" not in name and fnmatchcase(name, WEIGHTS)) or None


def format_size(size: int) -> str:
    """Write a number of bytes in the units that disks and downloads are sold in: 12.1 GB, 340.0 MB."""
    unit, name, digits = next((each for each in _UNITS if size >= each[0]), _UNITS[-1])
    return f"{size / unit:.{digits}f} {name}"


def _weight_files(folder: Path) -> list[Path]:
    # A link into the cache whose target has not been downloaded yet is not a file.
    return [file for file in folder.glob(WEIGHTS) if file.is_file()]


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
