"""The requests and answers of /v1/rerank: Jina's and Cohere's."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from mlx_backend.api.base import Cost, JsonAnswer, Operation
from mlx_backend.api.errors import refuse
from mlx_backend.api.fields import Body, BodyCall
from mlx_backend.api.json_text import decode_json
from mlx_backend.api.openai.base import OpenAIProtocol
from mlx_backend.api.openai.objects import DescribedAs, Document, Ranking, RankingResult
from mlx_backend.conversation.json_values import excerpt
from mlx_backend.embedding.embedder import MAX_TEXTS, RerankRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.api.base import OnDisconnect
    from mlx_backend.embedding.embedder import Embedder
    from mlx_backend.engine.base import QueueClient
    from mlx_backend.registry.base import Lease, ModelRegistry


class RerankBody(Body):
    """POST /v1/rerank. A document that is too long is truncated, as other servers do."""

    query: str
    documents: Annotated[list[Annotated[Any, DescribedAs(Document)]], Field(max_length=MAX_TEXTS)]
    top_n: Annotated[int, Field(gt=0)] | None = None
    return_documents: bool | None = None
    instruction: Annotated[str, Field(min_length=1)] | None = None
    raw_scores: bool | None = None
    user: str | None = None

    def request(self) -> RerankRequest:
        """Return the request for the embedding service."""
        return RerankRequest(query=self.query, documents=self.texts, instruction=self.instruction)

    @property
    def texts(self) -> list[str]:
        """The documents' texts."""
        return [_document_text(i, document) for i, document in enumerate(self.documents)]

    def answer(self, model: str, scores: Sequence[float], tokens: int) -> Ranking:
        """Return the results, best first; equal scores keep the order of the request."""
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: self.top_n]
        texts = self.texts
        results: list[RankingResult] = []
        for i in order:
            result: RankingResult = {"index": i, "relevance_score": scores[i]}
            if self.return_documents:
                result["document"] = {"text": texts[i]}
            results.append(result)
        return {
            "id": f"rerank-{uuid.uuid4().hex}",
            "object": "list",
            "model": model,
            "results": results,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }


class Rerank(OpenAIProtocol):
    """Implements `JsonProtocol`: documents are scored for a query."""

    operation = Operation(summary="Rank documents for a query", body=RerankBody, answer=Ranking)

    def parse(self, body: bytes) -> RerankCall:
        """Parse a request. Raises ApiError naming the field that is wrong."""
        parsed = RerankBody.parse(decode_json(body))
        return RerankCall(parsed, parsed.request())


@dataclass(frozen=True)
class RerankCall(BodyCall[RerankBody]):
    """Implements `JsonCall`."""

    request: RerankRequest

    def acquire(self, models: ModelRegistry, wait: float) -> Lease[Embedder]:
        """Lease the rerank model."""
        return models.acquire_embedder(self.model, wait, "rerank")

    def answer(self, service: Embedder, client: QueueClient, on_disconnect: OnDisconnect) -> JsonAnswer:
        """Compute the scores."""
        pending = service.rerank(self.request, client)
        with on_disconnect(pending.close):
            scores = pending.scores(raw=self.body.raw_scores is True)
        model = service.engine.model_id
        cost = Cost(
            model=model, texts=len(pending.job.texts), tokens=pending.tokens, truncated=pending.truncated
        )
        if scores is None:
            return JsonAnswer(None, cost)
        return JsonAnswer(self.body.answer(model, scores, pending.tokens), cost)


def _document_text(index: int, document: Any) -> str:
    match document:
        case str() as text:
            return text
        case {"text": str() as text}:
            return text
    where = f"documents[{index}]"
    raise refuse(f'{where}: must be a text or {{"text": …}}, not {excerpt(document)}.', where)
