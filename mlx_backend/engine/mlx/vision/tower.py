"""A model's vision tower and processor, from mlx-vlm: from a picture to the embeddings of its places in a prompt.

mlx-vlm's model is loaded lazily, and its language model is thrown away before any of its weights are read. What is left
is asked for the embeddings of an image's pad tokens alone, which every family of mlx-vlm answers in the same way.
"""

from __future__ import annotations

import logging
import warnings
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx import nn

from mlx_backend.device.mlx import weight_bytes
from mlx_backend.engine.images import ImageMarkup, ImageSupport, PreparedImage
from mlx_backend.engine.mlx.mlx_lm_patches import patch_for_added
from mlx_backend.engine.mlx.packed_forward import embedding_of
from mlx_backend.engine.mlx.vision.families import (
    family_of,
    frequency_axes,
    image_support,
    is_installed,
    pad_token,
)
from mlx_backend.engine.mlx.vision.image_memory import FeatureCache, PreparedImages, TowerCost
from mlx_backend.errors import EngineRefused, first_line
from mlx_backend.images import Picture
from mlx_backend.layers.architecture import WeightGlob
from mlx_backend.models.files import of_text, read_json_or_empty

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from typing import Self

    from mlx_backend.device.lock import FairLock
    from mlx_backend.engine.mlx.loading import CheckSize
    from mlx_backend.engine.mlx.vision.families import ImageFamily

log = logging.getLogger(__name__)

MEASURED_SIDES = (224, 448)
"""Sides of the pictures that are seen to measure, in pixels."""
MAX_GRIDS = 1024
"""Number of sizes of pictures whose places are remembered."""


