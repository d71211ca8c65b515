"""A few models that are worth recommending, from small to large, with the size of their weights.

README's table of what fits which Mac shows the same ones; a test compares them.
"""

from __future__ import annotations

from typing import NamedTuple


class RecommendedModel(NamedTuple):
    """A repository on Hugging Face, and the bytes of its weights, computed from its shapes."""

    repository: str
    weights: int


RECOMMENDED_MODELS = (
    RecommendedModel("mlx-community/Qwen3-4B-Instruct-2507-4bit", 2_260_000_000),
    RecommendedModel("mlx-community/DeepSeek-R1-Distill-Qwen-14B-4bit", 8_310_000_000),
    RecommendedModel("mlx-community/gpt-oss-20b-MXFP4-Q8", 12_100_000_000),
    RecommendedModel("mlx-community/Qwen3-30B-A3B-4bit", 17_200_000_000),
    RecommendedModel("mlx-community/gpt-oss-120b-MXFP4-Q8", 63_300_000_000),
)
