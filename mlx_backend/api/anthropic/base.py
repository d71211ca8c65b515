"""What every address of this API shares: how an error is written, and with which status. Knows no endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.api.addresses import Api
from mlx_backend.api.anthropic.objects import AnthropicError
from mlx_backend.errors import CONTEXT_LENGTH_EXCEEDED

if TYPE_CHECKING:
    from mlx_backend.api.anthropic.objects import AnthropicErrorFields
    from mlx_backend.api.errors import ApiError

VERSION_HEADER = "anthropic-version"
"""What this API's clients send with every request: it tells them from others at an address of several APIs."""

OVERLOADED = 529
"""The API's status for a server that is too busy: its clients wait and try again."""

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    OVERLOADED: "overloaded_error",
}


def status_of(error: ApiError) -> int:
    """Return the status of an error: where it says when to try again, the server is overloaded."""
    has_time = any(name == "Retry-After" for name, _ in error.headers)
    return OVERLOADED if error.status == 503 and has_time else error.status


def error_object(error: ApiError) -> AnthropicError:
    """Build `{"type": "error", "error": {type, message}}`. The API has no field for the place: the message names it."""
    message = error.placed_message
    if error.code == CONTEXT_LENGTH_EXCEEDED:
        # By these words a client knows that it has to compact, and by how much.
        tokens, context = error.numbers["prompt_tokens"], error.numbers["max_model_len"]
        most = min(error.numbers.get("max_prompt_tokens", context), tokens - 1)
        message = f"prompt is too long: {tokens} tokens > {most} maximum. {message}"
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    written: AnthropicErrorFields = {"type": kind, "message": message}
    if error.param == "thread":
        # By this a client knows that it has to send all of the conversation itself, and asks again.
        written["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": written}


ANTHROPIC = Api(AnthropicError, error_object, status_of)
