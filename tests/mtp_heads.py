"""MTP heads for tiny models: random ones, and ones that have learnt what their model says."""

from __future__ import annotations

import json
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


def random_head(model: Path, *, seed: int = 5) -> Head:
    """Return a head of a model's sizes."""
    network, _ = load_network(model)
    text = text_of(network)
    mx.random.seed(seed)
    index, like = [(at, each) for at, each in enumerate(text.layers) if hasattr(each, "self_attn")][-1]
    head = Head(type(like)(text.args, index), text.args.hidden_size, text.args.rms_norm_eps)
    head.update(tree_map(lambda value: value + 0.05 * mx.random.normal(value.shape), head.parameters()))
    return head


def learnt_head(model: Path, prompts: Iterable[Sequence[int]], *, tokens: int) -> Head:
    """Return a head that has learnt what its model says after some prompts, greedily."""
    network, _ = load_network(model)
    text, head = text_of(network), random_head(model)
    texts = [_said(network, prompt, tokens) for prompt in prompts]
    hidden = [text.model(said[None, :-1], make_prompt_cache(network)) for said in texts]
    mx.eval(hidden)

    def loss(learner: Head) -> mx.array:
        losses = []
        for said, each in zip(texts, hidden, strict=True):
            guess = learner(text.model.embed_tokens(said[None, 1:-1]), each[:, :-1], None)
            losses.append(nn.losses.cross_entropy(text.lm_head(guess), said[None, 2:], reduction="mean"))
        return mx.stack(losses).mean()

    adam, gradients = optimizers.Adam(0.01), nn.value_and_grad(head, loss)
    for _ in range(LEARNING_STEPS):
        _, changes = gradients(head)
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


def extra_layer(weights: Weights) -> Weights:
    """Return a head's weights as of a layer after the last, as GLM and DeepSeek have them: each expert by itself."""
    found: Weights = {}
    for name, value in weights.items():
        stem, _, kind = name.rpartition(".")
        mixture, _, part = name.removeprefix("layers.0.").partition(".switch_mlp.")
        if stem in EXTRA_NAMES:
            found[f"{EXTRA_NAMES[stem]}.{kind}"] = value
        elif part:
            found |= {f"{mixture}.experts.{at}.{part}": each for at, each in enumerate(value)}
        else:
            found[mixture] = value
    width = weights["norm.weight"].size
    copies = dict.fromkeys(("embed_tokens.weight", "shared_head.head.weight"), mx.zeros((8, width)))
    return found | copies


def add_head(model: Path, weights: Weights, *, form: str = "mlx", prefix: str = "mtp.") -> Path:
    """Put a head's weights into a second file of a model, whose index names both."""
    named = {prefix + name: value for name, value in weights.items()}
    number = "num_nextn_predict_layers" if "layers." in prefix else "mtp_num_hidden_layers"
    mx.save_safetensors(str(model / "model-head.safetensors"), named, {"format": form})
    config = json.loads((model / "config.json").read_text())
    config.get("text_config", config)[number] = 1
    (model / "config.json").write_text(json.dumps(config))
    names: Mapping[str, Any] = mx.load(str(model / "model.safetensors"))  # type: ignore[assignment]  # of this format
    index = dict.fromkeys(names, "model.safetensors") | dict.fromkeys(named, "model-head.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return model
