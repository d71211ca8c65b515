"""Folders and repositories of models: where they lie, whether one can run here, whether it is whole, and its size.

Goes by names, sizes and small JSON files; reads no weights and downloads nothing. A folder and the listing of a
repository are looked at alike. What cannot be read counts as absent.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mlx_backend.errors import EngineError, first_line
from mlx_backend.models.files import (
    ENCODERS,
    MAX_JSON_BYTES,
    ModelFiles,
    quantization,
    read_json,
    read_json_or_empty,
    read_small,
)
from mlx_backend.models.tasks import why_not_served

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from huggingface_hub import ModelInfo

log = logging.getLogger(__name__)

WEIGHTS: Final = "model*.safetensors"
"""The files that are loaded, at the top of a folder."""
NEEDED_FILES: Final = (
    *("*.json", "*.jinja", "*.txt", "*.jsonl", "*.model", "*.py", "*.tiktoken"),
    *(WEIGHTS, "[0-9]_*/*.safetensors", "mtp*.safetensors"),
)
"""What is downloaded, by the path inside the repository; a star may stand for a slash.

Python code and tiktoken's vocabularies are for models that need --trust-remote-code, the numbered folders for further
layers of sentence transformers, and what begins with mtp is a head.
"""
_LISTING_SECONDS: Final = 10
_INDEX: Final = "model.safetensors.index.json"
_PART: Final = re.compile(r"(model.*)-(\d+)-of-(\d+)\.safetensors")
"""The name of a part of the weights: what they are called, its number, and how many there are."""
_MISSING_ARGUMENTS: Final = re.compile(r"__init__\(\) missing \d+ required positional arguments?: (.*)")
_MAX_TOKENIZER_BYTES: Final = 40 << 20
"""Bytes of a vocabulary and whatever else a library reads at once; the largest that are published have 33 MB."""
_MAX_ADDED_TOKENS: Final = 20_000
"""Tokens added to a vocabulary, in one file; transformers takes time with their square. Published are up to 7,000."""
_MAX_TOKENS: Final = 500_000
"""Entries of a vocabulary, which several libraries go through; the largest of models that run here have 262,144."""
_TOKEN: Final = re.compile(rb'"[:,]\s*-?\d')
_MAX_HEADER: Final = 32 << 20
"""Bytes of the table of contents of a file of weights; those there are have less than 10 MB."""
_MAX_REVISION: Final = 100
_COUNT: Final = re.compile(r"(?:^|_)(?:n|num)_(?:\w+_)?(?:layers?|blocks|experts|heads)$|^(?:layers|depth)$")
_MAX_COUNT: Final = 10_000
"""Of layers, experts or heads, whatever the weights say: several experts may be one tensor."""
_POINTER: Final = b"version https://git-lfs"
_MAX_POINTER: Final = 1024
"""Bytes of a file that may be a pointer; those there are have 130."""
_NOT_UTF8: Final = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
_UNFINISHED: Final = ("*.incomplete", "*.part", "*.partial", "*.crdownload", "*.download", "*.aria2", "*.!qB")
_TOKENIZER: Final = "tokenizer.json"
_TOKENIZER_SETTINGS: Final = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_ADAPTER_CONFIG: Final = "adapter_config.json"
_ADAPTER_WEIGHTS: Final = "adapters.safetensors"  # what mlx-lm loads
_PYTORCH: Final = ("*.bin", "*.pt", "*.pth", "consolidated*.safetensors")
MLX_VERSION: Final = (
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


def models_below(root: Path, changes: ChangeDetector) -> Iterator[tuple[str, Path, str]]:
    """Yield what is in each folder directly below `root` or one level deeper (owner/name): its name, and itself.

    The third is why it cannot be served, "" for a model that can. Links are followed, but not to where they are.
    """
    for child in _subfolders(root, changes):
        if child.name.startswith("models--") and (snapshot := _current_snapshot(child, changes)) is not None:
            name = child.name.removeprefix("models--").replace("--", "/")  # as a cache of Hugging Face has it
            if (problem := _looked_at(snapshot, name, changes)) is not None:
                yield name, snapshot, problem
            continue
        problem = _looked_at(child, child.name, changes)
        if problem is not None:
            yield child.name, child, problem
        if problem == "":
            continue
        for grandchild in _subfolders(child, changes):
            name = f"{child.name}/{grandchild.name}"
            if (problem := _looked_at(grandchild, name, changes)) is not None:
                yield name, grandchild, problem


def _looked_at(folder: Path, name: str, changes: ChangeDetector) -> str | None:
    changes.add(folder)
    try:
        return problem_of(folder, name)
    except OSError:
        return None


def models_in_hugging_face_cache(changes: ChangeDetector) -> Iterator[tuple[str, str]]:
    """Yield the repositories whose current snapshot holds something of a model; and why it cannot be served, or ""."""
    for folder in _subfolders(_hugging_face_cache(), changes):
        kind, _, repository = folder.name.partition("--")
        if kind == "models" and repository.count("--") == 1:
            name = repository.replace("--", "/")
            snapshot = _current_snapshot(folder, changes)
            if snapshot is not None and (problem := _looked_at(snapshot, name, changes)) is not None:
                yield name, problem


def cached_snapshot(repository: str, changes: ChangeDetector | None = None) -> Path | None:
    """Return the folder of a repository in the Hugging Face cache, if it is there and complete."""
    changes = changes or ChangeDetector()
    snapshot = _current_snapshot(_hugging_face_cache() / f"models--{repository.replace('/', '--')}", changes)
    return snapshot if snapshot is not None and _looked_at(snapshot, repository, changes) == "" else None


def _current_snapshot(repository: Path, changes: ChangeDetector) -> Path | None:
    """Return where a repository's folder in a cache of Hugging Face has its current files; None if it does not say."""
    revision = repository / "refs" / "main"
    for path in (repository, revision):
        changes.add(path)
    try:
        commit = read_small(revision, _MAX_REVISION).decode("ascii").strip()
    except (OSError, ValueError):
        return None
    return repository / "snapshots" / commit if commit.isalnum() else None


