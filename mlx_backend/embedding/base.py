"""What the worker drives and the service uses: protocols and plain data, without MLX.

A network runs encoded texts and returns a vector for each. It does so in stages; between two stages others may use the
device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Generator, Sequence

    from mlx_backend.embedding.embedding_config import EmbeddingConfig
    from mlx_backend.embedding.text_encoder import TextEncoder
    from mlx_backend.models.files import ModelType


@dataclass(frozen=True, slots=True)
class EncodedText:
    """One text, or a query and a document, as tokens. `type_ids` are 1 for the second of a pair, None for all 0."""

    tokens: Sequence[int]
    type_ids: Sequence[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkInfo:
    """What is known of a loaded network. `dimensions` is 0 for a reranker."""

    model_id: str
    model_type: ModelType
    context_length: int
    encoder: TextEncoder
    config: EmbeddingConfig
    dimensions: int = 0
    accepts_instructions: bool = False
    """Whether a rerank request may say what to look for."""


class Network(Protocol):
    """An embedding or rerank model. Every method is called on the worker's thread."""

    def load(self, on_progress: Callable[[float], None]) -> NetworkInfo:
        """Load it, reporting progress from 0 to 1. Raises EngineError with a message for users."""
        ...

    def run(
        self, texts: Sequence[EncodedText], dimensions: int | None, stage_tokens: int
    ) -> Generator[None, None, list[array[float]]]:
        """Return a vector for each text. Each `next` runs one stage: about `stage_tokens` tokens' worth of work."""
        ...

    def unload(self) -> None:
        """Free its memory, also after a failed load."""
        ...

    def close(self) -> None:
        """Clean up; the last call on the thread."""
        ...
