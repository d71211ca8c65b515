"""The embedding model as Dify's SDK loads it. The SDK runs this file more than once: it holds no state and no logic."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from dify_plugin import TextEmbeddingModel
from dify_plugin.entities.model import EmbeddingInputType, PriceType
from dify_plugin.entities.model.text_embedding import EmbeddingUsage, TextEmbeddingResult

from dify_mlx_provider.dify_errors import DifyErrorMapping
from dify_mlx_provider.knowledge import embed
from dify_mlx_provider.servers.token_count import count_tokens_each
from dify_mlx_provider.settings.model_schema import ServerSchemas
from dify_mlx_provider.settings.validation import validate_by_trial
from dify_mlx_provider.upstream.credentials import Credentials

if TYPE_CHECKING:
    from collections.abc import Mapping


class MLXTextEmbeddingModel(ServerSchemas, DifyErrorMapping, TextEmbeddingModel):
    """Embedding models of an MLX server, or of another OpenAI-compatible one."""

    def _invoke(
        self,
        model: str,
        credentials: dict[str, Any],
        texts: list[str],
        user: str | None = None,
        input_type: EmbeddingInputType = EmbeddingInputType.DOCUMENT,
    ) -> TextEmbeddingResult:
        """Embed each text."""
        parsed = Credentials.from_form(credentials)
        embedded = embed(model, parsed, texts, query=input_type == EmbeddingInputType.QUERY)
        return TextEmbeddingResult(
            model=model, embeddings=embedded.vectors, usage=self._usage(model, credentials, embedded.tokens)
        )

    def _usage(self, model: str, credentials: dict[str, Any], tokens: int) -> EmbeddingUsage:
        price = self.get_price(
            model=model, credentials=credentials, price_type=PriceType.INPUT, tokens=tokens
        )
        return EmbeddingUsage(
            tokens=tokens,
            total_tokens=tokens,
            unit_price=price.unit_price,
            price_unit=price.unit,
            total_price=price.total_amount,
            currency=price.currency,
            latency=time.perf_counter() - self.started_at,
        )

    def get_num_tokens(self, model: str, credentials: dict[str, Any], texts: list[str]) -> list[int]:
        """Count each text's tokens."""
        return count_tokens_each(Credentials.from_form_leniently(credentials), model, texts)

    def validate_credentials(self, model: str, credentials: Mapping[str, Any]) -> None:
        """Embed one word."""
        validate_by_trial(
            credentials, model, "embedding", lambda parsed: embed(model, parsed, ["hello"], query=True)
        )