def holds_model(folder: Path) -> bool:
    """Whether a folder holds a model that can be served: a configuration for one, and all the weights."""
    return _looked_at(folder, folder.name, ChangeDetector()) == ""


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a model's weights, or none if some are missing.

    They are those that the index names, if all of these are there: no other file counts then. An index may be that of
    another version of the model, though. Without one, or with such a one, it is `model.safetensors`, else the parts
    that say how many there are, if there are as many, with whatever has a name of its own. A head in files of its own
    is not of them, unless there is nothing else.
    """
    # A link into the cache whose target has not been downloaded yet is not a file.
    present = {file.name: file for file in folder.glob(WEIGHTS) if file.is_file()}
    index = folder / _INDEX
    listed = _indexed(index) if index.is_file() else None
    return [present[name] for name in chosen_weights(present, listed)]


def head_files(folder: Path) -> list[Path]:
    """Return the files next to a model's weights in which others publish its MTP head; few indexes name them."""
    found = {file for pattern in ("*mtp*.safetensors", "mtp/*.safetensors") for file in folder.glob(pattern)}
    return sorted(file for file in found.difference(weight_files(folder)) if file.is_file())


def chosen_weights(present: Collection[str], indexed: Collection[str] | None) -> list[str]:
    """Return which of the files there are a model's weights; `indexed` are those an index names, None without one."""
    if indexed and all(name in present for name in indexed):
        return sorted(set(indexed))
    parts: dict[tuple[str, str], list[str]] = {}
    others: list[str] = []
    for name in sorted(name for name in present if "mtp" not in name) or sorted(present):  # see head_files
        if part := _PART.fullmatch(name):
            parts.setdefault((part[1], part[3]), []).append(name)
        else:
            others.append(name)
    if "model.safetensors" in others:
        return ["model.safetensors"]
    whole = [names for (_, count), names in parts.items() if len(names) == int(count)]
    if whole:
        return whole[-1] if indexed is not None else sorted([*others, *whole[-1]])
    return [] if parts or indexed is not None else others


def _indexed(index: Path) -> set[str]:
    """Return the files that an index names; none if it cannot be read."""
    try:
        return {name for name in read_json(index)["weight_map"].values() if isinstance(name, str)}
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return set()


# -- whether it can run here ---------------------------------------------------------------------------------


def any_match(names: Iterable[str], *patterns: str) -> bool:
    """Whether one of the names matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """Read a folder's config.json. Raises EngineError if it is not that of a model that can run."""
    names = [file.name for file in folder.iterdir()]
    if "config.json" not in names and (below := _models_within(folder)):
        raise EngineError(
            f"{name!r} holds no model itself: there is no config.json in {folder.absolute()}, but one in "
            f"{' and in '.join(below)}. Name that folder."
        )
    check_names(name, names, str(folder.absolute()))
    _check_files(name, folder)
    try:
        config = read_json(folder / "config.json")
        if (folder / "config.json").read_bytes().startswith(_NOT_UTF8):  # which other readers insist on
            raise ValueError("config.json begins with a byte order mark: save it as plain UTF-8")
    except OSError as error:
        raise EngineError(
            f"{name!r} cannot be loaded: its config.json cannot be read: {error.strerror}."
        ) from error
    except ValueError as error:
        raise EngineError(
            f"{name!r} cannot be loaded: its {error}. Correct the file, or fetch it again."
        ) from error
    if reason := why_not_served(name, config, names):
        raise EngineError(reason)
    if not isinstance(config.get("model_type"), str):
        raise EngineError(f"The config.json of {name!r} names no model_type: it is not a language model's.")
    return config


