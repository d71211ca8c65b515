"""From our errors to Dify's five kinds: one table.

Used when a request is refused, and when an answer breaks off in the middle; Dify's SDK maps only the former by itself.
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
    # Dify replaces this kind's text with its own "Incorrect API key provided". That says what is wrong, and only
    # this kind makes Dify treat the credentials as bad; so it is the right one although our text is lost.
    InvokeAuthorizationError: [KeyRefused],
    InvokeBadRequestError: [Refused, ValueError],
}
"""Dify's kinds of errors, and those of ours that become them."""


def to_dify_error(error: Exception) -> InvokeError:
    """Return one of Dify's five kinds, with our text after `[MLX]`."""
    if isinstance(error, InvokeError):
        return error
    for kind, ours in ERROR_MAPPING.items():
        if isinstance(error, tuple(ours)):
            return kind(f"[MLX] {error}")
    if isinstance(error, ServerError):
        return InvokeServerUnavailableError(f"[MLX] {error}")
    return InvokeServerUnavailableError(f"[MLX] the plugin failed: {type(error).__name__}")


class DifyErrorMapping:
    """A model class's mapping of errors for Dify's SDK; listed before the SDK's own class."""

    @property
    def _invoke_error_mapping(self) -> dict[type[InvokeError], list[type[Exception]]]:
        return ERROR_MAPPING

    def _transform_invoke_error(self, error: Exception) -> InvokeError:
        return to_dify_error(error)
