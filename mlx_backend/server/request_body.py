"""A request's body, no longer than allowed. All of it has arrived (receiver.py). Its meaning is api's.

Images have a limit of their own. A long text in JSON takes little more memory than its bytes, and an image is one;
many small values take a hundred times theirs.
"""

from __future__ import annotations

import re
from math import ceil
from typing import TYPE_CHECKING

from werkzeug.exceptions import ClientDisconnected, RequestEntityTooLarge

from mlx_backend.api.errors import ApiError

if TYPE_CHECKING:
    from werkzeug import Request

_IMAGE = re.compile(rb'"data:image\\?/[^"]*"')  # PHP's encoder puts a backslash before a slash


def read_body(request: Request, max_bytes: int, max_images_bytes: int) -> bytes:
    """Return the body. Raises ApiError: 413 if it is larger than allowed, 400 if less is there than its length.

    It may have `max_bytes` beside images in data URIs, and these may take `max_images_bytes`.
    """
    request.max_content_length = max_bytes + max_images_bytes
    try:
        body = request.get_data(cache=False)
    except RequestEntityTooLarge:
        raise ApiError(
            413,
            f"The request is larger than {_words(max_bytes + max_images_bytes)}, which is this server's limit "
            f"(--max-body-mb for texts, and --max-images-mb for images). {_REMEDY}",
        ) from None
    except ClientDisconnected:
        raise ApiError(
            400, f"The body ended before its {request.content_length} bytes had arrived."
        ) from None
    if len(body) > max_bytes:
        _check(body, max_bytes, max_images_bytes)
    return body


_REMEDY = (
    "Images count in every message, also in earlier ones: send smaller ones, or begin a new conversation."
)


def _check(body: bytes, max_bytes: int, max_images_bytes: int) -> None:
    images = sum(match.end() - match.start() for match in _IMAGE.finditer(body))
    if len(body) - images > max_bytes:
        raise ApiError(
            413,
            f"The request is larger than {_words(max_bytes)} without its images, which is this server's limit "
            "(--max-body-mb). Send shorter texts.",
        )
    if images > max_images_bytes:
        raise ApiError(
            413,
            f"The request is larger than allowed: its images take {_words(images)}, and this server's limit is "
            f"{_words(max_images_bytes)} (--max-images-mb). {_REMEDY}",
        )


def _words(nbytes: int) -> str:
    # Rounded up: what is too much is not said to be the limit itself.
    return f"{ceil(10 * nbytes / (1 << 20)) / 10:g} MB" if nbytes >= 1 << 20 else f"{nbytes} bytes"
