"""What config.json tells of how a model that sees is to be run. Knows no MLX.

Nothing here is a list of families that are known: what a model needs follows from its configuration, and the rest is
tried when it is loaded (tower.py).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mlx_backend.engine.images import ImageSupport
from mlx_backend.errors import EngineError
from mlx_backend.models.engine_options import given_options
from mlx_backend.models.files import of_text
from mlx_backend.models.tasks import is_of_mlx_lm, is_of_mlx_vlm, sees, text_family

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_backend.models.engine_options import EngineOptions

ONE_AT_A_TIME = "it runs on mlx-vlm's own network, which holds one request's positions"
"""Why replies of such a model are not decoded together."""
UNSUPPORTED_OPTIONS = ("adapters", "adapter", "draft_model", "draft_from_text", "kv_bits")
"""The engine options that would change what such a network does, and that it does not have."""


class WholeError(EngineError):
    """mlx-lm's network is another one than mlx-vlm's."""


def attends_both_ways(config: Mapping[str, Any]) -> bool:
    """Whether the places of one image attend to each other in both directions; an image is then never cut in two."""
    return config.get("model_type") == "gemma3" or both_ways_in_windows(config)


def both_ways_in_windows(config: Mapping[str, Any]) -> bool:
    """Whether they do so only in layers with a window."""
    return of_text(config).get("use_bidirectional_attention") == "vision"


def mrope_section(config: Mapping[str, Any]) -> list[int] | None:
    """Return how many frequencies are rotated by time, row and column (mrope); None if all are by time."""
    text = of_text(config)
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := text.get(name), dict) and isinstance(found := rope.get("mrope_section"), list):
            return found
    return None


def image_support(config: Mapping[str, Any]) -> ImageSupport:
    """Return whether a model can be shown images, as far as its config.json and what is installed here tell."""
    if not sees(config):
        return ImageSupport.NONE
    if not is_installed():
        return ImageSupport.NOT_INSTALLED
    return ImageSupport.AVAILABLE if is_of_mlx_vlm(config) else ImageSupport.UNKNOWN_FAMILY


def only_mlx_vlm_has(config: Mapping[str, Any]) -> bool:
    """Whether mlx-vlm's own network answers for a model, one reply at a time: mlx-lm has none of its text either."""
    return may_run_on_mlx_vlm(config) and not is_of_mlx_lm(config) and not has_text_of_mlx_lm(config)


def may_run_on_mlx_vlm(config: Mapping[str, Any]) -> bool:
    """Whether mlx-vlm is here and has a network of a model's family."""
    return is_installed() and is_of_mlx_vlm(config)


def has_text_of_mlx_lm(config: Mapping[str, Any]) -> bool:
    """Whether mlx-lm has not a model's family, but that of its text part."""
    return not is_of_mlx_lm(config) and is_of_mlx_vlm(config) and text_family(config) is not None


def lacking_options(options: EngineOptions) -> list[str]:
    """Return which options mlx-vlm's network lacks, of those that are given."""
    return given_options(options, UNSUPPORTED_OPTIONS)


def is_installed() -> bool:
    """Whether the extra `vision` is installed."""
    return find_spec("mlx_vlm") is not None and find_spec("PIL") is not None


def frequency_axes(
    config: Mapping[str, Any], head_size: int, *, interleaved: bool = False, in_pairs: bool = False
) -> list[int]:
    """Return by which position each element of a head is rotated: 0 time, 1 row, 2 column.

    `mrope_section` says how many of the frequencies each gets: one block after the other, or, `interleaved`, in turns.
    An element has the same frequency as the one that follows it by half of those that are rotated, which are the first
    ones, or, `in_pairs`, as the next; for the others it does not matter.
    """
    sections = mrope_section(config) or []
    if interleaved:
        axes = [0] * sum(sections)
        for axis in (1, 2):
            axes[axis : 3 * sections[axis] : 3] = [axis] * sections[axis]
    else:
        axes = [axis for axis, count in enumerate(sections) for _ in range(count)]
    if 2 * len(axes) > head_size:
        raise ValueError(f"mrope_section {sections} does not fit heads of {head_size}")
    rotated = [axis for axis in axes for _ in range(2)] if in_pairs else axes * 2
    return rotated + [0] * (head_size - len(rotated))
