"""What every protocol in this folder shares: OpenAI's error object. Knows no endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_backend.api import json_text
from mlx_backend.api.errors import refuse
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


class OpenAIProtocol:
    """The base of every protocol in this folder: implements api/base.py's `Errors`."""

    error_type = ErrorObject

    def error(self, error: ApiError) -> bytes:
        """Return the body of an error response."""
        return json_text.body(error_object(error))

    def status(self, error: ApiError) -> int:
        """Return the status of an error response."""
        return error.status


def with_extra_body(body: Any) -> Any:
    """Return a body with the fields of `extra_body` among its own, as the OpenAI SDK sends them.

    Other clients send the object as it is. Raises the ApiError for a field that says two things.
    """
    extra = body.get("extra_body") if isinstance(body, dict) else None
    if not isinstance(extra, dict):
        return body
    written = {name: value for name, value in body.items() if name != "extra_body"}
    for name, value in extra.items():
        if written.get(name) not in (None, value):
            raise refuse(
                f"extra_body.{name} and {name} say different things: send one of them.", f"extra_body.{name}"
            )
        written[name] = value
    return written
