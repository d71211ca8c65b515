"""A request's body, whole and no longer than allowed. What it means is api/'s."""

from __future__ import annotations

from typing import TYPE_CHECKING

from werkzeug.exceptions import ClientDisconnected, RequestEntityTooLarge

from mlx_backend.api.errors import ApiError

if TYPE_CHECKING:
    from werkzeug import Request

_CLOSE = (("Connection", "close"),)  # where the next request would begin is not known


def read_body(request: Request, max_bytes: int) -> bytes:
    """Read the body, sent with a length or in chunks. Raises ApiError: 400 if it is cut, 413 if it is too long."""
    request.max_content_length = max_bytes
    try:
        data = request.get_data(cache=False)
        # werkzeug reads a body in chunks up to the limit, and does not look whether that was all of it.
        if (
            request.content_length is None
            and len(data) == max_bytes
            and request.environ["wsgi.input"].read(1)
        ):
            raise RequestEntityTooLarge
    except RequestEntityTooLarge:
        raise ApiError(
            413, f"The body is larger than {max_bytes} bytes, which is this server's limit."
        ) from None
    except ClientDisconnected as error:
        raise _not_read(request, error.__context__) from None
    except (OSError, ValueError) as error:
        raise _not_read(request, error) from None
    return data


def _not_read(request: Request, cause: BaseException | None) -> ApiError:
    if cause is not None:
        return ApiError(400, f"The body could not be read: {cause}.", headers=_CLOSE)
    return ApiError(400, f"The body ended before its {request.content_length} bytes had arrived.")
