"""Multi-token prediction (MTP): the head that comes with some models, which drafts for them.

A head guesses the token after next, from the embedding of a token and from the hidden vector that the model computed
for the token before it: what the model's last norm returned. It is a layer of the model's own kind, with attention to
all such pairs before; embeddings and the output layer are the model's. Of its own guess it makes the next one, with its
own output in place of the hidden vector.

So a head needs two more layers of a sequence's caches: its keys and values, and the model's hidden vectors. Every
run of the model writes both (`attach`), and so prefixes, the disk cache, rewinding and batches carry them like the
others. That takes three small matrix products: what else the head would compute from a prompt's tokens nothing reads,
and MLX computes nothing that is not read. What the head writes while it drafts is taken back; the next run of the model
writes it again, from hidden vectors that are the model's and not the head's.

Drafts are chosen as the reply's own tokens are (sampling.py), and verified by decode.py: a head can never change a
reply. One that is missing or does not fit leaves its model without drafts, and a sentence that says why.

Checked with mlx-vlm 0.7.10's `qwen3_5_mtp`, whose logits for the same weights are the same. Knows nothing of requests.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from inspect import signature
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask, create_causal_mask
from mlx_lm.models.cache import ArraysCache, KVCache
from mlx_lm.utils import infer_quant_config

from mlx_backend.engine.mlx.mlx_lm_patches.image_inputs import given_embeddings
from mlx_backend.engine.mlx.mlx_lm_patches.kv_caches import GrowingKVCache
from mlx_backend.engine.mlx.mlx_lm_patches.packed_layer import PackedLayer, TokenPositions, joined
from mlx_backend.errors import EngineError, first_line
from mlx_backend.layers.architecture import weights_of_head
from mlx_backend.models.files import read_json_or_empty
from mlx_backend.models.folders import head_files, weight_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from mlx_backend.engine.mlx.kv_cache import LayerCaches

type Weights = dict[str, mx.array]

_QWEN: Final = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
_OTHERS: Final = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "mimo", "nemotron_h")
"""Architectures of mlx-lm whose original heads are read here. Others differ in their layers or in what they are fed."""
_PARTS: Final = {
    "eh_proj": "fc",
    "input_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "token_layernorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "hidden_layernorm": "pre_fc_norm_hidden",
    "shared_head.norm": "norm",
    "shared_head_norm": "norm",
    "final_layernorm": "norm",
}
"""What others call parts of a head, and Qwen."""
_COPIES: Final = ("embed_tokens", "shared_head.head", "lm_head")
"""Copies of the model's own layers, which some heads have."""
_LAYER: Final = re.compile(r"(?:mtp_block\.|layers\.(\d+)\.)?(.+)\.(\w+)")
_TELLING: Final = re.compile(r".*\b(q_norm|k_norm|input_layernorm|post_attention_layernorm)\.weight")
_MAX_LESS_ONE: Final = 0.85
"""The mean of these norms, if 1 has been taken from each: in published heads 0.3 to 0.75; those of others overlap."""
_DRAFTERS: Final = ("glm4_moe_lite_mtp", "nemotron_h_mtp", "qwen3_5_mtp")
"""What mlx-vlm's `convert --mtp` calls the heads of these, in a folder of their own."""
_LAYER_COUNTS: Final = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
"""How many layers a model's head has, by the names that configurations use."""
_EXPERT: Final = re.compile(r"(.+)\.experts\.(\d+)\.(\w+\.\w+)")
_UNFIT: Final = (ValueError, RuntimeError, TypeError, AttributeError, KeyError, IndexError)
"""What MLX and mlx-lm raise for weights that are not those of a layer."""
TRIED_TOKENS: Final = 4
DRAFTING: Final = "The model's MTP head drafts for its replies."


@dataclass(frozen=True, slots=True)
class FoundHead:
    """A model's head, or in a sentence why it has none; that is empty for a model that is not said to have one."""

    head: Head | None = None
    reason: str = ""


