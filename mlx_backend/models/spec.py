"""What is known of a model before it is loaded: frozen data, and nothing that reads a file.

None always means that nobody has said so: the server's own choice, or the model's, is next.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_backend.conversation.effort import Effort
    from mlx_backend.models.engine_options import EngineOptions
    from mlx_backend.models.model_type import ModelType
    from mlx_backend.settings import ReasoningFormat


# What a template gets from the server; nobody's chat_template_kwargs may replace it.
RESERVED_KWARGS = frozenset(
    [
        *("messages", "conversation", "tools", "documents", "chat_template", "tokenizer_kwargs"),
        *("add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDefaults:
    """What a reply is like where its request does not say."""

    effort: Effort | None = None
    reasoning_format: ReasoningFormat | None = None
    max_tokens: int | None = None
    thinking_budget: int | None = None  # most tokens of reasoning
    answer_reserve: int | None = None  # tokens of a reply that are kept for the answer
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    # by the names of `Sampling`
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """Those that were said, by the names of `Sampling`."""
        said = {name: getattr(self, name) for name in SAMPLING}
        return {name: value for name, value in said.items() if value is not None}


_NOT_SAMPLING = (
    "effort",
    "reasoning_format",
    "max_tokens",
    "thinking_budget",
    "answer_reserve",
    "template_kwargs",
)
SAMPLING = tuple(field.name for field in fields(ModelDefaults) if field.name not in _NOT_SAMPLING)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model that can be served. `source` is a folder or a Hugging Face repository.

    `engine` holds the fields of `EngineOptions` in which this model differs from the server's other ones.
    """

    name: str
    source: str
    aliases: tuple[str, ...] = ()
    pinned: bool = False  # loaded at start, never unloaded to make room or for being idle
    ttl: float | None = None  # seconds without a request until it is unloaded; None: never
    defaults: ModelDefaults = field(default_factory=ModelDefaults)
    engine: Mapping[str, Any] = field(default_factory=dict)
    named_on_command_line: bool = False
    type: ModelType | None = None  # None: what its files say
    # The fields of `EmbeddingOptions` that were said.
    embedding: Mapping[str, Any] = field(default_factory=dict)

    def options(self, base: EngineOptions) -> EngineOptions:
        """Return the engine's options: the server's, and where this model differs."""
        return replace(base, **self.engine)
