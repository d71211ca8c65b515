"""From a name or a folder to a model in memory, or to an error that says what to do.

Knows where models come from and what can be wrong with them; nothing of requests.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx_lm

from mlx_backend.device.mlx import load_weights, set_precision
from mlx_backend.engine.mlx.kv_cache import can_rewind
from mlx_backend.engine.mlx.sharding import shard
from mlx_backend.engine.mlx.speculative import draft_layers
from mlx_backend.engine.mlx.tokenizer import MLXTokenizer
from mlx_backend.errors import EngineError, EngineRefused
from mlx_backend.models import files as model_files
from mlx_backend.models.engine_options import EngineOptions
from mlx_backend.models.loading import explain_load_errors, find_folder, first_line, read_config

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

log = logging.getLogger(__name__)

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
        set_precision(network, adapter)
        mx.eval(network.parameters())
    except Exception as error:
        raise EngineError(
            f"The adapter {adapter!r} does not fit {model.name!r}: {first_line(error)}."
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


def _vocabulary_size(config: Mapping[str, Any], wrapper: Any) -> int:
    return model_files.vocabulary_size(config) or len(wrapper)


def context_length_of(config: Mapping[str, Any]) -> int:
    """Return how many positions a model says it was made for."""
    length = model_files.context_length(config)
    if length is None:
        log.warning("The model does not say how long its context is; 4096 tokens are assumed.")
    return length or 4096
