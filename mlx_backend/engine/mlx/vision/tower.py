"""A model's vision tower and processor, from mlx-vlm: from a picture to the embeddings of its places in a prompt.

mlx-vlm's network is loaded with the weights of the language network that is here already, and asked for the embeddings
of the text that stands for one image, which every family of mlx-vlm answers in the same way. Its answer has all that
the language network needs: embeddings, positions, what is added to the outputs of layers.

What that is to be multiplied by, and what else a network needs, a trial finds out when it is loaded (image_trial.py).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlx_backend.engine.mlx.mlx_lm_patches.image_inputs import patch_for_embeddings
from mlx_backend.engine.mlx.vision.families import (
    WholeError,
    attends_both_ways,
    both_ways_in_windows,
)
from mlx_backend.engine.mlx.vision.image_memory import FeatureCache, TowerCost
from mlx_backend.engine.mlx.vision.vlm_processor import VLMProcessor
from mlx_backend.engine.mlx.vision.whole import embed, own_bytes, read_whole, share_weights, to_mlx

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mlx_backend.engine.images import PreparedImage
    from mlx_backend.engine.mlx.loading import Networks


@dataclass(frozen=True, slots=True)
class ImageTraits:
    """How a model's language network takes images.

    With `attends_both_ways` the places of one image attend to each other in both directions, with
    `both_ways_in_windows` only in layers with a window. `axes` say by which of a position's three numbers each element
    of a head is rotated, None where positions are single numbers. `reads_pads_as` is the token read in an image's
    places where the network looks at tokens and not only at their embeddings.
    """

    attends_both_ways: bool = False
    both_ways_in_windows: bool = False
    axes: mx.array | None = None
    reads_pads_as: int | None = None


class Vision:
    """What a loaded model sees with. `traits` say what its images need of the language network.

    Belongs to the engine's thread, but for its `processor`. `features` are what was made of images.
    """

    def __init__(self, networks: Networks, config: Mapping[str, Any]) -> None:
        model, trusts = networks.model, networks.options.trust_remote_code
        self.network = model.network
        self.tokenizer = model.tokenizer
        self.config = config
        self.whole, _ = read_whole(model.folder, trust_remote_code=trusts)
        share_weights(self.whole, model.network)
        if hasattr(self.whole, "audio_tower"):
            self.whole.audio_tower = None
        self.features = FeatureCache()
        self.processor = VLMProcessor(
            model.folder,
            self.whole,
            model.tokenizer,
            trust_remote_code=trusts,
            is_seen=self.features.__contains__,
        )
        self.cost = TowerCost()
        self.scale = 1.0
        complete = {**config, "text_config": asdict(self.whole.config.text_config)}
        self.traits = ImageTraits(attends_both_ways(complete), both_ways_in_windows(complete))
        for network in networks.by_adapter.values():
            patch_for_embeddings(network)
        self.networks = list(networks.by_adapter.values())
        self.fresh_layers = networks.fresh_layers

    @property
    def version(self) -> str:
        """What computes the embeddings: another version may compute others."""
        return f"mlx-vlm={version('mlx-vlm')}"

    @property
    def nbytes(self) -> int:
        """The bytes of the weights that are not the language network's."""
        return own_bytes(self.whole, self.network)

    def see(self, image: PreparedImage) -> mx.array:
        """Return an image's embeddings, and what is added to the outputs of layers ([1 + layers, tokens, width]).

        `features` then has that too, if there is room.
        """
        features = self._compute(image)
        self.features.put(image.digest, features)
        return features

    def _compute(self, image: PreparedImage) -> mx.array:
        written = image.written
        body = self.tokenizer.encode(written.text, control_tokens=True)
        inputs = {name: to_mlx(value) for name, value in self.processor.inputs_of(image).items()}
        found = embed(self.whole, mx.array([body]), inputs)
        if found.inputs_embeds.shape[1] != len(body):
            raise WholeError("mlx-vlm makes more or fewer embeddings of a picture than it has tokens")
        places = slice(written.before, written.before + len(written.tokens))
        embeddings = found.inputs_embeds[0, places] / self.scale
        features = mx.stack([embeddings, *self._added(found, body, places)])
        mx.eval(features)
        mx.clear_cache()
        return features

    def _added(self, found: Any, body: Sequence[int], places: slice) -> list[mx.array]:
        """Return what an image's places get after each of the first layers ([tokens, width] each)."""
        added = getattr(found, "deepstack_visual_embeds", None)
        if added is None or not len(added):
            return []
        is_pad = np.array(body[places]) == self.processor.pad_token
        among = mx.array(np.maximum(np.cumsum(is_pad) - 1, 0))
        return [mx.where(mx.array(is_pad)[:, None], each[among], 0.0) for each in added]

    # -- when it is loaded -----------------------------------------------------------------------------------------

    def measure(self) -> None:
        """Read its weights, and find out what images will take. Raises what the vision tower raises."""
        mx.eval(self.whole.parameters())
        self.cost = TowerCost.measured(self.processor.prepare, self._compute)
