"""POST /api/embed, and the older POST /api/embeddings for one text."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from mlx_backend.api.base import Operation
from mlx_backend.api.json_text import decode_json
from mlx_backend.api.ollama import objects
from mlx_backend.api.ollama.base import OllamaProtocol, nanoseconds
from mlx_backend.api.ollama.body import KeepAlive, Options  # noqa: TC001 (read at run time)
from mlx_backend.api.openai.embeddings import EmbeddingsCall, VectorsBody, as_texts
from mlx_backend.embedding.embedder import EmbeddingRequest

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping, Sequence

    from mlx_backend.api.base import JsonAnswer, OnDisconnect
    from mlx_backend.embedding.embedder import Embedder
    from mlx_backend.engine.base import QueueClient


class _EmbedBody(VectorsBody):
    """What both addresses share."""

    has_durations: ClassVar = True

    keep_alive: KeepAlive = None
    options: Options | None = None


class EmbedBody(_EmbedBody):
    """POST /api/embed. A text that is too long is cut, unless the request says otherwise."""

    input: str | list[str]
    truncate: bool | None = None
    dimensions: Annotated[int, Field(gt=0)] | None = None

    def request(self) -> EmbeddingRequest:
        """Return the request for the embedding service."""
        return EmbeddingRequest(
            texts=as_texts(self.input, "input"),
            role=None,
            dimensions=self.dimensions,
            truncate_to=None if self.truncate is False else 0,
        )

    def answer(self, model: str, vectors: Sequence[array[float]], tokens: int) -> Mapping[str, Any]:
        """Return the vectors of all texts."""
        return {
            "model": self.model or model,
            "embeddings": [list(vector) for vector in vectors],
            "prompt_eval_count": tokens,
        }


class PromptBody(_EmbedBody):
    """POST /api/embeddings."""

    has_durations: ClassVar = False

    prompt: str

    def request(self) -> EmbeddingRequest:
        """Return the request for the embedding service."""
        return EmbeddingRequest(texts=as_texts(self.prompt, "prompt"), role=None, truncate_to=0)

    def answer(self, _model: str, vectors: Sequence[array[float]], _tokens: int) -> Mapping[str, Any]:
        """Return the vector of the text."""
        return {"embedding": list(vectors[0])}


@dataclass(frozen=True)
class _EmbedCall(EmbeddingsCall):
    """An `EmbeddingsCall` that says how long the model stays. It came when it had `arrived`."""

    body: _EmbedBody
    arrived: float = field(default_factory=time.perf_counter)

    def answer(self, service: Embedder, client: QueueClient, on_disconnect: OnDisconnect) -> JsonAnswer:
        """Compute the vectors, and say how long that and the wait for the model took."""
        waited = time.perf_counter() - self.arrived
        answer = super().answer(service, client, on_disconnect)
        if answer.body is None or not self.body.has_durations:
            return answer
        total = time.perf_counter() - self.arrived
        durations = {"total_duration": nanoseconds(total), "load_duration": nanoseconds(waited)}
        return replace(answer, body={**answer.body, **durations})

    @property
    def keep_alive(self) -> float | None:
        """The seconds that the model is to stay in memory."""
        return self.body.keep_alive


class Embed(OllamaProtocol):
    """Implements `JsonProtocol`: texts become vectors."""

    operation = Operation(
        summary="Turn texts into vectors, as Ollama does", body=EmbedBody, answer=objects.OllamaEmbeddings
    )
    body: type[_EmbedBody] = EmbedBody

    def parse(self, body: bytes) -> EmbeddingsCall:
        """Parse a request. Raises ApiError naming the field that is wrong."""
        parsed = self.body.parse(decode_json(body))
        return _EmbedCall(parsed, parsed.request())


class EmbedPrompt(Embed):
    """A text becomes a vector."""

    operation = Operation(
        summary="Turn a text into a vector, as Ollama did", body=PromptBody, answer=objects.OllamaEmbedding
    )
    body = PromptBody
