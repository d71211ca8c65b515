"""OpenAI's error object, as /v1/responses writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.api.openai import base as openai

if TYPE_CHECKING:
    from mlx_backend.api.errors import ApiError
    from mlx_backend.api.openai.objects import ErrorObject


def error_object(error: ApiError) -> ErrorObject:
    """Build OpenAI's object. What is wrong with the messages as a whole is so with the `input` here."""
    written = openai.error_object(error)
    if error.param == "messages":
        written["error"]["param"] = "input"
    return written
