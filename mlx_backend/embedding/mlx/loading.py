"""From a name or a folder to a network that reads, or to an error that says what to do.

Encoders are loaded here, by the names of their files' weights; causal models by mlx-lm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from mlx_backend.device.mlx import load_weights, set_precision
from mlx_backend.embedding.mlx.bert import ACTIVATIONS, Bert
from mlx_backend.embedding.mlx.causal import Bidirectional, Causal, load_causal
from mlx_backend.embedding.mlx.modernbert import ModernBert
from mlx_backend.embedding.mlx.pickled import tensors
from mlx_backend.embedding.recipe import context_length, positions, recipe_of
from mlx_backend.errors import EngineError
from mlx_backend.models.files import read_json_or_empty
from mlx_backend.models.loading import explain_load_errors, find_folder, read_config
from mlx_backend.models.model_type import ENCODERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from mlx_backend.embedding.recipe import EmbeddingOptions, Recipe

_NETWORKS: Mapping[str, type[Bert | ModernBert]] = {
    "bert": Bert,
    "roberta": Bert,
    "xlm-roberta": Bert,
    "camembert": Bert,
    "modernbert": ModernBert,
}
_BESIDE = ("[0-9]_*/*.safetensors", "sentencepiece.bpe.model")  # what such models have in their repositories
_PICKLED = ("pytorch_model*.bin", "[0-9]_*/pytorch_model.bin")  # where there is no safetensors


@dataclass(frozen=True, slots=True)
class Loaded:
    """A network in memory, its weights evaluated. `network` runs, `weights` is the module that holds them."""

    name: str
    folder: Path
    network: Any
    weights: nn.Module
    dense: tuple[Callable[[mx.array], mx.array], ...]
    recipe: Recipe
    context_length: int
    vocabulary_size: int
    dtype: mx.Dtype
    bytes_per_token: int  # that a step takes for a while
    kept_per_token: int  # that a causal model keeps of what it has read, from one step to the next


def load_network(
    source: str, options: EmbeddingOptions, report: Callable[[float], None], *, ranks: bool
) -> Loaded:
    """Load a folder or a Hugging Face repository. Must run on the thread that will use the model."""
    folder, name = find_folder(source, allow_download=options.allow_download, extra_files=_BESIDE)
    config = read_config(folder, name)
    kind = config["model_type"]
    if kind in _NETWORKS and not any(folder.glob("model*.safetensors")):
        beside = (*_BESIDE, *_PICKLED)
        folder, name = find_folder(source, allow_download=options.allow_download, extra_files=beside)
    _refuse_unknown(folder, name, config, ranks=ranks)
    recipe = recipe_of(folder, name, options, causal=kind not in ENCODERS and not _both_ways(config))
    network: Any
    with explain_load_errors(name):
        if kind in _NETWORKS:
            network = weights = _encoder(folder, config, ranks=ranks)
        else:
            weights, config = load_causal(folder, ranks=ranks)
            network = Bidirectional(weights, config) if _both_ways(config) else Causal(weights)
        weights.eval()
        set_precision(weights, name)
        dense = tuple(_dense_layers(folder, recipe, config))
        load_weights(weights, report)
    dtypes = [value.dtype for _, value in tree_flatten(weights.parameters())]
    dtype = next((each for each in dtypes if mx.issubdtype(each, mx.floating)), mx.float32)
    return Loaded(
        name=name,
        folder=folder,
        network=network,
        weights=weights,
        dense=dense,
        recipe=recipe,
        context_length=_context_length(folder, name, config, recipe, options),
        vocabulary_size=int(config["vocab_size"]),
        dtype=dtype,
        bytes_per_token=dtype.size * (8 * config["hidden_size"] + 3 * config["intermediate_size"]),
        kept_per_token=_cache_bytes(config, dtype) if isinstance(network, Causal) else 0,
    )


def _refuse_unknown(folder: Path, name: str, config: Mapping[str, Any], *, ranks: bool) -> None:
    kind = config["model_type"]
    if kind in ENCODERS and kind not in _NETWORKS:
        known = ", ".join(_NETWORKS)
        raise EngineError(
            f"The model {name!r} is a {kind!r}, which is not known here. Known are {known}, and causal models "
            "such as Qwen3-Embedding."
        )
    pickled = kind in _NETWORKS and any(folder.glob("pytorch_model*.bin"))
    if not pickled and not any(folder.glob("model*.safetensors")):
        raise EngineError(
            f"The model {name!r} has no weights in safetensors (model*.safetensors) in {folder}. Choose a "
            "repository that has, such as one of mlx-community's."
        )
    labels = config.get("id2label")
    if ranks and kind in _NETWORKS and isinstance(labels, dict) and len(labels) > 1:
        raise EngineError(
            f"The model {name!r} sorts texts into {len(labels)} classes; one that ranks has a single score."
        )
    if ranks and kind in _NETWORKS and "ForSequenceClassification" not in str(config.get("architectures")):
        raise EngineError(
            f"The model {name!r} has no head that scores; it makes vectors (--embedding-model)."
        )
    if ranks and kind not in _NETWORKS and "ForSequenceClassification" in str(config.get("architectures")):
        raise EngineError(
            f"The model {name!r} is a {kind!r} with a head of its own, which is not known here; choose the original, "
            "which answers yes or no."
        )
    if ranks and kind not in _NETWORKS and not kind.startswith("qwen3"):
        raise EngineError(
            f"The model {name!r} is a {kind!r}. How it was taught to rank is not known here; of the causal models "
            "Qwen3-Reranker's way is."
        )
    both_ways = config.get("is_causal") is False or config.get("use_bidirectional_attention")
    if kind not in _NETWORKS and both_ways and not _both_ways(config):
        raise EngineError(
            f"The model {name!r} is a {kind!r} that looks in both directions, which is not known here."
        )


def _encoder(folder: Path, config: Mapping[str, Any], *, ranks: bool) -> Bert | ModernBert:
    for key in ("hidden_act", "hidden_activation"):
        if config.get(key, "gelu") not in ACTIVATIONS:
            raise ValueError(f"its {key} {config[key]!r} is not known here")
    network = _NETWORKS[config["model_type"]](config, ranks=ranks)
    stored = _stored(folder)
    weights = {_own_name(name, network.prefixes): value for name, value in stored.items()}
    quantization = config.get("quantization") or config.get("quantization_config")
    if quantization:

        def quantised(path: str, module: nn.Module) -> bool | dict[str, Any]:
            own = quantization.get(path)
            if isinstance(own, dict):
                return own
            return hasattr(module, "to_quantized") and f"{path}.scales" in weights

        nn.quantize(
            network,
            group_size=quantization["group_size"],
            bits=quantization["bits"],
            mode=quantization.get("mode", "affine"),
            class_predicate=quantised,
        )
    wanted = {name for name, _ in tree_flatten(network.parameters())}
    if missing := sorted(wanted - weights.keys()):
        raise ValueError(f"its files lack {len(missing)} weights, {missing[0]} among them")
    network.load_weights([(name, value) for name, value in weights.items() if name in wanted])
    return network


def _stored(folder: Path) -> dict[str, mx.array]:
    """Return the weights in a folder by name; from PyTorch's own files where there are no others."""
    found: dict[str, mx.array] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        loaded: Any = mx.load(str(file))
        found |= loaded
    if not found:
        for file in sorted(folder.glob("pytorch_model*.bin")):
            found |= tensors(file)
    return found