class Head(nn.Module):  # type: ignore[misc]  # MLX's modules have no types
    """The network of a head, by the names of Qwen's checkpoints.

    `layers` are new ones of its model's kinds. The first has attention; others, as Nemotron-H's mixture, have none.
    """

    def __init__(self, layers: Sequence[Any], width: int, eps: float) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = nn.RMSNorm(width, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(width, eps=eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = list(layers)
        self.norm = nn.RMSNorm(width, eps=eps)

    def __call__(self, embeddings: mx.array, hidden: mx.array, cache: Any) -> mx.array:
        """Return what the next tokens' logits are made of, and the next guess: as wide as `hidden`."""
        output = self._inputs(embeddings, hidden)
        first, *others = self.layers
        output = first(output, _mask(output, cache), cache)
        for layer in others:
            output = layer(output)
        normed: mx.array = self.norm(output)
        return normed

    def write(self, embeddings: mx.array, hidden: mx.array, cache: Any) -> None:
        """Write the keys and values of pairs."""
        layer, inputs = self.layers[0], self._inputs(embeddings, hidden)
        norm = layer.input_layernorm if "input_layernorm" in layer else layer.norm
        attention = layer.self_attn if "self_attn" in layer else layer.mixer
        attention(norm(inputs), _mask(inputs, cache), cache)

    def _inputs(self, embeddings: mx.array, hidden: mx.array) -> mx.array:
        pair = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)]
        inputs: mx.array = self.fc(mx.concatenate(pair, axis=-1))
        return inputs


def _mask(inputs: mx.array, cache: Any) -> Any:
    return create_attention_mask(inputs, cache, return_array=True)  # MLA takes no other


# -- from files to a head ----------------------------------------------------------------------------------------


def own_head(network: Any, folder: Path) -> FoundHead:
    """Return the head whose weights are among a model's own, read lazily. `network` is the model's, just loaded."""
    after_last = rf"layers\.{len(getattr(network, 'layers', ()))}"
    name = re.compile(rf"(?:(?:model|language_model)\.)*(?:mtp|mtp_layers\.0|{after_last})\.(.+)")
    try:
        weights, others = _weights(weight_files(folder), name)
        # In files of their own they may have no more than their names in the head.
        weights |= _weights(head_files(folder), re.compile(rf"(?:{name.pattern.removesuffix('(.+)')})?(.+)"))[
            0
        ]
        if weights:
            return FoundHead(_make(network, weights))
        if weights_of_head(others):
            raise _unknown(network)
    except _UNFIT as error:
        return FoundHead(reason=f"The model's MTP head is not used: {_in_a_line(error)}.")
    config = read_json_or_empty(folder / "config.json")
    text = config.get("text_config")
    counts = [{**config, **(text if isinstance(text, dict) else {})}.get(name) for name in _LAYER_COUNTS]
    if not any(isinstance(count, int) and count > 0 for count in counts):
        return FoundHead()
    return FoundHead(
        reason="No MTP head drafts for this model: it was trained with one, but its files are without it, as after "
        "most conversions. --draft-model takes a folder that mlx-vlm's `convert --mtp` has written."
    )


def head_in(folder: Path, network: Any) -> Head:
    """Return the head in a folder of its own, read lazily, for a model. Raises EngineError if it does not fit."""
    kind = read_json_or_empty(folder / "config.json").get("model_type")
    try:
        if kind not in _DRAFTERS:
            raise ValueError(f"what is called {kind!r} is not read here, only {', '.join(_DRAFTERS)} are")
        weights, _ = _weights(weight_files(folder), re.compile(r"(?:mtp\.|model\.)?(.+)"))
        return _make(network, weights)
    except _UNFIT as error:
        raise EngineError(
            f"What {folder} holds cannot draft for this model: {_in_a_line(error)}. Name an MTP head that was made "
            "from the same model, a whole model, or leave --draft-model out."
        ) from error


def _weights(files: Iterable[Path], name: re.Pattern[str]) -> tuple[Weights, set[str]]:
    """Return weights by what a pattern finds of their names, and the other names."""
    found: Weights = {}
    others = set[str]()
    for file in files:
        arrays: Weights = mx.load(str(file))  # type: ignore[assignment]  # of this format
        found |= {match[1]: value for each, value in arrays.items() if (match := name.fullmatch(each))}
        others |= {each for each in arrays if not name.fullmatch(each)}
    return found, others


