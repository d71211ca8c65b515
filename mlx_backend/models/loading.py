"""From a model's name to the folder that holds it, downloaded if need be, and from what goes wrong to advice.

Knows the Hugging Face hub and what a model folder must hold; no MLX and no requests.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from mlx_backend.errors import EngineError, EngineStopped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_FILES = ("*.json", "*.jinja", "*.txt", "*.jsonl", "*.model", "model*.safetensors")


def find_folder(model: str, *, allow_download: bool, extra_files: Sequence[str] = ()) -> tuple[Path, str]:
    """Return the model's folder, downloaded if need be, and its name.

    `extra_files` are patterns of files that only some models need. Raises EngineError with advice.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path, path.resolve().name
    if path.is_file():
        raise EngineError(
            f"{model!r} is a file; name the folder that holds the model's config.json and weights."
        )
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise EngineError(
            f"There is no folder {model!r}. Name a folder with an MLX model, or a Hugging Face repository "
            "such as mlx-community/gpt-oss-20b-MXFP4-Q8."
        )
    return _download(model, extra_files, local_only=not allow_download), model


def _download(repository: str, extra_files: Sequence[str], *, local_only: bool) -> Path:
    # The small files first: an unknown name or an unsupported model is then known before the gigabytes.
    try:
        folder = Path(snapshot_download(repository, allow_patterns=["*.json"], local_files_only=local_only))
        read_config(folder, repository)
        patterns = [*_FILES, *extra_files]
        return Path(snapshot_download(repository, allow_patterns=patterns, local_files_only=local_only))
    except GatedRepoError as error:
        raise EngineError(
            f"The repository {repository!r} asks you to accept its terms first: do so on its page on Hugging "
            "Face, then log in with `hf auth login`."
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise EngineError(
            f"There is no folder and no Hugging Face repository {repository!r}. Check the spelling; "
            "a private repository needs `hf auth login`."
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise EngineError(
            f"There is no folder {repository!r}, and it could not be fetched from Hugging Face "
            f"({first_line(error)}). Check the network, or name a folder that holds the model."
        ) from error


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """Read a folder's config.json. Raises EngineError if it is not that of a model that can run."""
    if not (folder / "config.json").is_file():
        raise EngineError(f"{name!r} holds no model: there is no config.json in {folder}.")
    try:
        config: Any = json.loads((folder / "config.json").read_bytes())
    except (ValueError, RecursionError) as error:
        raise EngineError(f"The config.json of {name!r} cannot be read: {error}.") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise EngineError(f"The config.json of {name!r} names no model_type: it is not a language model's.")
    return config


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


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, without its full stop; its class's name if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(" .:?") if lines else type(error).__name__