def _own_name(name: str, prefixes: tuple[str, ...]) -> str:
    for prefix in prefixes:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        if name.endswith(old):
            name = name.removesuffix(old) + new
    return name


def _dense_layers(
    folder: Path, recipe: Recipe, config: Mapping[str, Any]
) -> Iterator[Callable[[mx.array], mx.array]]:
    """Load the layers that come after pooling, from their folders or from among the weights.

    Conversions put them there, as dense.0, dense.1 …, and may lose the list of them.
    """
    stored = [_stored(folder / step) for step in recipe.dense]
    if not all(stored) or not stored:
        beside = {name: value for name, value in _stored(folder).items() if name.startswith("dense.")}
        count = len(stored) or len({name.split(".")[1] for name in beside})
        own = [f"dense.{at}." for at in range(count)]
        stored = [
            {
                f"linear.{name.removeprefix(start)}": value
                for name, value in beside.items()
                if name.startswith(start)
            }
            for start in own
        ]
    for at, weights in enumerate(stored):
        step = recipe.dense[at] if recipe.dense else ""
        yield _dense(step, read_json_or_empty(folder / step / "config.json") if step else {}, weights, config)


def _dense(
    step: str, own: Mapping[str, Any], weights: Mapping[str, mx.array], config: Mapping[str, Any]
) -> Callable[[mx.array], mx.array]:
    activation = str(own.get("activation_function", "torch.nn.modules.linear.Identity")).rpartition(".")[2]
    if activation not in ("Identity", "Tanh"):
        raise ValueError(f"the activation {activation!r} of its {step} is not known here")
    if "linear.weight" not in weights:
        raise ValueError(f"the weights of its {step} are not there")
    matrix = weights["linear.weight"]
    if (scales := weights.get("linear.scales")) is not None:
        how = config["quantization"]
        matrix = mx.dequantize(
            matrix,
            scales,
            weights.get("linear.biases"),
            group_size=how["group_size"],
            bits=how["bits"],
            mode=how.get("mode", "affine"),
        )
    matrix = matrix.astype(mx.float32).T
    bias = weights.get("linear.bias", mx.zeros((1,))).astype(mx.float32)
    mx.eval(matrix, bias)

    def layer(vectors: mx.array) -> mx.array:
        made = vectors @ matrix + bias
        return mx.tanh(made) if activation == "Tanh" else made

    return layer


def _both_ways(config: Mapping[str, Any]) -> bool:
    return config["model_type"] == "gemma3_text" and bool(config.get("use_bidirectional_attention"))


def _context_length(
    folder: Path, name: str, config: Mapping[str, Any], recipe: Recipe, options: EmbeddingOptions
) -> int:
    possible, length = positions(config), options.context_length
    if length is not None and possible is not None and length > possible:
        raise EngineError(f"A context of {length} tokens is not possible: {name!r} holds {possible}.")
    return context_length(folder, config, recipe, options)


def _cache_bytes(config: Mapping[str, Any], dtype: mx.Dtype) -> int:
    """Return what a causal model keeps of a token while it reads on."""
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * heads * head * dtype.size)