def read_model(folder: Path, name: str) -> dict[str, Any]:
    """Read the config.json of a folder whose weights are about to be loaded. Raises EngineError if they cannot be."""
    config = read_config(folder, name)
    check_weights(name, [file.name for file in folder.iterdir()], config, str(folder))
    _check_complete(name, folder)
    _check_counts(name, config, _check_headers(name, folder))
    for file in (folder / each for each in (_TOKENIZER, *_TOKENIZER_SETTINGS)):
        try:
            if not file.is_file():
                continue
            written = file.read_bytes()
            if written.count(b'"single_word"') > _MAX_ADDED_TOKENS:
                raise ValueError(f"{file.name} adds more than {_MAX_ADDED_TOKENS:,} tokens")
            if sum(1 for _ in _TOKEN.finditer(written)) > _MAX_TOKENS:
                raise ValueError(f"{file.name} has more than {_MAX_TOKENS:,} tokens")
            if file.name != _TOKENIZER:
                read_json(file)
        except ValueError as error:
            raise EngineError(
                f"{name!r} cannot be loaded: its {error}. Correct the file, or fetch it again."
            ) from error
    return config


def check_adapter(folder: Path) -> None:
    """Raise EngineError unless a folder holds a LoRA adapter as mlx-lm writes it."""
    if not (folder / _ADAPTER_CONFIG).is_file():
        raise EngineError(f"{folder} holds no adapter: there is no {_ADAPTER_CONFIG}.")
    try:
        config = read_json(folder / _ADAPTER_CONFIG)
    except (OSError, ValueError) as error:
        raise EngineError(f"{folder} holds no adapter that can be read: {first_line(error)}.") from error
    if "peft_type" in config:
        raise EngineError(
            f"{folder} holds an adapter in PEFT's format, which mlx-lm does not read: merge it into its model with "
            "PEFT (merge_and_unload) and use that, or train it with mlx-lm."
        )
    if not (folder / _ADAPTER_WEIGHTS).is_file():
        raise EngineError(f"{folder} holds no adapter: there is no {_ADAPTER_WEIGHTS}.")


def problem_of(folder: Path, name: str) -> str | None:
    """Say why a folder cannot be served, "" if it can; None for one that holds nothing of a model."""
    names = [file.name for file in folder.iterdir()]
    if not any_match(names, "config.json", _ADAPTER_CONFIG, "model_index.json", "*.gguf"):
        return None
    try:
        check_names(name, names, str(folder.absolute()))
        _check_files(name, folder)
        config = read_json_or_empty(folder / "config.json")
        if reason := why_not_served(name, config, names):
            return reason
        check_weights(name, names, config, str(folder))
        _check_complete(name, folder)
    except EngineError as error:
        return str(error)
    return ""


def _models_within(folder: Path) -> list[str]:
    found = [*folder.glob("*/config.json"), *folder.glob("snapshots/*/config.json")]
    return sorted(str(file.parent) for file in found if weight_files(file.parent))


def _check_files(name: str, folder: Path) -> None:
    """Raise EngineError for what is no file, what is too large to be read at once, and what git has left out.

    Libraries that load models open all of these by their names, and read a pipe or a device for ever.
    """
    for file in folder.iterdir():
        is_file = file.is_file()
        if not is_file and file.exists() and not file.is_dir():
            raise EngineError(f"{file.name} of {name!r} is no file, but a pipe or a device: remove it.")
        if is_file and file.stat().st_size > (most := _max_bytes(file)):
            raise EngineError(
                f"{file.name} of {name!r} is larger than {format_size(int(most))}, which is more than any model needs: "
                "fetch it again."
            )
        if _is_pointer(file):
            raise EngineError(
                f"{file.name} of {name!r} is a pointer of git-lfs and not the file itself: run `git lfs pull` in "
                f"{folder}."
            )


def _max_bytes(file: Path) -> float:
    """Return how large a file may be that is read at once; weights, and what is not read, may have any size."""
    if file.match("*.safetensors") or not any_match([file.name], *NEEDED_FILES):
        return math.inf
    return MAX_JSON_BYTES if file.name.endswith("config.json") else _MAX_TOKENIZER_BYTES


