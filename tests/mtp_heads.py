"""MTP heads for tiny models: random ones, and ones that have learnt what their model says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from inspect import signature
from itertools import repeat
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn, optimizers
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache

from mlx_backend.engine.mlx.arrays import as_ints
from mlx_backend.engine.mlx.mtp import Head
from mlx_backend.layers.architecture import load_network

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    Weights = dict[str, mx.array]

LEARNING_STEPS = 60


def text_of(network: Any) -> Any:
    """Return the language model of a network."""
    return getattr(network, "language_model", network)


def backbone_of(network: Any) -> Any:
    """Return what makes tokens hidden vectors."""
    text = text_of(network)
    return text.backbone if "backbone" in text else text.model


def embedding_of(network: Any) -> Any:
    """Return what embeds tokens."""
    backbone = backbone_of(network)
    return backbone.embeddings if "embeddings" in backbone else backbone.embed_tokens


def random_head(model: Path, *, seed: int = 5) -> Head:
    """Return a head of a model's sizes."""
    network, _ = load_network(model)
    text, layers = text_of(network), backbone_of(network).layers
    mx.random.seed(seed)
    if hasattr(layers[0], "block_type"):
        own = [type(layers[0])(text.args, kind) for kind in "*E"]
    else:
        index, like = [(at, each) for at, each in enumerate(layers) if hasattr(each, "self_attn")][-1]
        own = [type(like)(*[text.args, index][: len(signature(type(like)).parameters)])]
    norm = [module for module in backbone_of(network).children().values() if isinstance(module, nn.RMSNorm)][
        -1
    ]
    head = Head(own, norm.weight.size, norm.eps)
    head.update(tree_map(lambda value: value + 0.05 * mx.random.normal(value.shape), head.parameters()))
    return head


def learnt_head(model: Path, prompts: Iterable[Sequence[int]], *, tokens: int) -> Head:
    """Return a head that has learnt what its model says after some prompts, greedily."""
    network, _ = load_network(model)
    texts = [_said(network, prompt, tokens) for prompt in prompts]
    lesson = Lesson.of(network, [(text, mx.ones(text.shape)) for text in texts])
    return teach(network, random_head(model), repeat(lesson, LEARNING_STEPS), rate=0.01)


@dataclass(frozen=True)
class Lesson:
    """Texts ([tokens]), the weight of each of their tokens, and the hidden vectors that a model has for them."""

    texts: Sequence[tuple[mx.array, mx.array]]
    hidden: Sequence[mx.array]

    @classmethod
    def of(cls, network: Any, texts: Sequence[tuple[mx.array, mx.array]]) -> Lesson:
        """Have a model read texts."""
        hidden = [backbone_of(network)(text[None], make_prompt_cache(network)) for text, _ in texts]
        mx.eval(hidden)
        return cls(texts, hidden)


def teach(network: Any, head: Head, lessons: Iterable[Lesson], *, rate: float) -> Head:
    """Have a head learn the tokens after next, a step for each lesson."""
    text, embed = text_of(network), embedding_of(network)
    output = text.lm_head if "lm_head" in text else embed.as_linear

    def loss(learner: Head, lesson: Lesson) -> mx.array:
        losses, total = [], mx.array(0.0)
        for (said, weights), hidden in zip(lesson.texts, lesson.hidden, strict=True):
            guess = learner(embed(said[None, 1:-1]), hidden[:, :-2], None)
            found = nn.losses.cross_entropy(output(guess)[0], said[2:], weights=weights[2:])
            losses.append(found.sum())
            total += weights[2:].sum()
        return mx.stack(losses).sum() / total

    adam, gradients = optimizers.Adam(rate), nn.value_and_grad(head, loss)
    for lesson in lessons:
        _, changes = gradients(head, lesson)
        adam.update(head, changes)
        mx.eval(head.parameters(), adam.state)
    return head


def _said(network: Any, prompt: Sequence[int], tokens: int) -> mx.array:
    cache, said = make_prompt_cache(network), list(prompt)
    logits = network(mx.array([said]), cache=cache)
    for _ in range(tokens):
        said += as_ints(mx.argmax(logits[:, -1], axis=-1))
        logits = network(mx.array([said[-1:]]), cache=cache)
    return mx.array(said)


def weights_of(head: Head) -> Weights:
    """Return a head's weights by their names."""
    return dict(tree_flatten(head.parameters()))


