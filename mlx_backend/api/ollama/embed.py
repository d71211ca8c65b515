"""POST /api/embed, and the older POST /api/embeddings for one text."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from mlx_backend.api.ollama.base import nanoseconds
from mlx_backend.api.ollama.body import KeptBody, Options
from mlx_backend.api.openai.embeddings import as_texts
from mlx_backend.api.reading import ReadingBody, ReadingCall
from mlx_backend.api.sent import Sent
from mlx_backend.embedding.embedder import EmbeddingRequest

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping, Sequence

    from mlx_backend.api.addresses import JsonAnswer, OnDisconnect
    from mlx_backend.embedding.embedder import Embedder
    from mlx_backend.engine.base import QueueClient


class _EmbedBody(KeptBody, ReadingBody):
    """What both addresses share."""

    has_durations: ClassVar = True

    options: Options | None = None


class EmbedBody(_EmbedBody):
    """POST /api/embed. A text that is too long is cut, unless the request says otherwise."""

    input: str | list[str]
    truncate: bool | None = None
    dimensions: Annotated[int, Field(gt=0)] | None = None

    def request(self) -> EmbeddingRequest:
        """Return the request for the embedding service."""
        return EmbeddingRequest(
            texts=as_texts(Sent(self.input, "input")),
            role=None,
            dimensions=self.dimensions,
            truncate_to=None if self.truncate is False else 0,
        )

    def answer(self, model: str, results: Sequence[array[float]], tokens: int) -> Mapping[str, Any]:
        """Return the vectors of all texts."""
        return {
            "model": self.model or model,
            "embeddings": [list(vector) for vector in results],
            "prompt_eval_count": tokens,
        }


class PromptBody(_EmbedBody):
    """POST /api/embeddings."""

    has_durations: ClassVar = False

    prompt: str

    def request(self) -> EmbeddingRequest:
        """Return the request for the embedding service."""
        return EmbeddingRequest(texts=as_texts(Sent(self.prompt, "prompt")), role=None, truncate_to=0)

    def answer(self, _model: str, results: Sequence[array[float]], _tokens: int) -> Mapping[str, Any]:
        """Return the vector of the text."""
        return {"embedding": list(results[0])}


class EmbedCall(ReadingCall[_EmbedBody]):
    """Says in addition how long it took."""

    def answer(self, service: Embedder, client: QueueClient, on_disconnect: OnDisconnect) -> JsonAnswer:
        """Compute the vectors, and say how long that and the wait for the model took."""
        waited = time.perf_counter() - self.body.arrived
        answer = super().answer(service, client, on_disconnect)
        if answer.body is None or not self.body.has_durations:
            return answer
        total = time.perf_counter() - self.body.arrived
        durations = {"total_duration": nanoseconds(total), "load_duration": nanoseconds(waited)}
        return replace(answer, body={**answer.body, **durations})
