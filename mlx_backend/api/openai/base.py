"""What every protocol in this folder shares: OpenAI's error object, and the model and ignored fields of a body."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mlx_backend.api import json_text
from mlx_backend.api.openai.objects import ErrorFields, ErrorObject

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.api.errors import ApiError
    from mlx_backend.api.openai.body import Body


def error_object(error: ApiError) -> ErrorObject:
    """Build `{"error": {message, type, param, code}}`, with the numbers of the message beside them."""
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


@dataclass(frozen=True)
class BodyCall[B: Body]:
    """Implements api/base.py's `Call` for a body that has been parsed."""

    waits_for_engine: ClassVar[bool] = True

    body: B

    @property
    def model(self) -> str | None:
        """The model's name; None for the default."""
        return self.body.model

    @property
    def ignored(self) -> Sequence[str]:
        """The fields that are ignored."""
        return self.body.ignored
