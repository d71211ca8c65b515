"""Tries, when a model is loaded, whether mlx-lm's network reads pictures as mlx-vlm's own network does.

A prompt of two pictures has to get the same logits in both, which share their weights. That finds out, too, what no
configuration says: by what embeddings are multiplied, in which order the axes of positions are laid out. A model that
fails runs on mlx-vlm's own network, where it can (split_batch.py).
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx import nn

from mlx_backend.engine.images import ImageSupport
from mlx_backend.engine.mlx.arrays import as_floats, coarsest_dtype
from mlx_backend.engine.mlx.batch_trial import MAX_DIFFERENCE, MAX_NOISE, differences
from mlx_backend.engine.mlx.mlx_lm_patches.image_inputs import embedding_of, patch_for_added
from mlx_backend.engine.mlx.packed_forward import run_packed, token_ids
from mlx_backend.engine.mlx.vision.families import (
    frequency_axes,
    has_text_of_mlx_lm,
    image_support,
    mrope_section,
)
from mlx_backend.engine.mlx.vision.prompt_images import PromptImages
from mlx_backend.engine.mlx.vision.tower import Vision
from mlx_backend.engine.mlx.vision.vlm_processor import TRIED_TEXT
from mlx_backend.engine.mlx.vision.whole import VLMRun
from mlx_backend.errors import EngineError, EngineRefused, first_line
from mlx_backend.images import Picture
from mlx_backend.models.files import of_text, read_json_or_empty

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from mlx_backend.device.threads import FairLock
    from mlx_backend.engine.images import PreparedImage, PromptImage
    from mlx_backend.engine.mlx.loading import CheckSize, Networks

log = logging.getLogger(__name__)

TRIED_SIZE = (72, 40)
"""Width and height of the pictures of the trial."""
TRIED_PICTURES = 2
ROUNDING = 0.01
"""By how much embeddings of text may differ from a scale that they are multiplied by."""
NOISE_SHARE = 1.5
"""By how much more than the text before them logits after pictures may be off, where rounding makes a difference.

On a CPU, Qwen2-VL's of 24 and 48 layers with random weights were off by nothing, in bfloat16 and with 4 bits.
"""


class ImageTrial:
    """Tries a model's `vision`, and completes its traits."""

    def __init__(self, vision: Vision) -> None:
        self._vision = vision
        self._network = vision.network
        self._max_difference = MAX_DIFFERENCE[coarsest_dtype(vision.network)]

    def run(self) -> None:
        """Compare logits, and note how images are taken. Raises EngineRefused if they are not mlx-vlm's."""
        scale = self._scale_of_text(self._vision.tokenizer.encode(TRIED_TEXT, control_tokens=False))
        try:
            prompt, images, run = self._mlx_vlms_run(TRIED_PICTURES)
        except Exception:  # some of mlx-vlm's families take one at a time
            prompt, images, run = self._mlx_vlms_run(1)
        self._learn(run, prompt, scale)
        expected = run.all_logits()
        off: list[float] = []
        for axes in self._layouts():
            self._vision.traits = replace(self._vision.traits, axes=axes)
            shown = PromptImages(images, self._vision)
            while (image := shown.unseen(0, len(prompt))) is not None:
                shown.see(image)
            segment = shown.segment(self._network, prompt, 0, len(prompt), self._vision.fresh_layers())
            logits = run_packed(self._network, [segment], restore=False)
            mx.eval(logits)
            self._vision.features.evict_to(0)
            found = differences(logits, expected)
            ends = [0, *(end for each in images for end in (each.start, each.end)), len(prompt)]
            text, *others = (median(found[start:end]) for start, end in pairwise(ends))
            allowed = max(self._max_difference, min(MAX_NOISE, NOISE_SHARE * text))
            if self._vision.traits.attends_both_ways:  # mlx-vlm's networks have other masks then
                others = [text]
            if text <= MAX_NOISE and max(others) <= allowed:
                return
            off.append(max(text, *others))
        raise EngineRefused(
            f"pictures get other logits than in mlx-vlm's own network (off by {100 * min(off, default=1):.0f} %).",
            "images",
        )

    def _mlx_vlms_run(self, count: int) -> tuple[list[int], list[PromptImage], VLMRun]:
        """Return a text with so many pictures in it, begun in mlx-vlm's network. Raises whatever that does."""
        processor, (width, height) = self._vision.processor, TRIED_SIZE
        noise = (np.random.default_rng(seed).bytes(3 * width * height) for seed in range(count))
        prepared: list[PreparedImage] = []
        for picture in (Picture(width, height, each) for each in noise):
            prepared.append(replace(processor.prepare(picture, prepared), picture=picture))
        prompt, images = processor.tried_prompt(prepared)
        return prompt, images, VLMRun(self._vision.whole, prompt, processor.inputs(prompt, images))

    def _scale_of_text(self, text: Sequence[int]) -> tuple[float, float]:
        """Return by what mlx-vlm multiplies embeddings of text, and by what its language network needs them to be.

        Gemma 3n's forgets it for prompts (0.7.10). Where they are not multiplied but normalised, both are 1.
        """
        own = self._embedded_text(text)
        expected = self._network(token_ids([text]), cache=self._vision.fresh_layers())[0]
        run = VLMRun(self._vision.whole, text, {})
        assert run.embeddings is not None
        norms = as_floats(_norms(run.embeddings) / _norms(own))
        usual = (1.0, own.shape[-1] ** 0.5)
        theirs = next((scale for scale in usual if abs(median(norms) / scale - 1) < ROUNDING), median(norms))
        if max(norms) / min(norms) > 1 + ROUNDING:
            theirs = 1.0
        off = {theirs: median(differences(run.all_logits(), expected))}
        for scale in usual:
            if min(off.values()) <= self._max_difference:
                break
            run = VLMRun(self._vision.whole, text, {})
            run.embeddings = own * scale
            off[scale] = median(differences(run.all_logits(), expected))
        return theirs, min(off, key=lambda scale: off[scale])

    def _learn(self, run: VLMRun, prompt: Sequence[int], scales: tuple[float, float]) -> None:
        """Note what mlx-vlm's embeddings of a prompt tell of how the network takes images."""
        theirs, self._vision.scale = scales
        if self._vision.scale != theirs:
            assert run.embeddings is not None
            is_pad = mx.array([list(prompt)])[..., None] == self._vision.processor.pad_token
            run.embeddings = mx.where(
                is_pad, run.embeddings, self._embedded_text(prompt) * self._vision.scale
            )
        if run.given.get("per_layer_inputs") is not None:
            self._vision.traits = replace(self._vision.traits, reads_pads_as=0)
        added = run.given.get("deepstack_visual_embeds")
        for network in self._vision.networks:
            patch_for_added(network.layers[: 0 if added is None else len(added)])

    def _embedded_text(self, tokens: Sequence[int]) -> mx.array:
        """Return tokens as the network embeds them, before it multiplies that by anything ([1, tokens, width])."""
        found: mx.array = embedding_of(self._network)(mx.array([list(tokens)]))
        return found

    def _layouts(self) -> list[mx.array | None]:
        """Return what the axes of a head's elements may be, the likeliest first."""
        if mrope_section(self._vision.config) is None:
            return [None]
        text = of_text(self._vision.config)
        rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
        likely = bool(rope.get("mrope_interleaved"))
        in_pairs = any(isinstance(each, nn.RoPE) and each.traditional for each in self._network.modules())
        size = _head_size(self._vision.config)
        found = list[mx.array | None]()
        for interleaved in (likely, not likely):
            with suppress(ValueError):  # no such layout
                axes = frequency_axes(self._vision.config, size, interleaved=interleaved, in_pairs=in_pairs)
                found.append(mx.array(axes))
        return found


