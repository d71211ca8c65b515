"""Loads an embedding or rerank model from a folder or repository. Raises errors that say what to do.

Encoders are loaded here, by the weight names of their files; causal models by mlx-lm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from mlx_backend.device.mlx import keep_compiled_kernels, load_weights, set_precision, weight_bytes
from mlx_backend.embedding.embedding_config import context_length, embedding_config, max_positions
from mlx_backend.embedding.mlx.causal import Bidirectional, Causal, load_causal
from mlx_backend.embedding.mlx.encoders import ACTIVATIONS, Bert, ModernBert
from mlx_backend.errors import EngineError
from mlx_backend.models.download import find_folder
from mlx_backend.models.files import ENCODERS, read_json_or_empty
from mlx_backend.models.folders import WEIGHTS, explain_load_errors, read_model, weight_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from mlx_backend.embedding.embedding_config import EmbeddingConfig, EmbeddingOptions

_NETWORKS: Mapping[str, type[Bert | ModernBert]] = {
    "bert": Bert,
    "roberta": Bert,
    "xlm-roberta": Bert,
    "camembert": Bert,
    "modernbert": ModernBert,
}


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    """A model in memory, its weights evaluated. `network` is what runs, `weights` the module that holds them."""

    name: str
    folder: Path
    network: Any
    weights: nn.Module
    dense: tuple[Callable[[mx.array], mx.array], ...]
    config: EmbeddingConfig
    context_length: int
    vocabulary_size: int
    dtype: mx.Dtype
    bytes_per_token: int
    """Bytes of intermediate results in a stage."""
    cache_bytes_per_token: int
    """Bytes of a causal model's KV cache, which lasts from stage to stage."""


def load_embedding_model(
    source: str,
    options: EmbeddingOptions,
    on_progress: Callable[[float], None],
    *,
    rerank: bool,
    check_size: Callable[[str, int], None],
) -> EmbeddingModel:
    """Load a folder or a Hugging Face repository. Must run on the thread that will use the model.

    `check_size` gets the model's name and the bytes of its weights before they are read, and raises if they are too
    large.
    """
    keep_compiled_kernels()
    folder, name = find_folder(source, allow_download=options.allow_download)
    config = read_model(folder, name)
    is_encoder = config["model_type"] in _NETWORKS
    _check_supported(name, config, rerank=rerank)
    is_causal = config["model_type"] not in ENCODERS and not _is_bidirectional(config)
    embedding = embedding_config(folder, name, options, causal=is_causal)
    network: Any
    with explain_load_errors(name):
        if is_encoder:
            network = weights = _load_encoder(folder, config, rerank=rerank)
        else:
            weights, config = load_causal(folder, rerank=rerank)
            network = Causal(weights) if is_causal else Bidirectional(weights, config)
        weights.eval()
        set_precision(weights, name)
    check_size(name, weight_bytes(weights))
    with explain_load_errors(name):
        dense = tuple(_dense_layers(folder, embedding, config))
        load_weights(weights, on_progress)
    dtypes = [value.dtype for _, value in tree_flatten(weights.parameters())]
    dtype = next((each for each in dtypes if mx.issubdtype(each, mx.floating)), mx.float32)
    return EmbeddingModel(
        name=name,
        folder=folder,
        network=network,
        weights=weights,
        dense=dense,
        config=embedding,
        context_length=_context_length(folder, name, config, embedding, options),
        vocabulary_size=int(config["vocab_size"]),
        dtype=dtype,
        bytes_per_token=dtype.size * (8 * config["hidden_size"] + 3 * config["intermediate_size"]),
        cache_bytes_per_token=_cache_bytes(config, dtype) if is_causal else 0,
    )


def _check_supported(name: str, config: Mapping[str, Any], *, rerank: bool) -> None:
    """Raise EngineError for what cannot be run correctly here."""
    architecture = config["model_type"]
    is_encoder = architecture in _NETWORKS
    if architecture in ENCODERS and not is_encoder:
        raise EngineError(
            f"The model {name!r} is a {architecture!r}, which is not supported. Supported are "
            f"{', '.join(_NETWORKS)}, and causal models such as Qwen3-Embedding."
        )
    if rerank:
        _check_reranker(name, config, is_encoder=is_encoder)
    claims_bidirectional = config.get("is_causal") is False or config.get("use_bidirectional_attention")
    if not is_encoder and claims_bidirectional and not _is_bidirectional(config):
        raise EngineError(
            f"The model {name!r} is a {architecture!r} with bidirectional attention, which is not supported."
        )


def _check_reranker(name: str, config: Mapping[str, Any], *, is_encoder: bool) -> None:
    architecture = config["model_type"]
    labels = config.get("id2label")
    has_head = "ForSequenceClassification" in str(config.get("architectures"))
    if is_encoder:
        if isinstance(labels, dict) and len(labels) > 1:
            raise EngineError(
                f"The model {name!r} classifies texts into {len(labels)} classes; a rerank model has a single score."
            )
        if not has_head:
            raise EngineError(
                f"The model {name!r} has no rerank head; it is an embedding model (--embedding-model)."
            )
        return
    if has_head:
        raise EngineError(
            f"The model {name!r} is a {architecture!r} with a classification head, which is not supported; choose the "
            "original, which answers yes or no."
        )
    if not architecture.startswith("qwen3"):
        raise EngineError(
            f"The model {name!r} is a {architecture!r}, whose rerank prompt is not known here; of the causal models "
            "only Qwen3-Reranker is supported."
        )


