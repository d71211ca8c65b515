"""From a model's name to the folder that holds it, downloaded if need be, and from what goes wrong to advice.

Knows the Hugging Face hub and what a model folder must hold; no MLX and no requests.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_backend.errors import EngineError, EngineStopped, first_line
from mlx_backend.models.folders import gguf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_HUB = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/+([^/?#]+/[^/?#]+)")


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
    # Not at the top: a folder needs nothing of the library that downloads.
    from mlx_backend.models.download import download, downloaded

    return (download(model, on_progress) if allow_download else downloaded(model)), model


def _look_at(model: str) -> tuple[Path, bool, bool]:
    """Return the path that a name is, and whether it is a folder or a file."""
    path = Path(model)
    try:
        path = path.expanduser()
        return path, path.is_dir(), path.is_file()
    except (OSError, RuntimeError):  # too long for a path; the home of a user that does not exist
        return path, False, False


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