def _is_pointer(file: Path) -> bool:
    try:
        if not file.is_file() or file.stat().st_size >= _MAX_POINTER:
            return False
        with file.open("rb") as opened:
            return opened.read(len(_POINTER)) == _POINTER
    except OSError:
        return False


def check_names(name: str, names: Collection[str], place: str) -> None:
    """Raise EngineError unless there is a config.json; `place` is where that was looked for."""
    if "config.json" in names:
        return
    if reason := why_not_served(name, {}, names):
        raise EngineError(reason)
    if any_match(names, "*.gguf"):
        raise EngineError(gguf(name))
    if _ADAPTER_CONFIG in names:
        raise EngineError(
            f"{name!r} holds a LoRA adapter: name the model that it is for with --model, and the adapter with "
            "--adapter-path."
        )
    if "params.json" in names:
        raise EngineError(
            f"{name!r} has its makers' own layout (params.json, without a config.json), which MLX cannot read: "
            f"{MLX_VERSION}."
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
    if any_match(names, *_PYTORCH) and str(config.get("model_type")) in ENCODERS:
        raise EngineError(
            f"{name!r} has weights in PyTorch's format only, which is a program and is not run here. Convert them "
            "once, in their folder and with a Python that has PyTorch (pip install torch safetensors): "
            f'python -c "{_CONVERT}"'
        )
    if any_match(names, *_PYTORCH):
        raise EngineError(f"{name!r} has weights in PyTorch's format only: {MLX_VERSION}.")
    if unfinished := sorted(each for each in names if any_match([each], *_UNFINISHED)):
        raise EngineError(f"{name!r} has no weights yet: {unfinished[0]} is half a download. Finish it.")
    if any_match(names, "*.npz", "*.h5", "*.onnx", "*.msgpack"):
        raise EngineError(f"{name!r} has weights in a format that is not read here: {MLX_VERSION}.")
    if others := sorted(each for each in names if any_match([each], "*.safetensors")):
        raise EngineError(
            f"{name!r} has no {WEIGHTS}, but {others[0]}: if that has all of its weights, rename it to "
            "model.safetensors."
        )
    raise EngineError(
        f"{name!r} has no weights: there is no {WEIGHTS} in {place}. If a download or a copy was interrupted, do it "
        f"again; if it is no MLX model, {MLX_VERSION}."
    )


def _check_complete(name: str, folder: Path) -> None:
    """Raise EngineError unless all files of the weights are there."""
    if weight_files(folder):
        return
    present = {file.name for file in folder.glob(WEIGHTS) if file.is_file()}
    if broken := sorted(file.name for file in folder.glob(WEIGHTS) if file.name not in present):
        raise EngineError(
            f"{broken[0]} of {name!r} is a folder, or a link to a file that is not there: fetch the model again, or "
            "connect the disk that it is on."
        )
    counts = [int(part[3]) for each in present if (part := _PART.fullmatch(each))]
    missing = sorted(_indexed(folder / _INDEX) - present)
    if missing:
        what = f"{len(missing)} of the files that {_INDEX} names are missing, among them {missing[0]}"
    elif counts:
        what = f"of {max(counts)} files {len(present)} are there"
    else:
        what = f"its {_INDEX} names no files"
    other = f"; if all is there under other names, delete {_INDEX}" if (folder / _INDEX).is_file() else ""
    raise EngineError(
        f"The weights of {name!r} are not complete: {what}. Fetch the model again, or what is missing of it{other}."
    )


def _check_counts(name: str, config: Mapping[str, Any], tensors: int) -> None:
    """Raise EngineError for a configuration with more layers or experts than its weights could be for.

    Whatever is counted there is made one by one before a weight is looked at.
    """
    for part in (config, *(each for each in config.values() if isinstance(each, dict))):
        for key, value in part.items():
            if isinstance(value, int) and _COUNT.search(key) and value > max(tensors, _MAX_COUNT):
                raise EngineError(
                    f"{name!r} cannot be loaded: its config.json says {key} = {value}, and its weights are {tensors} "
                    "tensors. Correct the file, or fetch it again."
                )


def _check_headers(name: str, folder: Path) -> int:
    """Return how many tensors there are. Raises EngineError for a file that is not what its name says, or cut short."""
    tensors = 0
    for file in weight_files(folder):
        size = file.stat().st_size
        with file.open("rb") as opened:
            head = opened.read(8)
            length = int.from_bytes(head, "little")
            described = opened.read(length) if 8 + length <= size and length <= _MAX_HEADER else b""
        try:
            parts = [each for key, each in json.loads(described).items() if key != "__metadata__"]
            tensors += len(parts)
            is_whole = 8 + length + max((each["data_offsets"][1] for each in parts), default=0) <= size
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            is_whole = False
        if not is_whole:
            raise EngineError(
                f"{file.name} of {name!r} is damaged or cut short at {format_size(size)}: fetch it again."
            )
    return tensors


def gguf(name: str) -> str:
    """Say that a model is in the format of another program."""
    return f"{name!r} is in GGUF, the format of llama.cpp, which MLX cannot read: {MLX_VERSION}."


@contextmanager
def explain_load_errors(name: str) -> Iterator[None]:
    """Turn whatever mlx-lm raises while it loads a model into an EngineError with advice."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        reason = _reason(error)
        if "not supported" in reason:
            advice = "A newer mlx-lm may know this architecture."
        elif "trust_remote_code" in str(error):
            advice = (
                "It comes with Python code of its own; --trust-remote-code runs it, if you trust its makers."
            )
        else:
            advice = f"If its files are incomplete, fetch them again; if it is no MLX model, {MLX_VERSION}."
        raise EngineError(f"The model {name!r} could not be loaded: {reason}. {advice}") from error


def _reason(error: Exception) -> str:
    """Say what went wrong; what comes after the first line's colon is on the second one."""
    if isinstance(error, KeyError):
        return f"{error} is missing in its config.json, or in its weights"
    if found := _MISSING_ARGUMENTS.search(str(error)):
        return f"its config.json says nothing of {found[1]}"
    first, *others = str(error).strip().splitlines() or [""]
    line = first_line(error)
    return (
        f"{line}: {first_line(ValueError(others[0].rstrip(', ')))}"
        if first.rstrip().endswith(":") and others
        else line
    )


# -- sizes ---------------------------------------------------------------------------------------------------


def folder_bytes(folder: Path) -> int | None:
    """Return the size of the weights in a model's folder; None if it has none, or they are being replaced."""
    try:
        return sum(file.stat().st_size for file in weight_files(folder)) or None
    except OSError:
        return None


def model_files(folder: Path) -> ModelFiles:
    """Return what the files in a model's folder say of themselves."""
    config = read_json_or_empty(folder / "config.json")
    return ModelFiles(
        architecture=str(config.get("model_type") or ""),
        quantization=quantization(config),
        weight_bytes=folder_bytes(folder) or 0,
    )


def adapter_bytes(folder: Path) -> int | None:
    """Return the size of a LoRA adapter's weights."""
    try:
        return (folder.expanduser() / _ADAPTER_WEIGHTS).stat().st_size
    except OSError:
        return None


def listing(repository: str, endpoint: str | None = None) -> ModelInfo:
    """Return what Hugging Face, or another `endpoint`, says of a repository's files. Raises what its library does."""
    from huggingface_hub import HfApi

    return HfApi(endpoint=endpoint).model_info(repository, files_metadata=True, timeout=_LISTING_SECONDS)


def repository_bytes(repository: str, endpoint: str | None = None) -> int | None:
    """Return the size of the weights in a repository, from its listing at `endpoint` (None: the configured one)."""
    try:
        found = listing(repository, endpoint)
        sizes = {file.rfilename: file.size or 0 for file in found.siblings or ()}
    except Exception as error:  # of whatever kind: the download that follows explains it
        log.debug("The size of %s is not known: %s", repository, error)
        return None
    weights = [name for name in sizes if "/" not in name and fnmatchcase(name, WEIGHTS)]
    return sum(sizes[name] for name in chosen_weights(weights, None)) or None


def format_size(size: int) -> str:
    """Write bytes of files for people, in the units that disks are sold in: 12.1 GB are 12.1 · 1000³ bytes."""
    unit, name, digits = next((each for each in _UNITS if size >= each[0]), _UNITS[-1])
    return f"{size / unit:.{digits}f} {name}"


def _subfolders(folder: Path, changes: ChangeDetector) -> list[Path]:
    """Return the folders in a folder, and those that links in it lead to unless they lead above it."""
    changes.add(folder)
    try:
        real = folder.resolve()
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.name.isprintable() and entry.name[:1] != "."]
    except (OSError, RuntimeError):
        return []
    found = [folder / name for name in sorted(names, key=str.casefold)]
    return [each for each in found if _leads_down(each, real)]


def _leads_down(path: Path, above: Path) -> bool:
    """Whether a path is a folder, and not by a link to where `above` lies in."""
    try:
        return path.is_dir() and not above.is_relative_to(path.resolve())
    except (OSError, RuntimeError):  # what may not be looked at, or leads in a circle
        return False


def _hugging_face_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)
