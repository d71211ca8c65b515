"""What the person who starts the server may choose: one frozen object, passed down, never changed.

Knows nothing of argparse, HTTP or MLX; the standard library and the shared core are enough.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from mlx_backend.conversation.reasoning_fields import REASONING_CONTENT

if TYPE_CHECKING:
    from mlx_backend.conversation.effort import Effort


class ReasoningFormat(StrEnum):
    """Where the reasoning goes in a reply."""

    SEPARATE = "separate"  # a field of its own
    THINK = "think"  # <think>…</think> at the start of the content
    DETAILS = "details"  # <details type="reasoning">…</details> at the start of the content
    HIDDEN = "hidden"  # nowhere; it is still generated and counted
    RAW = "raw"  # the model's own text, markers and all, as content


class ReasoningField(StrEnum):
    """The name of that field of its own."""

    REASONING_CONTENT = REASONING_CONTENT
    REASONING = "reasoning"
    BOTH = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The server's own defaults and limits. A request may choose effort, format and max_tokens for itself."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = field(default=None, repr=False)
    reasoning_effort: Effort | None = None
    reasoning_format: ReasoningFormat = ReasoningFormat.SEPARATE
    reasoning_field: ReasoningField = ReasoningField.REASONING_CONTENT
    temperature: float | None = None  # None: what the model's makers advise, or 1
    max_tokens: int | None = None  # None: as many as the context still holds
    thinking_budget: int | None = None  # most tokens of reasoning; None: no limit but max_tokens
    answer_reserve: int | None = None  # tokens of a reply that are kept for the answer
    max_concurrent: int = 32
    max_queue: int = 256
    queue_seconds: float = 600.0  # how long a request may wait for its turn
    load_seconds: float = 300.0  # and how long for its model to be loaded
    max_body_bytes: int = 8 * 1024 * 1024
    cors_origins: tuple[str, ...] = ()
    keepalive_seconds: float = 5.0
    drain_seconds: float = 30.0  # what running replies get to finish when the server is stopped
    prewarm: bool = True  # read ahead for the next turn while idle
