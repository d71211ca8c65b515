"""A request's body, no longer than allowed. All of it has arrived (receiver.py). Its meaning is api's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from werkzeug.exceptions import ClientDisconnected, RequestEntityTooLarge

from mlx_backend.api.errors import ApiError

if TYPE_CHECKING:
    from werkzeug import Request


def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the body. Raises ApiError: 413 if its length is larger than allowed, 400 if less is there."""
    request.max_content_length = max_bytes
    try:
        return request.get_data(cache=False)
    except RequestEntityTooLarge:
        size = f"{max_bytes / (1 << 20):g} MB" if max_bytes >= 1 << 20 else f"{max_bytes} bytes"
        raise ApiError(
            413,
            f"The request is larger than {size}, which is this server's limit (--max-body-mb). Images count too, also "
            "those of earlier messages: send smaller ones, or begin a new conversation.",
        ) from None
    except ClientDisconnected:
        raise ApiError(
            400, f"The body ended before its {request.content_length} bytes had arrived."
        ) from None
