"""A scripted embedding network: how far it may run, and when it fails, is up to the test."""

from __future__ import annotations

import threading
from array import array
from typing import TYPE_CHECKING, Any

from mlx_backend.embedding.embedding_config import EmbeddingConfig
from mlx_backend.embedding.worker import NetworkInfo
from mlx_backend.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from mlx_backend.embedding.text_encoder import EncodedText, TextEncoder

SOON = 60  # seconds after which a test that waits for another thread gives up
STAGE_TOKENS = 100


class ScriptedNetwork:
    """A network whose vectors are a text's length and first token, and whose stages are `STAGE_TOKENS` tokens.

    With `gated`, each stage waits for the gate. `stages` holds the first tokens of the texts that each one ran.
    """

    def __init__(self, *, gated: bool = False, fails: str = "", encoder: TextEncoder | None = None) -> None:
        self.encoder: Any = encoder  # None where texts are submitted encoded
        self.stages: list[set[int]] = []
        self.batches: list[tuple[int, int]] = []  # number of texts, length of the longest
        self.stage_started = threading.Semaphore(0)
        self.gate = threading.Semaphore(0) if gated else None
        self.fails = fails
        self.unloaded = False

    def load(self, on_progress: Callable[[float], None]) -> NetworkInfo:
        if self.fails == "load":
            raise EngineError("There is no such model.")
        on_progress(1.0)
        return NetworkInfo(
            model_id="m",
            model_type="embedding",
            context_length=8192,
            encoder=self.encoder,
            config=EmbeddingConfig(),
        )

    def run(
        self, texts: Sequence[EncodedText], dimensions: int | None, stage_tokens: int
    ) -> Generator[None, None, list[array[float]]]:
        longest = max(len(text.tokens) for text in texts)
        self.batches.append((len(texts), longest))
        remaining = len(texts) * longest
        while True:
            self.stages.append({text.tokens[0] for text in texts})
            self.stage_started.release()
            if self.gate is not None:
                assert self.gate.acquire(timeout=SOON)
            if self.fails and texts[0].tokens[0] == 13:
                raise RuntimeError(f"{self.fails}\nat line 7")
            remaining -= STAGE_TOKENS
            if remaining <= 0:
                return [array("f", (len(text.tokens), text.tokens[0])) for text in texts]
            yield

    def unload(self) -> None:
        self.unloaded = True

    def close(self) -> None:
        pass

    def let_pass(self, stages: int = 1) -> None:
        """Let stages pass the gate, each after it has started."""
        assert self.gate is not None
        for _ in range(stages):
            assert self.stage_started.acquire(timeout=SOON)
            self.gate.release()
