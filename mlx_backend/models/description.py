"""What clients are shown of a model: plain data. chat/capabilities.py and embedding/embedder.py make it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_backend.conversation.effort import Effort
    from mlx_backend.models.files import ModelType


DEFAULT_TEMPERATURE = 1.0
"""The temperature where nothing sets one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """What is known of a model; None and empty for what is not."""

    kind: ModelType = "llm"
    context_length: int | None = None
    dialect: str = ""
    """How a chat model writes reasoning and calls, by the name of its family's dialect."""
    recognised_by: str = ""
    """What told the dialect."""
    capabilities: tuple[str, ...] = ("completion",)
    efforts: tuple[Effort, ...] = ()
    """The efforts that make a difference."""
    effort_budgets: Mapping[Effort, int] = field(default_factory=dict)
    """The most tokens of reasoning, for the efforts that are such a limit."""
    default_effort: Effort | None = None
    """The effort of a request that sets none."""
    lists_efforts: bool = False
    """Whether it is also listed under a name for each of its efforts."""
    preserves_reasoning: bool = False
    """Whether the reasoning of answered turns can be part of a prompt: then clients had better return it."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """What a request is sampled with that sets nothing, by the names of `Sampling`."""
    default_max_tokens: int | None = None
    """The limit of a request that sets none; None: what the context holds."""
    adapters: tuple[str, ...] = ()
    """The LoRA adapters, by the names that a request may send."""
    unbatched: str = ""
    """Why replies of the loaded model are not decoded together; empty if they are."""
    available_context: int | None = None
    """Tokens of prompt and reply that fit into memory now, of a loaded model."""