def _of_qwen(weights: Weights) -> Weights:
    """Return weights as MLX writes them.

    In an original checkpoint the experts of a mixture are apart, or joined otherwise, and 1 has been taken from each
    norm. Those who convert a head give that back or not, whatever else they convert, so the values tell.
    """
    found = dict(weights)
    telling = [value.astype(mx.float32).mean() for name, value in found.items() if _TELLING.fullmatch(name)]
    if telling and (mx.stack(telling).mean() < _MAX_LESS_ONE).item():
        is_norm = re.compile(r"(.*\.)?(\w*norm|pre_fc_norm_\w+)\.weight").fullmatch
        found = {name: value + 1.0 if is_norm(name) else value for name, value in found.items()}
    for name in [name for name in found if name.endswith(".experts.gate_up_proj")]:
        mixture = name.removesuffix(".experts.gate_up_proj")
        gate, up = mx.split(found.pop(name), 2, axis=-2)
        found[f"{mixture}.switch_mlp.gate_proj.weight"] = gate
        found[f"{mixture}.switch_mlp.up_proj.weight"] = up
        found[f"{mixture}.switch_mlp.down_proj.weight"] = found.pop(f"{mixture}.experts.down_proj")
    experts: dict[str, dict[int, mx.array]] = {}
    for name in list(found):
        if (match := _EXPERT.fullmatch(name)) is not None:
            experts.setdefault(f"{match[1]}.switch_mlp.{match[3]}", {})[int(match[2])] = found.pop(name)
    return found | {
        name: mx.stack([parts[number] for number in sorted(parts)]) for name, parts in experts.items()
    }


def _of_others(network: Any, weights: Weights) -> Weights:
    """Return the weights of other families' heads by the names of Qwen's.

    mlx-lm brings a layer's own weights into its form, if it is called one that the model has.
    """
    found: Weights = {}
    layers: dict[tuple[int, str], mx.array] = {}
    for name, value in weights.items():
        match = _LAYER.fullmatch(name)
        number, part, kind = match.groups() if match else (None, name, "")
        if part in _PARTS:
            found[f"{_PARTS[part]}.{kind}"] = value
        elif part not in _COPIES:
            layers[int(number or 0), f"{part}.{kind}"] = value
        if part == "input_proj":  # MiMo's takes the hidden vector first
            found[f"fc.{kind}"] = mx.concatenate([*mx.split(value, 2, axis=-1)[::-1]], axis=-1)
    start = len(network.layers) - 1 - max((number for number, _ in layers), default=0)
    prefix = next(path for path, module in network.named_modules() if module is network.layers[0])
    prefix = prefix.removesuffix("0")
    sanitized = network.sanitize(
        {f"{prefix}{start + at}.{name}": each for (at, name), each in layers.items()}
    )
    for name, value in sanitized.items():
        number, _, rest = name.removeprefix(prefix).partition(".")
        found[f"layers.{int(number) - start}.{rest}"] = value
    return found


def _make(network: Any, weights: Weights) -> Head:
    """Return a head for a network. Raises one of `_UNFIT` if the weights are not those of one."""
    family = _family(network)
    if family not in (*_QWEN, *_OTHERS):
        raise _unknown(network)
    weights = _of_qwen(weights) if family in _QWEN else _of_others(network, weights)
    norm = _shared(network).norm
    head = Head(_new_layers(network, weights), norm.weight.size, norm.eps)

    def quantisation(path: str, module: Any) -> Any:
        can = hasattr(module, "to_quantized") and f"{path}.scales" in weights
        return infer_quant_config(path, module, weights) if can else False

    nn.quantize(head, class_predicate=quantisation)
    head.load_weights(list(weights.items()))
    head.eval()
    return head


def _new_layers(network: Any, names: Iterable[str]) -> list[Any]:
    """Return new layers for a head with weights of these names, each like the model's last one that has such parts.

    Raises ValueError if there is none, or if there would be attention in another than the first.
    """
    parts: dict[int, set[str]] = {}
    for name in names:
        if (match := _LAYER.fullmatch(name)) is not None and match[1] is not None:
            parts.setdefault(int(match[1]), set()).add(match[2])
    arguments, layers = _shared(network).arguments, list[Any]()
    for number, own in sorted(parts.items()):
        alike = [
            at for at, each in enumerate(network.layers) if own <= {path for path, _ in each.named_modules()}
        ]
        if not alike:
            raise ValueError(f"its layer {number} is like none of the model's")
        like = network.layers[alike[-1]]
        kind = getattr(like, "block_type", None)  # of Nemotron-H's: E is a mixture, - an MLP
        if layers and kind not in ("E", "-"):
            raise ValueError(f"its layer {number} has attention, as the first one")
        settings = [arguments, alike[-1] if kind is None else kind]
        layers.append(type(like)(*settings[: len(signature(type(like)).parameters)]))
    return layers


