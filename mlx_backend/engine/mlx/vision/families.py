"""The families of models that see, and what each needs in addition to the embeddings of its images. Knows no MLX.

A row is added once its replies have been compared with a reference; nothing else compares names of families.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mlx_backend.engine.images import ImageMarkup, ImageSupport
from mlx_backend.models.tasks import is_of_mlx_lm, is_of_mlx_vlm, sees

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_backend.models.engine_options import EngineOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFamily:
    """How a family's language network takes images."""

    markup: ImageMarkup | None
    """None: an image is the family's image token, between those of its tokenizer for an image's beginning and end."""
    attends_both_ways: bool = False
    """The places of one image attend to each other in both directions; an image is then never cut in two."""
    both_ways_in_windows: bool = False
    """They do so only in layers with a window, and only if the text's `use_bidirectional_attention` is "vision"."""
    multiplies_embeddings: bool = False
    """The network multiplies what it is given by the root of the width, also an image's embeddings, which have it."""
    reads_pads_as: int | None = None
    """The token read in an image's places where the network looks at tokens and not only at their embeddings."""
    has_grid_positions: bool = False
    """Its rotary embeddings turn parts of a head by row and column (mrope). An image then moves what follows by the
    longer of its sides instead of by its number of places."""
    interleaves_axes: bool = False
    """The frequencies of rows and columns alternate with those of time, instead of one block following the other."""


ONE_AT_A_TIME = "its family runs on mlx-vlm's own network, which holds one request's positions"
"""Why replies of such a family are not decoded together."""
UNSUPPORTED_OPTIONS = ("adapters", "adapter", "draft_model", "draft_from_text", "kv_bits", "max_kv_size")
"""The engine options that would change what such a network does, and that it does not have."""

FAMILIES: dict[str, ImageFamily] = {
    "gemma3": ImageFamily(
        markup=ImageMarkup(
            part="<start_of_image>",
            placeholder="<start_of_image>",
            before="\n\n<start_of_image>",
            after="<end_of_image>\n\n",
        ),
        attends_both_ways=True,
    ),
    "qwen2_5_vl": ImageFamily(
        markup=ImageMarkup(part="<|vision_start|><|image_pad|><|vision_end|>", placeholder="<|image_pad|>"),
        has_grid_positions=True,
    ),
    "pixtral": ImageFamily(
        markup=ImageMarkup(part="[IMG]", placeholder="[IMG]", between_rows="[IMG_BREAK]", after="[IMG_END]"),
    ),
}
FAMILIES["gemma4"] = ImageFamily(
    markup=None,
    attends_both_ways=True,
    both_ways_in_windows=True,
    multiplies_embeddings=True,
    reads_pads_as=0,
)
FAMILIES["qwen3_vl"] = replace(FAMILIES["qwen2_5_vl"], interleaves_axes=True)
for _name in ("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"):
    FAMILIES[_name] = FAMILIES["qwen3_vl"]
FAMILIES["mistral3"] = FAMILIES["pixtral"]
"""By the model_type of config.json."""


def family_of(config: Mapping[str, Any]) -> ImageFamily | None:
    """Return the family of a model that sees, by its config.json; None for another."""
    family = FAMILIES.get(str(config.get("model_type")))
    if not isinstance(config.get("vision_config"), dict) or pad_token(config) is None:
        return None
    if family is not None and family.both_ways_in_windows:
        text = config.get("text_config") or {}
        return replace(family, attends_both_ways=text.get("use_bidirectional_attention") == "vision")
    return family


def pad_token(config: Mapping[str, Any]) -> int | None:
    """Return the token that stands in a prompt once for each of an image's places; None if config.json names none."""
    token = config.get("image_token_id", config.get("image_token_index"))
    return token if isinstance(token, int) else None


def image_support(config: Mapping[str, Any]) -> ImageSupport:
    """Return whether a model can be shown images, as far as its config.json and what is installed here tell."""
    if not sees(config):
        return ImageSupport.NONE
    if not is_installed():
        return ImageSupport.NOT_INSTALLED
    known = family_of(config) is not None or is_of_mlx_vlm(config)
    return ImageSupport.AVAILABLE if known else ImageSupport.UNKNOWN_FAMILY


def runs_on_mlx_vlm(config: Mapping[str, Any], options: EngineOptions) -> bool:
    """Whether mlx-vlm's own network answers for a model, one reply at a time: `needs_mlx_vlm`, and it can."""
    return needs_mlx_vlm(config, options) and not (is_of_mlx_lm(config) and lacking_options(options))


def needs_mlx_vlm(config: Mapping[str, Any], options: EngineOptions) -> bool:
    """Whether mlx-lm has no network of a model's family, or none whose images are known here."""
    if not is_installed() or not is_of_mlx_vlm(config):
        return False
    if not is_of_mlx_lm(config):
        return True
    family = family_of(config)
    return sees(config) and (family is None or (family.has_grid_positions and not options.packing))


def lacking_options(options: EngineOptions) -> list[str]:
    """Return which options mlx-vlm's network lacks, of those that are given."""
    return [name for name in UNSUPPORTED_OPTIONS if getattr(options, name)]


def is_installed() -> bool:
    """Whether the extra `vision` is installed."""
    return find_spec("mlx_vlm") is not None and find_spec("PIL") is not None


def frequency_axes(config: Mapping[str, Any], head_size: int, *, interleaved: bool = False) -> list[int]:
    """Return by which position each element of a head is rotated: 0 time, 1 row, 2 column.

    `mrope_section` says how many of the frequencies each gets. An element has the same frequency as the one that
    follows it by half of those that are rotated, which are the first ones; for the others it does not matter.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    sections = rope["mrope_section"]
    if interleaved:
        axes = [0] * sum(sections)
        for axis in (1, 2):
            axes[axis : 3 * sections[axis] : 3] = [axis] * sections[axis]
    else:
        axes = [axis for axis, count in enumerate(sections) for _ in range(count)]
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if 2 * len(axes) != int(head_size * share):
        raise ValueError(f"mrope_section {sections} does not fit heads of {head_size}")
    return axes * 2 + [0] * (head_size - 2 * len(axes))
