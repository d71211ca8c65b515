"""From a name or a folder to a model in memory, or to an error that says what to do.

Knows where models come from and what can be wrong with them; nothing of requests.
"""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

from mlx_backend.engine.mlx.kv_cache import can_rewind
from mlx_backend.engine.mlx.sharding import shard
from mlx_backend.engine.mlx.speculative import draft_layers
from mlx_backend.engine.mlx.tokenizer import MLXTokenizer
from mlx_backend.errors import EngineError, EngineRefused
from mlx_backend.models import files as model_files
from mlx_backend.models.engine_options import EngineOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


log = logging.getLogger(__name__)

_PIECE = 1 << 30
_ADAPTER_PARTS = ("lora_a", "lora_b", "m")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, slots=True)
class LoadedNetwork:
    """A model in memory, its weights evaluated."""

    name: str
    folder: Path
    network: Any
    tokenizer: MLXTokenizer
    end_tokens: frozenset[int]
    context_length: int
    sampling_defaults: Mapping[str, float]


def load_model(
    model: str | Path,
    options: EngineOptions = EngineOptions(),  # noqa: B008 - frozen
    report: Callable[[float], None] = lambda _part: None,
    group: mx.distributed.Group | None = None,
) -> LoadedNetwork:
    """Load a folder or a Hugging Face repository, or with a group this process's part of it.

    Must run on the thread that will use the model.
    """
    folder, name = find_folder(str(model), allow_download=options.allow_download)
    config = read_config(folder, name)
    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        raise EngineError(f"{name!r} has no tokenizer: there is no tokenizer.json in {folder}.")
    settings: dict[str, Any] = {"trust_remote_code": options.trust_remote_code}
    if options.chat_template is not None:
        settings["chat_template"] = options.chat_template
    with explain_load_errors(name):
        network, wrapper = mlx_lm.load(
            str(folder), settings, lazy=True, trust_remote_code=options.trust_remote_code
        )
        if options.chat_template is not None:
            wrapper.chat_template = options.chat_template
    if group is not None:
        shard(network, config, group, name)
    with explain_load_errors(name):
        set_precision(network, name)
        load_weights(network, report)
    tokenizer = MLXTokenizer(wrapper, _vocabulary_size(config, wrapper))
    if options.chat_template is not None:
        try:
            tokenizer.render([{"role": "user", "content": "hello"}], None)
        except EngineRefused as error:
            raise EngineError(f"The chat template that was given does not work. {error}") from error
    return LoadedNetwork(
        name=name,
        folder=folder,
        network=network,
        tokenizer=tokenizer,
        end_tokens=frozenset(wrapper.eos_token_ids),
        context_length=context_length_of(config),
        sampling_defaults=model_files.sampling_advice(folder),
    )


def with_adapter(model: LoadedNetwork, options: EngineOptions, adapter: str) -> Any:
    """Return a second network that shares the model's weights and has a LoRA adapter on top.

    The first is not touched, so there is nothing to take off again: mlx-lm's own removal leaves the experts of
    a mixture adapted.
    """
    folder = options.adapters[adapter].expanduser()
    if not (folder / "adapter_config.json").is_file():
        raise EngineError(f"{folder} holds no adapter: there is no adapter_config.json.")
    try:
        network, _ = mlx_lm.utils.load_model(
            model.folder, lazy=True, trust_remote_code=options.trust_remote_code
        )
        network.update(model.network.parameters())
        network = mlx_lm.utils.load_adapters(network, str(folder))
        network.eval()
        if mx.default_device() == mx.Device(mx.cpu):
            _to_float32(network, adapter)
        mx.eval(network.parameters())
    except Exception as error:
        raise EngineError(
            f"The adapter {adapter!r} does not fit {model.name!r}: {_first_line(error)}."
        ) from error
    return network


def load_draft(draft: str, options: EngineOptions, model: LoadedNetwork) -> Any:
    """Load a smaller model that drafts for `model`; it must have the same vocabulary."""
    folder, name = find_folder(draft, allow_download=options.allow_download)
    read_config(folder, name)
    with explain_load_errors(name):
        network, wrapper = mlx_lm.load(
            str(folder),
            {"trust_remote_code": options.trust_remote_code},
            lazy=True,
            trust_remote_code=options.trust_remote_code,
        )
        set_precision(network, name)
        mx.eval(network.parameters())
    sample = " the quick brown fox 12345 { } \n 日本語"
    encoded = wrapper.encode(sample, add_special_tokens=False)
    if encoded != model.tokenizer.encode(sample, control_tokens=False):
        raise EngineError(f"{name!r} cannot draft for {model.name!r}: its tokens are not the same.")
    if stuck := sorted({type(layer).__name__ for layer in draft_layers(network) if not can_rewind(layer)}):
        raise EngineError(f"{name!r} cannot draft: its {', '.join(stuck)} cannot be taken back.")
    return network


def network_bytes(network: Any, *, shared: bool = False) -> int:
    """Return what a network's weights take; if they are shared with another, what its adapter does."""
    return sum(
        value.nbytes
        for name, value in tree_flatten(network.parameters())
        if not shared or name.rpartition(".")[2] in _ADAPTER_PARTS
    )


@contextmanager
def explain_load_errors(name: str) -> Iterator[None]:
    """Turn whatever loading raises into an EngineError with advice."""
    try:
        yield
    except Exception as error:
        reason = _first_line(error)
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


def set_precision(network: Any, name: str) -> None:
    """Bring a network to the precision that this machine computes in."""
    if mx.default_device() == mx.Device(mx.cpu):
        _to_float32(network, name)


def load_weights(network: Any, report: Callable[[float], None]) -> None:
    """Read the weights into memory, a gigabyte at a time, so that somebody can watch."""
    weights = [value for _, value in tree_flatten(network.parameters())]
    total, done = sum(value.nbytes for value in weights) or 1, 0
    piece: list[mx.array] = []
    for value in weights:
        piece.append(value)
        if sum(each.nbytes for each in piece) >= _PIECE or value is weights[-1]:
            mx.eval(piece)
            done += sum(each.nbytes for each in piece)
            piece = []
            report(0.95 * done / total)  # the rest is for the warm-up


def _vocabulary_size(config: Mapping[str, Any], wrapper: Any) -> int:
    return model_files.vocabulary_size(config) or len(wrapper)


def find_folder(model: str, *, allow_download: bool, extra_files: Sequence[str] = ()) -> tuple[Path, str]:
    """Give the model's folder, downloaded if need be, and its name. `beside` are files that others do not need."""
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
        return Path(
            snapshot_download(
                repository,
                allow_patterns=[
                    *("*.json", "*.jinja", "*.txt", "*.jsonl", "*.model", "model*.safetensors"),
                    *extra_files,
                ],
                local_files_only=local_only,
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


def read_config(folder: Path, name: str) -> dict[str, Any]:
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


def context_length_of(config: Mapping[str, Any]) -> int:
    """Return how many positions a model says it was made for."""
    length = model_files.context_length(config)
    if length is None:
        log.warning("The model does not say how long its context is; 4096 tokens are assumed.")
    return length or 4096


def _to_float32(network: Any, name: str) -> None:
    """Compute in float32 on a CPU: half precision is slower there, and experts cannot run in it at all."""
    kinds = {value.dtype for _, value in tree_flatten(network.parameters())}
    if kinds & {mx.bfloat16, mx.float16}:
        log.info("%s is in half precision; on this CPU it runs in float32.", name)
        network.set_dtype(mx.float32)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(" .:?") if lines else type(error).__name__