def _load_encoder(folder: Path, config: Mapping[str, Any], *, rerank: bool) -> Bert | ModernBert:
    for key in ("hidden_act", "hidden_activation"):
        if config.get(key, "gelu") not in ACTIVATIONS:
            raise ValueError(f"its {key} {config[key]!r} is not supported")
    network = _NETWORKS[config["model_type"]](config, rerank=rerank)
    stored = _read_weights(folder)
    weights = {_network_name(name, network.prefixes): value for name, value in stored.items()}
    _quantise(network, config, weights)
    wanted = {name for name, _ in tree_flatten(network.parameters())}
    if missing := sorted(wanted - weights.keys()):
        raise ValueError(f"its files lack {len(missing)} weights, among them {missing[0]}")
    network.load_weights([(name, value) for name, value in weights.items() if name in wanted])
    return network


def _quantise(network: nn.Module, config: Mapping[str, Any], weights: Mapping[str, mx.array]) -> None:
    """Replace the layers that are quantised in the files by quantised ones."""
    quantization = config.get("quantization") or config.get("quantization_config")
    if not quantization:
        return

    def is_quantised(path: str, module: nn.Module) -> bool | dict[str, Any]:
        own = quantization.get(path)
        if isinstance(own, dict):
            return own
        return hasattr(module, "to_quantized") and f"{path}.scales" in weights

    nn.quantize(
        network,
        group_size=quantization["group_size"],
        bits=quantization["bits"],
        mode=quantization.get("mode", "affine"),
        class_predicate=is_quantised,
    )


def _read_weights(folder: Path) -> dict[str, mx.array]:
    """Return the weights in a folder by name."""
    weights: dict[str, mx.array] = {}
    for file in weight_files(folder):
        loaded: Any = mx.load(str(file))
        weights |= loaded
    return weights


def _network_name(name: str, prefixes: tuple[str, ...]) -> str:
    """Return a weight's name in our networks: without prefix, and with the current names for gamma and beta."""
    for prefix in prefixes:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        if name.endswith(old):
            name = name.removesuffix(old) + new
    return name


def _dense_layers(
    folder: Path, embedding: EmbeddingConfig, config: Mapping[str, Any]
) -> Iterator[Callable[[mx.array], mx.array]]:
    """Load the dense layers after pooling, from their own folders or from the model's weights.

    Conversions move them to the model's weights, as dense.0, dense.1 …, and may lose modules.json, which lists them.
    """
    stored = [_read_weights(folder / path) for path in embedding.dense]
    if not all(stored) or not stored:
        moved = {name: value for name, value in _read_weights(folder).items() if name.startswith("dense.")}
        count = len(stored) or len({name.split(".")[1] for name in moved})
        stored = [_stored_layer(moved, f"dense.{index}.") for index in range(count)]
    for index, weights in enumerate(stored):
        path = embedding.dense[index] if embedding.dense else ""
        settings = read_json_or_empty(folder / path / "config.json") if path else {}
        yield _dense_layer(path, settings, weights, config)


def _stored_layer(weights: Mapping[str, mx.array], prefix: str) -> dict[str, mx.array]:
    """Return the weights of one layer of those that were moved, with the names that they have in its own folder."""
    return {
        "linear." + name.removeprefix(prefix): value
        for name, value in weights.items()
        if name.startswith(prefix)
    }


def _dense_layer(
    path: str, settings: Mapping[str, Any], weights: Mapping[str, mx.array], config: Mapping[str, Any]
) -> Callable[[mx.array], mx.array]:
    """Make a function of vectors from a dense layer's weights, dequantised."""
    named = str(settings.get("activation_function", "torch.nn.modules.linear.Identity"))
    activation = named.rpartition(".")[2]
    if activation not in ("Identity", "Tanh"):
        raise ValueError(f"the activation {activation!r} of its {path} is not supported")
    if "linear.weight" not in weights:
        raise ValueError(f"the weights of its {path} are missing: no {WEIGHTS} there has them")
    matrix = weights["linear.weight"]
    if (scales := weights.get("linear.scales")) is not None:
        quantization = config["quantization"]
        matrix = mx.dequantize(
            matrix,
            scales,
            weights.get("linear.biases"),
            group_size=quantization["group_size"],
            bits=quantization["bits"],
            mode=quantization.get("mode", "affine"),
        )
    matrix = matrix.astype(mx.float32).T
    bias = weights.get("linear.bias", mx.zeros((1,))).astype(mx.float32)
    mx.eval(matrix, bias)

    def layer(vectors: mx.array) -> mx.array:
        output = vectors @ matrix + bias
        return mx.tanh(output) if activation == "Tanh" else output

    return layer


def _is_bidirectional(config: Mapping[str, Any]) -> bool:
    """Whether this is EmbeddingGemma: a decoder that was trained with bidirectional attention."""
    return config["model_type"] == "gemma3_text" and bool(config.get("use_bidirectional_attention"))


def _context_length(
    folder: Path, name: str, config: Mapping[str, Any], embedding: EmbeddingConfig, options: EmbeddingOptions
) -> int:
    limit, length = max_positions(config), options.context_length
    if length is not None and limit is not None and length > limit:
        raise EngineError(f"A context of {length} tokens is not possible: {name!r} has {limit}.")
    return context_length(folder, config, embedding, options)


def _cache_bytes(config: Mapping[str, Any], dtype: mx.Dtype) -> int:
    """Return the size of one token in a causal model's KV cache."""
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * heads * head_size * dtype.size)
