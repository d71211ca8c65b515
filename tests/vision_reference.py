"""What mlx-vlm's own modules answer about images, on the same weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

if TYPE_CHECKING:
    from vision_models import SeeingModel

    from mlx_backend.engine.base import GenerationRequest


def reference(model: SeeingModel, request: GenerationRequest) -> list[int]:
    """What mlx-vlm's own modules answer: its generation, or for Gemma its networks with the masks they need."""
    from mlx_vlm.generate.ar import generate_step
    from mlx_vlm.utils import load_model

    network = load_model(model.folder)
    tokens = mx.array([list(request.prompt)])
    inputs: dict[str, list[Any]] = {}
    for each in request.images:
        for name, value in each.image.inputs.items():
            inputs.setdefault(name, []).append(value)
    if network.config.model_type == "gemma4":
        return _gemma4_reply(network, tokens, inputs["pixel_values"], request)
    joined = {name: mx.array(np.concatenate(_padded(values))) for name, values in inputs.items()}
    pixels = joined.pop("pixel_values")
    ones = mx.ones_like(tokens)
    if network.config.model_type != "gemma3":
        steps = generate_step(tokens, network, pixels, ones, max_tokens=request.max_tokens, **joined)
        return [int(token) for token, _ in steps]
    embedded = network.get_input_embeddings(tokens, pixels, mask=ones).inputs_embeds
    return _gemma3_reply(network.language_model, embedded, request)


def _padded(values: list[Any]) -> list[Any]:
    """Pixels of images of several sizes ([1, channels, height, width]) as mlx-vlm takes them together."""
    if values[0].ndim != 4:
        return values
    height, width = (max(each.shape[axis] for each in values) for axis in (2, 3))
    return [
        np.pad(each, [(0, 0), (0, 0), (0, height - each.shape[2]), (0, width - each.shape[3])])
        for each in values
    ]


def _gemma3_reply(language: Any, embedded: mx.array, request: GenerationRequest) -> list[int]:
    """Answer without a cache, each layer with a mask of its own: both ways inside an image, as in transformers."""
    reply: list[int] = []
    for _ in range(request.max_tokens):
        more = language.model.embed_tokens(mx.array([reply])) if reply else embedded[:, :0]
        hidden = mx.concatenate([embedded, more], axis=1)
        hidden = hidden * language.config.hidden_size**0.5
        distance, together = _layout(hidden.shape[1], request)
        for layer in language.model.layers:
            window = language.config.sliding_window if layer.self_attn.is_sliding else 1 << 30
            hidden = layer(hidden, mx.array((distance < window) & ((distance >= 0) | together)), None)
        logits = language.lm_head(language.model.norm(hidden))[0, -1]
        reply.append(np.array(logits).argmax().item())
    return reply


def _layout(length: int, request: GenerationRequest) -> tuple[Any, Any]:
    """How far each token is after each other one, and whether both belong to one image ([length, length])."""
    numbers = np.arange(length)
    block = np.full(length, -1)
    for index, each in enumerate(request.images):
        block[each.start : each.end] = index
    return numbers[:, None] - numbers, (block[:, None] == block) & (block[:, None] >= 0)


def _gemma4_reply(network: Any, tokens: mx.array, pixels: list[Any], request: GenerationRequest) -> list[int]:
    """Answer without a cache: both ways inside an image in the layers with a window, as in transformers."""
    language = network.language_model
    found = network.get_input_embeddings(tokens, [mx.array(each[0]) for each in pixels])
    reply: list[int] = []

    def masks(hidden: mx.array, _caches: Any, _types: Any = None) -> list[mx.array]:
        distance, together = _layout(hidden.shape[1], request)
        near = (distance < language.config.sliding_window) & ((distance >= 0) | together)
        return [
            mx.array(near if layer.layer_type == "sliding_attention" else distance >= 0)
            for layer in language.model.layers
        ]

    language.model._make_masks = masks
    for _ in range(request.max_tokens):
        embedded, others = found.inputs_embeds, found.per_layer_inputs
        if reply:
            more = mx.array([reply])
            spoken = language.model.embed_tokens(more) * language.model.embed_scale
            embedded = mx.concatenate([embedded, spoken], axis=1)
            others = mx.concatenate([others, language.model.get_per_layer_inputs(more)], axis=1)
        logits = language(None, inputs_embeds=embedded, per_layer_inputs=others).logits[0, -1]
        reply.append(np.array(logits).argmax().item())
    return reply
