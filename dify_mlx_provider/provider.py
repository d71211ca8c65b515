"""The provider as Dify's SDK loads it: it only checks credentials."""

from __future__ import annotations

from typing import Any

from dify_plugin import ModelProvider

from dify_mlx_provider.settings.validation import validate


class MLXProvider(ModelProvider):
    """MLX servers."""

    def validate_provider_credentials(self, credentials: dict[str, Any]) -> None:
        """Check that a server answers at the address and takes the key."""
        validate(credentials)