def _family(network: Any) -> str:
    return type(network).__module__.rpartition(".")[2]


def _unknown(network: Any) -> ValueError:
    return ValueError(f"those of {_family(network)!r} models are not read here")


def _in_a_line(error: Exception) -> str:
    """Return an error's text in one line: MLX names the weights that do not fit in lines of their own."""
    return first_line(ValueError(" ".join(str(error).split())))


class _Shared(NamedTuple):
    """What a head shares with its network."""

    arguments: Any
    norm: Any
    """What returns the hidden vectors."""
    embed: Any
    output: Callable[[mx.array], mx.array]


def _shared(network: Any) -> _Shared:
    """Return those parts, whatever they are called there."""
    text = getattr(network, "language_model", network)
    body = text.backbone if "backbone" in text else text.model
    embed = body.embeddings if "embeddings" in body else body.embed_tokens
    norm = body.norm_f if "norm_f" in body else body.norm
    return _Shared(text.args, norm, embed, text.lm_head if "lm_head" in text else embed.as_linear)


# -- a network with a head ---------------------------------------------------------------------------------------


def attach(network: Any, head: Head) -> None:
    """Have a network make two more caches, and write them in every run."""
    norm = _shared(network).norm
    norm.__class__ = _recording(norm.__class__)
    network.mtp_head = head
    network.__class__ = _with_head(network.__class__)


def head_of(network: Any) -> Head | None:
    """Return a network's head, if it has one."""
    return getattr(network, "mtp_head", None)


def last_hidden(network: Any) -> mx.array:
    """Return the hidden vectors of all tokens of the last run ([1, tokens, width])."""
    hidden: mx.array = vars(network)["last_hidden"]
    return hidden


@functools.cache
def _recording(kind: Any) -> Any:
    """Return a norm's class that keeps what it returns until it is asked for."""

    def call(self: Any, inputs: mx.array) -> mx.array:
        output: mx.array = kind.__call__(self, inputs)
        vars(self)["output"] = output
        return output

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


@functools.cache
def _with_head(kind: Any) -> Any:
    def call(self: Any, inputs: mx.array, cache: Any = None, **named: Any) -> mx.array:
        if cache is None:
            return kind.__call__(self, inputs, **named)  # type: ignore[no-any-return]  # mlx-lm has no types
        *layers, pairs, last = cache
        shared = _shared(self)
        embeddings = given_embeddings(shared.embed)
        logits: mx.array = kind.__call__(self, inputs, cache=layers, **named)
        hidden = vars(shared.norm).pop("output")
        if embeddings is None:
            embeddings = shared.embed(inputs)
        self.mtp_head.write(embeddings, _shifted(last, hidden), pairs)
        vars(self)["last_hidden"] = hidden
        # Computed with the logits, so that nothing piles up.
        state = tree_flatten([pairs.state, last.state])
        complete: list[mx.array] = mx.depends(
            [logits], [each for _, each in state if isinstance(each, mx.array)]
        )
        return complete[0]

    def make_cache(self: Any) -> LayerCaches:
        layers = kind.make_cache(self) if hasattr(kind, "make_cache") else [KVCache() for _ in self.layers]
        has_states = any(isinstance(layer, ArraysCache) for layer in layers)
        # Those of hidden vectors are not quantised: a decoding step reads the last ones only.
        return [*layers, KVCache(), ArraysCache(1) if has_states else GrowingKVCache()]

    return type(
        kind.__name__, (kind,), {"__call__": call, "make_cache": make_cache, "__module__": kind.__module__}
    )


