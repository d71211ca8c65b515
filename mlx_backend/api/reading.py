"""What models that read are asked for, in whichever API: texts become vectors, or documents are ranked."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from mlx_backend.api.addresses import Cost, JsonAnswer, JsonCall
from mlx_backend.api.fields import Body
from mlx_backend.embedding.embedder import Embedder, RerankRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_backend.api.addresses import OnDisconnect
    from mlx_backend.embedding.embedder import EmbeddingRequest, PendingResult
    from mlx_backend.engine.base import QueueClient
    from mlx_backend.registry.base import Lease, ModelRegistry


class ReadingBody(Body):
    """A request for vectors, or for a ranking."""

    kind: ClassVar[Literal["embedding", "rerank"]] = "embedding"

    @abstractmethod
    def request(self) -> EmbeddingRequest | RerankRequest:
        """Return the request for the embedding service. Raises ApiError."""

    def results(self, pending: PendingResult) -> Any:
        """Wait for the vectors or scores; None if the client has left."""
        return pending.vectors()

    @abstractmethod
    def answer(self, model: str, results: Any, tokens: int) -> Mapping[str, Any]:
        """Return what the results for its texts, which had so many tokens, are sent as."""


@dataclass(frozen=True)
class ReadingCall[B: ReadingBody](JsonCall[B, Embedder]):
    """Asks a model to read texts."""

    waits_for_engine: ClassVar[bool] = True

    request: EmbeddingRequest | RerankRequest

    @classmethod
    def of(cls, body: B) -> Self:
        """Return the call that a body becomes. Raises ApiError."""
        return cls(body, body.request())

    def acquire(self, models: ModelRegistry, wait: float) -> Lease[Embedder]:
        """Lease the model."""
        return models.acquire_embedder(self.model, wait, self.body.kind)

    def answer(self, service: Embedder, client: QueueClient, on_disconnect: OnDisconnect) -> JsonAnswer:
        """Have the texts read."""
        if isinstance(self.request, RerankRequest):
            pending = service.rerank(self.request, client)
        else:
            pending = service.embed(self.request, client)
        with on_disconnect(pending.close):
            results = self.body.results(pending)
        model, tokens = service.engine.model_id, pending.tokens
        cost = Cost(model=model, texts=len(pending.job.texts), tokens=tokens, truncated=pending.truncated)
        return JsonAnswer(None if results is None else self.body.answer(model, results, tokens), cost)
