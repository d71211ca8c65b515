"""A few models that are worth recommending, from small to large, with the size of their weights.

README's table of what fits which Mac shows the same ones, and so does the plugin's list of predefined models
(`dify_mlx_provider/packaging/predefined.py`); tests compare them.
"""

from __future__ import annotations

from typing import NamedTuple


class RecommendedModel(NamedTuple):
    """A repository on Hugging Face, and the bytes of its weights, as it lists them."""

    repository: str
    weights: int


RECOMMENDED_MODELS = (
    RecommendedModel("mlx-community/Qwen3.5-4B-MLX-4bit", 3_060_000_000),
    RecommendedModel("mlx-community/Qwen3.5-9B-4bit", 5_980_000_000),
    RecommendedModel("mlx-community/gpt-oss-20b-MXFP4-Q8", 12_100_000_000),
    RecommendedModel("mlx-community/gemma-4-26b-a4b-it-4bit", 15_370_000_000),
    RecommendedModel("mlx-community/Qwen3.8-27B-4bit", 16_100_000_000),
    RecommendedModel("mlx-community/Qwen3.6-35B-A3B-4bit", 20_430_000_000),
    RecommendedModel("mlx-community/gpt-oss-120b-MXFP4-Q8", 63_410_000_000),
)
