"""Whether files are a model that can run here, and which of them are needed: by their names, and by config.json.

A folder and the listing of a repository are looked at alike. Reads nothing else, and downloads nothing.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from mlx_backend.errors import EngineError
from mlx_backend.models.files import read_json
from mlx_backend.models.folders import PICKLED_WEIGHTS, WEIGHTS
from mlx_backend.models.model_type import ENCODERS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

# Matched with the path inside the repository; a star may stand for a slash. Python code and tiktoken's vocabularies are
# for models that need --trust-remote-code, the numbered folders for further layers of sentence transformers.
_NEEDED = (
    *("*.json", "*.jinja", "*.txt", "*.jsonl", "*.model", "*.py", "*.tiktoken"),
    *(WEIGHTS, "[0-9]_*/*.safetensors"),
)
_NEEDED_PICKLED = (PICKLED_WEIGHTS, "[0-9]_*/pytorch_model.bin")
_PYTORCH = ("*.bin", "*.pt", "*.pth", "consolidated*.safetensors")
_MLX_VERSION = "choose the model's MLX version, which most have on Hugging Face (mlx-community has thousands)"


def needed_patterns(config: Mapping[str, Any], names: Iterable[str]) -> tuple[str, ...]:
    """Return which files of a repository are needed: PyTorch's weights only for an encoder that has no others."""
    if config.get("model_type") in ENCODERS and not any_match(names, WEIGHTS):
        return (*_NEEDED, *_NEEDED_PICKLED)
    return _NEEDED


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
    is_encoder = config.get("model_type") in ENCODERS
    if any_match(names, WEIGHTS) or (is_encoder and any_match(names, PICKLED_WEIGHTS)):
        return
    if any_match(names, "*.gguf"):
        raise EngineError(gguf(name))
    if any_match(names, *_PYTORCH):
        raise EngineError(f"{name!r} has weights in PyTorch's format only: {_MLX_VERSION}.")
    raise EngineError(
        f"{name!r} has no weights: there is no {WEIGHTS} in {place}. If a download or a copy was interrupted, do it "
        "again; if it is no MLX model, see `mlx_lm.convert`."
    )


def gguf(name: str) -> str:
    """Say that a model is in the format of another program."""
    return f"{name!r} is in GGUF, the format of llama.cpp, which MLX cannot read: {_MLX_VERSION}."
