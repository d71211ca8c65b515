"""A network that reads as a script says: how far it may go, and when it breaks."""

from __future__ import annotations

import threading
from array import array
from typing import TYPE_CHECKING, Any

from mlx_backend.embedding.base import NetworkFacts, Row
from mlx_backend.embedding.recipe import Recipe
from mlx_backend.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from mlx_backend.embedding.base import Encoder

SOON = 20  # seconds after which a test that waits for another thread gives up


class Scripted:
    """A network whose vectors are the length and the first token of a row; a stage a hundred tokens.

    With `gated`, each stage waits to be let go. `stages` holds the first tokens of what each one worked on.
    """

    def __init__(self, *, gated: bool = False, fails: str = "", encoder: Encoder | None = None) -> None:
        self.encoder: Any = encoder  # none where rows come ready
        self.stages: list[set[int]] = []
        self.pieces: list[tuple[int, int]] = []
        self.began = threading.Semaphore(0)
        self.gate = threading.Semaphore(0) if gated else None
        self.fails = fails
        self.unloaded = False

    def load(self, report: Callable[[float], None]) -> NetworkFacts:
        if self.fails == "load":
            raise EngineError("There is no such model.")
        report(1.0)
        return NetworkFacts(
            model_id="m", type="embedding", context_length=8192, encoder=self.encoder, recipe=Recipe()
        )

    def run(
        self, rows: Sequence[Row], dimensions: int | None, most: int
    ) -> Generator[None, None, list[array[float]]]:
        count = max(len(row.tokens) for row in rows)
        self.pieces.append((len(rows), count))
        left = len(rows) * count
        while True:
            self.stages.append({row.tokens[0] for row in rows})
            self.began.release()
            if self.gate is not None:
                assert self.gate.acquire(timeout=SOON)
            if self.fails and rows[0].tokens[0] == 13:
                raise RuntimeError(f"{self.fails}\nat line 7")
            left -= 100
            if left <= 0:
                return [array("f", (len(row.tokens), row.tokens[0])) for row in rows]
            yield

    def unload(self) -> None:
        self.unloaded = True

    def close(self) -> None:
        pass

    def goes_on(self, stages: int = 1) -> None:
        """Let stages pass, each once it has begun."""
        assert self.gate is not None
        for _ in range(stages):
            assert self.began.acquire(timeout=SOON)
            self.gate.release()
