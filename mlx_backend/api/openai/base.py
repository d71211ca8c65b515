"""OpenAI's error object. Knows no endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.api.addresses import Api
from mlx_backend.api.openai.objects import ErrorFields, ErrorObject

if TYPE_CHECKING:
    from mlx_backend.api.errors import ApiError


def error_object(error: ApiError) -> ErrorObject:
    """Build `{"error": {message, type, param, code}}`, with the numbers of the message next to them."""
    fields: ErrorFields = {
        "message": error.message,
        "type": error.kind or ("server_error" if error.status >= 500 else "invalid_request_error"),
        "param": error.param,
        "code": error.code,
    }
    return {"error": {**fields, **error.numbers}}  # type: ignore[typeddict-item]  # numbers have names of their own


OPENAI = Api(ErrorObject, error_object)