def _shifted(last: Any, hidden: mx.array) -> mx.array:
    """Write the hidden vectors of tokens ([rows, tokens, width]); return those of the token before each.

    Of a model with states the last one is kept, as a state. Of others all are, as if they were keys and values, so that
    any number of them can be trimmed.
    """
    if isinstance(last, PackedLayer):
        shifted: mx.array = last.run_by_segment(_shifted, (last, hidden), {})
        return shifted
    if isinstance(last, ArraysCache):
        before = last[0] if last[0] is not None else mx.zeros_like(hidden[:, :1])
        last[0] = hidden[:, -1:]
        return mx.concatenate([before, hidden[:, :-1]], axis=1)
    fetched = last.update_and_fetch(*mx.split(hidden[:, None], 2, axis=-1))
    return mx.concatenate([_before(each, hidden.shape[1]) for each in fetched], axis=-1)[:, 0]


def _before(vectors: mx.array, count: int) -> mx.array:
    """Return the vectors before each of the last ones ([rows, 1, tokens, width]); the first of all has zeros there."""
    length = vectors.shape[2]
    found = vectors[:, :, max(0, length - count - 1) : length - 1]
    return mx.pad(found, [(0, 0), (0, 0), (count - found.shape[2], 0), (0, 0)])


def last_vector(last: Any) -> mx.array | None:
    """Return the last hidden vector that a cache of a single sequence holds ([1, 1, width])."""
    if isinstance(last, ArraysCache):
        vector: mx.array | None = last[0]
        return vector
    if last.empty():
        return None
    halves = [each[:, 0, last.offset - 1 : last.offset] for each in (last.keys, last.values)]
    return mx.concatenate(halves, axis=-1)


# -- drafting ----------------------------------------------------------------------------------------------------


class HeadCache:
    """The cache of a head's keys and values as its attention sees it: without the first token's.

    There is no hidden vector before that. `shift` is added to positions.
    """

    def __init__(self, cache: Any, shift: int) -> None:
        self._cache = cache
        self._shift = shift
        self._start = cache.offset

    @property
    def offset(self) -> int:
        """The position of the next pair."""
        return int(self._cache.offset) + self._shift

    def make_mask(self, length: int, **_: Any) -> mx.array | None:
        """Return the mask of the next pairs; one sees all before it."""
        return None if length == 1 else create_causal_mask(length, int(self._cache.offset) - 1)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append a pair's keys and values; return all but the first's."""
        keys, values = self._cache.update_and_fetch(keys, values)
        return keys[..., 1:, :], values[..., 1:, :]

    def take_back(self) -> None:
        """Take back all that was appended since this object was made."""
        self._cache.trim(self._cache.offset - self._start)


def run_head(
    network: Any, tokens: Sequence[mx.array], hidden: Sequence[mx.array], caches: Sequence[HeadCache]
) -> tuple[mx.array, list[mx.array]]:
    """Run a network's head on the tokens ([1, tokens]) of several texts, each with the hidden vectors before them.

    Returns the logits after each text ([texts, vocabulary]), and its own output there, which stands for the hidden
    vector of the next token. Texts are packed, as the model's must be that several are drafted for.
    """
    lengths = [each.shape[1] for each in tokens]
    cache: Any = caches[0]
    if len(caches) > 1:
        positions = [each.offset + mx.arange(length) for each, length in zip(caches, lengths, strict=True)]
        cache = PackedLayer(caches, [(1, length) for length in lengths], TokenPositions(joined(positions)))
    shared = _shared(network)
    embeddings = shared.embed(joined(tokens, axis=1))
    output = network.mtp_head(embeddings, joined(hidden, axis=1), cache)
    ends = [*accumulate(lengths)]
    last = output[:, mx.array([end - 1 for end in ends])]
    return shared.output(last)[0], [last[:, at : at + 1] for at in range(len(ends))]


def problem_of(network: Any, layers: LayerCaches) -> str:
    """Return why a network's head is of no use, on its empty caches; "" if nothing is found."""
    tokens = mx.zeros((1, TRIED_TOKENS), mx.uint32)
    try:
        network(tokens, cache=layers)
        *_, pairs, last = layers
        hidden = last_vector(last)
        assert hidden is not None
        logits, _ = run_head(network, [tokens[:, :1]], [hidden], [HeadCache(pairs, 0)])
        if not mx.all(mx.isfinite(logits)).item():
            return "its logits are not all numbers"
    except Exception as error:  # whatever the network raises
        return first_line(error)
    return ""
