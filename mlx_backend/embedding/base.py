"""What the worker drives and the service reads: protocols and plain data, without MLX.

A network runs rows of tokens and gives a vector for each. It does so in stages, and between two stages others may
use the device: that is all it knows of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Generator, Sequence

    from mlx_backend.embedding.recipe import Recipe
    from mlx_backend.models.model_type import ModelType


@dataclass(frozen=True, slots=True)
class Row:
    """One text, or a pair of them, as tokens. `types` tells the second of a pair from the first."""

    tokens: Sequence[int]
    types: Sequence[int] | None = None


class Encoder(Protocol):
    """Text to tokens, with the special tokens around it that the network was trained with."""

    @property
    def vocabulary_size(self) -> int:
        """Valid token ids are 0 … vocabulary_size - 1."""
        ...

    def text(self, text: str, most: int | None = None, *, around: bool = True) -> Row:
        """Tokenise one text; with `most`, its beginning only. `around`: with what stands around every text."""
        ...

    def pair(self, query: str, document: str, instruction: str | None, most: int) -> tuple[Row, bool]:
        """Tokenise what is ranked together, the document cut to fit; say whether it was cut.

        Raises EngineRefused if the query leaves no room for a document.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFacts:
    """What the world may know of a loaded network. `dimensions` is 0 for one that ranks."""

    model_id: str
    type: ModelType
    context_length: int
    encoder: Encoder
    recipe: Recipe
    dimensions: int = 0
    instructions: bool = field(default=False)  # whether a ranking may be told what is looked for


class Network(Protocol):
    """A model that reads and does not write. Every method is called on the worker's thread."""

    def load(self, report: Callable[[float], None]) -> NetworkFacts:
        """Load it, reporting from 0 to 1; raise EngineError with a text for people if that fails."""
        ...

    def run(
        self, rows: Sequence[Row], dimensions: int | None, most: int
    ) -> Generator[None, None, list[array[float]]]:
        """Give a vector for each row. After each `next` about `most` tokens' worth of work has been done."""
        ...

    def unload(self) -> None:
        """Give everything back, also after a failed load."""
        ...

    def close(self) -> None:
        """The last act of the thread."""
        ...
