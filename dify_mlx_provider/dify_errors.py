"""What Dify is told when something goes wrong: one table from our errors to Dify's five kinds.

Used when a request is refused and when an answer breaks off in the middle; Dify's SDK maps only the former by itself.
"""

from __future__ import annotations

from dify_plugin.errors.model import (
    InvokeAuthorizationError,
    InvokeBadRequestError,
    InvokeConnectionError,
    InvokeError,
    InvokeRateLimitError,
    InvokeServerUnavailableError,
)

from dify_mlx_provider.upstream.errors import (
    KeyRefused,
    Overloaded,
    Refused,
    ServerError,
    Unavailable,
    Unreachable,
)

ERROR_MAPPING: dict[type[InvokeError], list[type[Exception]]] = {
    InvokeConnectionError: [Unreachable],
    InvokeServerUnavailableError: [Unavailable],
    InvokeRateLimitError: [Overloaded],
    # Dify replaces this kind's text by its own "Incorrect API key provided". That says what is wrong, and only
    # this kind makes Dify treat the credentials as bad; so it is the right one although our words are lost.
    InvokeAuthorizationError: [KeyRefused],
    InvokeBadRequestError: [Refused, ValueError],
}
"""Dify's kinds of errors, and which of ours they stand for."""


def to_dify_error(error: Exception) -> InvokeError:
    """Return the error Dify is to see: one of its five kinds, with our words behind `[MLX]`."""
    if isinstance(error, InvokeError):
        return error
    for kind, ours in ERROR_MAPPING.items():
        if isinstance(error, tuple(ours)):
            return kind(f"[MLX] {error}")
    if isinstance(error, ServerError):
        return InvokeServerUnavailableError(f"[MLX] {error}")
    return InvokeServerUnavailableError(f"[MLX] the plugin failed: {type(error).__name__}")


class DifyErrorMapping:
    """What a model's class tells Dify's SDK of its errors; stands before the SDK's own class."""

    @property
    def _invoke_error_mapping(self) -> dict[type[InvokeError], list[type[Exception]]]:
        return ERROR_MAPPING

    def _transform_invoke_error(self, error: Exception) -> InvokeError:
        return to_dify_error(error)
