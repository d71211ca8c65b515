"""The requests and answers of /v1/rerank: Jina's and Cohere's."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from mlx_backend.api.openai.objects import DescribedAs, Document, Ranking, RankingResult
from mlx_backend.api.reading import ReadingBody
from mlx_backend.api.sent import Sent
from mlx_backend.embedding.embedder import MAX_TEXTS, RerankRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.embedding.embedder import PendingResult


class RerankBody(ReadingBody):
    """POST /v1/rerank. A document that is too long is truncated, as other servers do."""

    kind = "rerank"

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
        return list(map(_document_text, Sent(self.documents, "documents").entries()))

    def results(self, pending: PendingResult) -> list[float] | None:
        """Wait for the scores."""
        return pending.scores(raw=self.raw_scores is True)

    def answer(self, model: str, results: Sequence[float], tokens: int) -> Ranking:
        """Return the results, best first; equal scores keep the order of the request."""
        order = sorted(range(len(results)), key=lambda i: -results[i])[: self.top_n]
        texts = self.texts
        ranked: list[RankingResult] = []
        for i in order:
            result: RankingResult = {"index": i, "relevance_score": results[i]}
            if self.return_documents:
                result["document"] = {"text": texts[i]}
            ranked.append(result)
        return {
            "id": f"rerank-{uuid.uuid4().hex}",
            "object": "list",
            "model": model,
            "results": ranked,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }


def _document_text(document: Sent) -> str:
    match document.value:
        case str(text) | {"text": str(text)}:
            return text
    raise document.unlike('a text or {"text": …}')