def _norms(embeddings: mx.array) -> mx.array:
    return mx.linalg.norm(embeddings.astype(mx.float32), axis=-1).reshape(-1)


def support_of(folder: Path, vision: Vision | None) -> ImageSupport:
    """Return whether a loaded model can be shown images, or why not."""
    support = image_support(read_json_or_empty(folder / "config.json"))
    if support is ImageSupport.AVAILABLE and vision is None:
        return ImageSupport.NOT_HERE
    return support


def load_vision(
    networks: Networks,
    lock: FairLock,
    check_size: CheckSize,
    *,
    can_pack: bool,
    shared: bool,
) -> Vision | None:
    """Load what a model sees with; None if it does not see, or cannot here, which is logged.

    `can_pack` says whether its networks may be run packed, be it one prompt at a time; `shared`, whether other
    processes run parts of them. Raises what `check_size` does, which gets the bytes of its weights.
    """
    config = read_json_or_empty(networks.model.folder / "config.json")
    support = image_support(config)
    if support is ImageSupport.NOT_INSTALLED:
        log.info("The model can see images; for that, install dify-mlx-provider[vision].")
    if support is not ImageSupport.AVAILABLE:
        return None
    if shared:
        log.warning("Images cannot be seen here, because processes share the model.")
        return None
    if mrope_section(config) is not None and not can_pack:
        log.info("Pictures cannot be seen in the batch, because the model is not run packed.")
        return None
    try:
        vision = Vision(networks, config)
    except Exception as error:
        _say_not_batched(error, config)
        return None
    try:
        check_size("its vision tower", vision.nbytes)
    except EngineError:
        vision.processor.close()
        raise
    with lock:  # MLX counts the memory of all models together
        try:
            vision.measure()
            ImageTrial(vision).run()
            return vision
        except Exception as error:
            vision.processor.close()
            _say_not_batched(error, config)
            return None


def _say_not_batched(error: Exception, config: Mapping[str, Any]) -> None:
    """Log why pictures are not for the batch. Raises EngineError where mlx-vlm's network is there for texts, too."""
    log.debug("The model's vision could not be loaded.", exc_info=error)
    if has_text_of_mlx_lm(config):
        raise EngineError(f"It cannot be shown pictures in the batch: {first_line(error)}") from error
    log.info("The model cannot be shown pictures in the batch: %s", first_line(error))


def _head_size(config: Mapping[str, Any]) -> int:
    text = of_text(config)
    return int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])
