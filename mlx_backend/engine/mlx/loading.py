"""From a name or a folder to a model in memory, or to an error that says what to do.

Knows where models come from and what can be wrong with them; nothing of requests.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from mlx.utils import tree_flatten
from mlx_lm.utils import load_config

from ..base import EngineError
from .tokenizer import MLXTokenizer

log = logging.getLogger(__name__)

# Where configurations write how many positions a model was made for.
_CONTEXT_KEYS = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "n_positions", "seq_length")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, its weights evaluated."""

    name: str
    network: Any
    tokenizer: MLXTokenizer
    end_tokens: frozenset[int]
    context_length: int


def load_model(model: str | Path) -> LoadedModel:
    """Load a folder or a Hugging Face repository. Must run on the thread that will use the model."""
    folder, name = _find(str(model))
    config = _read_config(folder, name)
    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        raise EngineError(f"{name!r} has no tokenizer: there is no tokenizer.json in {folder}.")
    try:
        network, wrapper = mlx_lm.load(str(folder), lazy=True)
        if mx.default_device() == mx.Device(mx.cpu):
            _to_float32(network, name)
        mx.eval(network.parameters())
    except Exception as error:
        reason = _first_line(error)
        if "not supported" in reason:
            advice = "A newer mlx-lm may know this architecture."
        else:
            advice = (
                "If its files are incomplete, fetch them again; if it is no MLX model, see `mlx_lm.convert`."
            )
        raise EngineError(f"The model {name!r} could not be loaded: {reason}. {advice}") from error
    config |= config.get("text_config", {})  # where models that also see keep what concerns text
    return LoadedModel(
        name=name,
        network=network,
        tokenizer=MLXTokenizer(wrapper, config.get("vocab_size") or len(wrapper)),
        end_tokens=frozenset(wrapper.eos_token_ids),
        context_length=_context_length(config),
    )


def _find(model: str) -> tuple[Path, str]:
    """Give the model's folder, downloaded if need be, and its name."""
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
    return _download(model), model


def _download(repository: str) -> Path:
    # The small files first: an unknown name or an unsupported model is then known before the gigabytes.
    try:
        folder = Path(snapshot_download(repository, allow_patterns=["*.json"]))
        _read_config(folder, repository)
        return Path(
            snapshot_download(
                repository,
                allow_patterns=["*.json", "*.jinja", "*.txt", "*.jsonl", "*.model", "model*.safetensors"],
            )
        )
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
            f"({_first_line(error)}). Check the network, or name a folder that holds the model."
        ) from error


def _read_config(folder: Path, name: str) -> dict[str, Any]:
    """Read config.json and see whether this is a model that can run."""
    if not (folder / "config.json").is_file():
        raise EngineError(f"{name!r} holds no model: there is no config.json in {folder}.")
    try:
        config: dict[str, Any] = load_config(folder)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise EngineError(f"The config.json of {name!r} cannot be read: {error}.") from error
    if "model_type" not in config:
        raise EngineError(f"The config.json of {name!r} names no model_type: it is not a language model's.")
    return config


def _context_length(config: dict[str, Any]) -> int:
    for key in _CONTEXT_KEYS:
        if isinstance(length := config.get(key), int) and length > 0:
            return length
    log.warning("The model does not say how long its context is; 4096 tokens are assumed.")
    return 4096


def _to_float32(network: Any, name: str) -> None:
    """Compute in float32 on a CPU: half precision is slower there, and experts cannot run in it at all."""
    kinds = {value.dtype for _, value in tree_flatten(network.parameters())}
    if kinds & {mx.bfloat16, mx.float16}:
        log.info("%s is in half precision; on this CPU it runs in float32.", name)
        network.set_dtype(mx.float32)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(" .:?") if lines else type(error).__name__