def original(weights: Weights) -> Weights:
    """Return a head's weights as in an original checkpoint, where norms count from 1 and experts are joined."""
    found = {
        name: value - 1.0 if value.ndim == 1 and "norm" in name else value for name, value in weights.items()
    }
    for name in [name for name in found if name.endswith("switch_mlp.gate_proj.weight")]:
        mixture = name.removesuffix(".switch_mlp.gate_proj.weight")
        parts = {
            part: found.pop(f"{mixture}.switch_mlp.{part}_proj.weight") for part in ("gate", "up", "down")
        }
        found[f"{mixture}.experts.gate_up_proj"] = mx.concatenate([parts["gate"], parts["up"]], axis=-2)
        found[f"{mixture}.experts.down_proj"] = parts["down"]
    return found


def apart(weights: Weights) -> Weights:
    """Return the weights of an original checkpoint with each expert by itself."""
    found = dict(weights)
    for name in [name for name in found if name.endswith(".experts.gate_up_proj")]:
        mixture = name.removesuffix(".gate_up_proj")
        gate, up = mx.split(found.pop(name), 2, axis=-2)
        for part, every in (("gate", gate), ("up", up), ("down", found.pop(f"{mixture}.down_proj"))):
            found |= {f"{mixture}.{at}.{part}_proj.weight": each for at, each in enumerate(every)}
    return found


EXTRA_NAMES = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}


def _experts_apart(weights: Weights, names: Mapping[str, str]) -> Weights:
    found: Weights = {}
    for name, value in weights.items():
        mixture, _, part = name.partition(".switch_mlp.")
        layer, _, kind = part.partition(".")
        if part:
            own = f"{names.get(layer, layer)}.{kind}"
            found |= {f"{mixture}.experts.{at}.{own}": each for at, each in enumerate(value)}
        else:
            found[name] = value
    return found


def _renamed(weights: Weights, names: Mapping[str, str]) -> Weights:
    found: Weights = {}
    for name, value in weights.items():
        stem, _, kind = name.rpartition(".")
        found[f"{names.get(stem, stem)}.{kind}"] = value
    return found


def extra_layer(weights: Weights) -> Weights:
    """Return a head's weights as of a layer after the last, as GLM and DeepSeek have them: each expert by itself."""
    found = _renamed(_experts_apart(weights, {}), EXTRA_NAMES)
    width = weights["norm.weight"].size
    copies = dict.fromkeys(("embed_tokens.weight", "shared_head.head.weight"), mx.zeros((8, width)))
    return {name.removeprefix("layers.0."): value for name, value in found.items()} | copies


def nemotron(weights: Weights) -> Weights:
    """Return a head's weights as Nemotron-H has them: in two layers, each expert by itself."""
    names = {
        "fc": "layers.0.eh_proj",
        "pre_fc_norm_embedding": "layers.0.enorm",
        "pre_fc_norm_hidden": "layers.0.hnorm",
        "norm": "layers.1.final_layernorm",
    }
    return _renamed(_experts_apart(weights, {"fc1": "up_proj", "fc2": "down_proj"}), names)


def mimo(weights: Weights) -> Weights:
    """Return a head's weights as MiMo has them, whose projection takes the hidden vector first."""
    names = {
        "fc": "input_proj",
        "pre_fc_norm_embedding": "token_layernorm",
        "pre_fc_norm_hidden": "hidden_layernorm",
        "norm": "final_layernorm",
    }
    embedding, hidden = mx.split(weights["fc.weight"], 2, axis=-1)
    turned = weights | {"fc.weight": mx.concatenate([hidden, embedding], axis=-1)}
    return {name.removeprefix("layers.0."): value for name, value in _renamed(turned, names).items()}


def add_head(
    model: Path,
    weights: Weights,
    *,
    form: str = "mlx",
    prefix: str = "mtp.",
    settings: Mapping[str, object] = MappingProxyType({}),
    file: str = "model-head.safetensors",
    is_indexed: bool = True,
) -> Path:
    """Put a head's weights into a file next to a model's, and `settings` into its configuration.

    The index has both files, or there is none.
    """
    named = {prefix + name: value for name, value in weights.items()}
    number = "num_nextn_predict_layers" if "layers." in prefix else "mtp_num_hidden_layers"
    (model / file).parent.mkdir(exist_ok=True)
    mx.save_safetensors(str(model / file), named, {"format": form})
    config = json.loads((model / "config.json").read_text())
    config.get("text_config", config).update({number: 1, **settings})
    (model / "config.json").write_text(json.dumps(config))
    if not is_indexed:
        return model
    names: Mapping[str, Any] = mx.load(str(model / "model.safetensors"))  # type: ignore[assignment]  # of this format
    index = dict.fromkeys(names, "model.safetensors") | dict.fromkeys(named, file)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return model
