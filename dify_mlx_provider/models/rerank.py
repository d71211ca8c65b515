"""The rerank model as Dify's SDK loads it. The SDK runs this file more than once: it holds no state and no logic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dify_plugin import RerankModel
from dify_plugin.entities.model.rerank import RerankDocument, RerankResult

from dify_mlx_provider.dify_errors import DifyErrorMapping
from dify_mlx_provider.knowledge import rank
from dify_mlx_provider.settings.model_schema import ServerSchemas
from dify_mlx_provider.settings.validation import validate_by_trial
from dify_mlx_provider.upstream.credentials import Credentials

if TYPE_CHECKING:
    from collections.abc import Mapping


class MLXRerankModel(ServerSchemas, DifyErrorMapping, RerankModel):
    """Rerank models of an MLX server, or of another one with Jina's or Cohere's protocol."""

    def _invoke(
        self,
        model: str,
        credentials: dict[str, Any],
        query: str,
        docs: list[str],
        score_threshold: float | None = None,
        top_n: int | None = None,
        user: str | None = None,
    ) -> RerankResult:
        """Rank documents by their relevance to a query."""
        parsed = Credentials.from_form(credentials)
        ranked = rank(model, parsed, query, docs, threshold=score_threshold, top_n=top_n)
        documents = [
            RerankDocument(index=each.index, text=docs[each.index], score=each.score) for each in ranked
        ]
        return RerankResult(model=model, docs=documents)

    def validate_credentials(self, model: str, credentials: Mapping[str, Any]) -> None:
        """Rank two documents."""
        query, documents = (
            "What is the capital of France?",
            ["Paris is the capital of France.", "Rice is a grain."],
        )
        validate_by_trial(credentials, model, "rerank", lambda parsed: rank(model, parsed, query, documents))