class Vision:
    """What a loaded model sees with. `family` says what its images need of the language network.

    `prepare` may be called from any thread, the other methods only on the engine's, which has made this. `waiting`
    counts what was prepared, and `features` are what was made of images.
    """

    def __init__(
        self, folder: Path, config: Mapping[str, Any], family: ImageFamily, networks: Sequence[Any]
    ) -> None:
        import mlx_vlm.utils
        from mlx_vlm.utils import load_model, load_processor

        mlx_vlm.utils.glob = WeightGlob
        self.family = family
        token = pad_token(config)
        assert token is not None  # or it would have no family
        self.pad_token = token
        model = load_model(folder, lazy=True)
        self._embedding = embedding_of(networks[0])
        width = self._embedding(mx.array([[0]])).shape[-1]
        model.language_model = _NoLanguageModel(width, self._dtype())
        model.audio_tower = model.embed_audio = None
        self._model = model
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sounds, which the processors of some families read too
            processor = load_processor(folder, add_detokenizer=False)
        self._processor, self._options = processor.image_processor, dict[str, Any]()
        self._grids: dict[
            tuple[int, int], tuple[int, int, int]
        ] = {}  # and bytes of inputs, by the sides of pictures
        self._row_break: int | None = None
        self.markup = family.markup or ImageMarkup(
            part=processor.image_token,
            placeholder=processor.image_token,
            before=processor.boi_token,
            after=processor.eoi_token,
        )
        if self.markup.between_rows:
            self._row_break = processor.image_break_token_id
            self._options = {"patch_size": processor.patch_size * processor.spatial_merge_size}
        self.frequency_axes = (
            mx.array(frequency_axes(of_text(config), _head_size(config), interleaved=family.interleaves_axes))
            if family.has_grid_positions
            else None
        )
        deepstack = config["vision_config"].get("deepstack_visual_indexes") or ()
        for network in networks:
            patch_for_added(network.layers[: len(deepstack)])
        self.waiting = PreparedImages()
        self.features = FeatureCache()
        self.cost = TowerCost()

    @property
    def version(self) -> str:
        """What computes the embeddings: another version may compute others."""
        return f"mlx-vlm={version('mlx-vlm')}"

    @property
    def nbytes(self) -> int:
        """The bytes of its weights."""
        return weight_bytes(self._model)

    def prepare(self, picture: Picture, of_request: int = 0) -> PreparedImage:
        """Return the picture as the vision tower takes it; `of_request` are the bytes of its request's other images.

        Raises EngineRefused for one that it cannot take, EngineBusy while too many of others wait to be seen.

        One that was seen is not prepared again, which takes a tenth of a second for a megapixel.
        """
        sides, digest = (picture.width, picture.height), picture.digest
        grid = self._grids.get(sides)
        if grid is not None and digest in self.features:
            rows, columns, nbytes = grid
            image = PreparedImage(digest, rows, columns, {}, self._row_break, picture, nbytes)
        else:
            inputs = self._inputs(picture)
            rows, columns = self._grid(inputs)
            image = PreparedImage(digest, rows, columns, inputs, self._row_break)
            if len(self._grids) >= MAX_GRIDS:
                self._grids.clear()
            self._grids[sides] = rows, columns, image.nbytes
        self.waiting.add(image, of_request)
        return image

    def _inputs(self, picture: Picture) -> dict[str, Any]:
        pixels = np.frombuffer(picture.rgb, np.uint8).reshape(picture.height, picture.width, 3)
        from PIL import Image

        try:
            # Not the processor of text and images together: that makes MLX arrays, which belong to threads.
            made = self._processor(images=[Image.fromarray(pixels)], **self._options)
        except Exception as error:
            raise EngineRefused(
                f"The image cannot be prepared for this model: {first_line(error)}.", "images"
            ) from error
        if isinstance(made, tuple):  # and the number of its places
            made, _ = made
        return {name: np.asarray(value) for name, value in made.items() if name != "num_crops"}

    def see(self, image: PreparedImage) -> mx.array:
        """Return an image's embeddings, and what is added to the outputs of layers ([1 + layers, tokens, width]).

        `features` then has that too, if there is room.
        """
        features = self._compute(image)
        self.features.put(image.digest, features)
        return features

    def measured(self) -> Self:
        """Return it after it has seen two images that show nothing, to know what others will take.

        Raises what the vision tower raises.
        """
        mx.eval(self._model.parameters())
        taken = []
        for side in MEASURED_SIDES:
            image = self.prepare(Picture(side, side, bytes(3 * side * side)))
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            self._compute(image)
            taken.append((image.nbytes, max(0, mx.get_peak_memory() - before)))
        self.cost = TowerCost.of(taken)
        return self

    def _compute(self, image: PreparedImage) -> mx.array:
        places = mx.array([image.tokens(self.pad_token)])
        made = image.inputs
        if not made:
            assert image.picture is not None
            made = self._inputs(image.picture)
        inputs = {name: mx.array(value) for name, value in made.items()}
        pixels = inputs.pop("pixel_values")
        found = self._model.get_input_embeddings(places, pixels, mask=mx.ones_like(places), **inputs)
        added = getattr(found, "deepstack_visual_embeds", None)
        embeddings = found.inputs_embeds[0]
        if self.family.multiplies_embeddings:
            embeddings = embeddings / embeddings.shape[-1] ** 0.5
        features = mx.stack([embeddings, *(added if added is not None else ())])
        mx.eval(features)
        mx.clear_cache()
        return features

    def _grid(self, inputs: Mapping[str, Any]) -> tuple[int, int]:
        """Return the rows and columns of places that an image takes."""
        if "image_grid_thw" in inputs:
            merge = self._processor.merge_size
            _, rows, columns = (int(each) for each in inputs["image_grid_thw"][0])
            return rows // merge, columns // merge
        if "image_sizes" in inputs:
            height, width = (int(each) // self._options["patch_size"] for each in inputs["image_sizes"][0])
            return height, width
        if hasattr(self._processor, "pooling_kernel_size"):
            side = self._processor.patch_size * self._processor.pooling_kernel_size
            *_, height, width = inputs["pixel_values"].shape
            return height // side, width // side
        side = int(self._model.config.text_config.mm_tokens_per_image**0.5)
        return side, side

    def _dtype(self) -> mx.Dtype:
        return self._embedding(mx.array([[0]])).dtype


class _NoLanguageModel(nn.Module):
    """Stands where mlx-vlm's models have their language model: embeds every token as zeros, which images replace."""

    def __init__(self, width: int, dtype: mx.Dtype) -> None:
        super().__init__()
        self.model = _NoNetwork(width, dtype)

    def get_rope_index(self, *_: Any, **__: Any) -> tuple[None, None]:
        """Return no positions: prompt_images.py knows them."""
        return None, None


class _NoNetwork(nn.Module):
    embed_scale = 1.0
    hidden_size_per_layer_input = 0  # it has no other inputs

    def __init__(self, width: int, dtype: mx.Dtype) -> None:
        super().__init__()
        self._width, self._dtype = width, dtype

    def embed_tokens(self, tokens: mx.array) -> mx.array:
        """Return zeros ([rows, tokens, width])."""
        return mx.zeros((*tokens.shape, self._width), self._dtype)


def support_of(folder: Path, vision: Vision | None) -> ImageSupport:
    """Return whether a loaded model can be shown images, or why not."""
    support = image_support(read_json_or_empty(folder / "config.json"))
    if support is ImageSupport.AVAILABLE and vision is None:
        return ImageSupport.NOT_HERE
    return support


def load_vision(
    folder: Path,
    networks: Sequence[Any],
    lock: FairLock,
    check_size: CheckSize,
    *,
    can_pack: bool,
    shared: bool,
) -> Vision | None:
    """Load what a model sees with; None if it does not see, or cannot here, which is logged.

    `networks` are the language network and those of its adapters. `can_pack` says whether they may be run packed, be it
    one prompt at a time; `shared`, whether other processes run parts of them. Raises what `check_size` does, which gets
    the bytes of its weights.
    """
    config = read_json_or_empty(folder / "config.json")
    family = family_of(config)
    if family is None:
        return None
    if shared or (family.has_grid_positions and not can_pack):
        reason = "processes share the model" if shared else "the model is not run packed"
        log.warning("Images cannot be seen here, because %s.", reason)
        return None
    if not is_installed():
        log.info("The model can see images; for that, install dify-mlx-provider[vision].")
        return None
    vision = _or_text_only(lambda: Vision(folder, config, family, networks))
    if vision is not None:
        check_size("its vision tower", vision.nbytes)
        with lock:  # MLX counts the memory of all models together
            vision = _or_text_only(vision.measured)
    return vision


def _or_text_only(load: Callable[[], Vision]) -> Vision | None:
    """Return what a call does; None if it raises, which is logged: text is answered without it."""
    try:
        return load()
    except Exception as error:
        log.warning("The model's vision tower cannot be loaded; it answers text only: %s", first_line(error))
        log.debug("The vision tower could not be loaded.", exc_info=error)
        return None


def _head_size(config: Mapping[str, Any]) -> int:
    text = of_text(config)
    return int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])
