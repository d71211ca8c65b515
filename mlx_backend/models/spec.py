"""What is known of a model before it is loaded: frozen data, and nothing that reads a file.

None always means "not set": the server's own setting, or the model's, is next.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from mlx_backend.models.engine_options import EngineOptions
from mlx_backend.models.files import ModelType
from mlx_backend.settings import ReplySettings

_REPOSITORY = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)

# What the server itself passes to a template; no chat_template_kwargs may replace it.
RESERVED_KWARGS = frozenset(
    [
        *("messages", "conversation", "tools", "documents", "chat_template", "tokenizer_kwargs"),
        *("add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "self"),
    ]
)


def is_repository(source: str) -> bool:
    """Whether this is spelt like a repository on Hugging Face: owner/name."""
    return _REPOSITORY.fullmatch(source) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDefaults(ReplySettings):
    """A model's own settings for replies: they apply where a request sets nothing."""

    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model that can be served. `source` is a folder or a Hugging Face repository.

    `engine` holds the fields of `EngineOptions` in which this model differs from the server's other ones,
    `embedding` the fields of `EmbeddingOptions` that are set.
    """

    name: str
    source: str
    aliases: tuple[str, ...] = ()
    pinned: bool = False
    """It is loaded at the start, and never unloaded to make room or for being idle."""
    ttl: float | None = None
    """Seconds without a request until it is unloaded; None: never."""
    defaults: ModelDefaults = field(default_factory=ModelDefaults)
    engine: Mapping[str, Any] = field(default_factory=dict)
    named_on_command_line: bool = False
    type: ModelType | None = None
    """None: what its files say."""
    embedding: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sources(self) -> tuple[str, ...]:
        """The folders or repositories that loading reads: its own, and that of its draft model."""
        return (self.source, *filter(None, [self.engine.get("draft_model")]))

    def options(self, base: EngineOptions) -> EngineOptions:
        """Return the engine's options: the server's, except where this model differs."""
        return replace(base, **self.engine)


class RecommendedModel(NamedTuple):
    """A repository on Hugging Face, the bytes of its weights, as it lists them, and those of one reply's caches.

    The caches are those of 32k and of 128k tokens of prompt and reply, without --kv-bits; a test counts them as the
    engine does.
    """

    repository: str
    weights: int
    at_32k: int
    at_128k: int


RECOMMENDED_MODELS: Final = (
    RecommendedModel("mlx-community/Qwen3.5-4B-MLX-4bit", 3_060_000_000, 1_125_253_120, 4_346_478_592),
    RecommendedModel("mlx-community/Qwen3.5-9B-4bit", 5_980_000_000, 1_125_253_120, 4_346_478_592),
    RecommendedModel("mlx-community/gpt-oss-20b-MXFP4-Q8", 12_100_000_000, 808_452_096, 3_224_371_200),
    RecommendedModel("mlx-community/gemma-4-26b-a4b-it-4bit", 15_370_000_000, 880_803_840, 2_894_069_760),
    RecommendedModel("mlx-community/Qwen3.8-27B-4bit", 16_100_000_000, 2_301_427_712, 8_743_878_656),
    RecommendedModel("mlx-community/Qwen3.6-35B-A3B-4bit", 20_430_000_000, 735_477_760, 2_748_743_680),
    RecommendedModel("mlx-community/gpt-oss-120b-MXFP4-Q8", 63_410_000_000, 1_212_678_144, 4_836_556_800),
)
"""A few that are worth recommending, from small to large.

README's table of what fits which Mac shows the same ones, and so does the plugin's list of predefined models
(`dify_mlx_provider/packaging/predefined.py`); tests compare them.
"""
