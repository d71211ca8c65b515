"""The body of a request: all of it, decompressed, and no longer than allowed.

Images have a limit of their own: a long text in JSON takes little more memory than its bytes, and an image is one; many
small values take a hundred times theirs. The limits hold for what a compressed body becomes, and so does the count of
the bytes that are held for clients. Knows HTTP; where in a body images may stand, api/image_places.py knows.
"""

from __future__ import annotations

import re
import zlib
from math import ceil
from typing import TYPE_CHECKING

from werkzeug.exceptions import ClientDisconnected, RequestEntityTooLarge

from mlx_backend.api.errors import ApiError
from mlx_backend.api.image_places import IMAGE, misplaced_characters
from mlx_backend.api.json_text import decode_json
from mlx_backend.conversation.json_values import excerpt
from mlx_backend.server.received_request import TOO_MANY_BODIES
from mlx_backend.server.request_tasks import HOLD_BODY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from werkzeug import Request

_IMAGE = re.compile(b'"' + IMAGE.encode())
_REMEDY = (
    "Images count in every message, also in earlier ones: send smaller ones, or begin a new conversation."
)
_GZIP, _ZLIB, _RAW_DEFLATE = 31, 15, -15
"""What zlib calls window bits."""
_ENCODINGS = {"gzip": _GZIP, "x-gzip": _GZIP, "deflate": _ZLIB}
_PIECE = 1 << 18


def read_body(request: Request, max_bytes: int, max_images_bytes: int) -> bytes:
    """Return the body. Raises ApiError: 413 if it is larger than allowed, 400 if it is not what its head says it is.

    It may have `max_bytes` in addition to images in data URIs, and these may take `max_images_bytes`.
    """
    most = max_bytes + max_images_bytes
    request.max_content_length = most
    encoding = _encoding_of(request)
    try:
        body = request.get_data(cache=False)
        if encoding is not None:
            body = _decompressed(body, encoding, most, request.environ.get(HOLD_BODY) or (lambda _: False))
    except RequestEntityTooLarge:
        raise ApiError(
            413,
            f"The request is larger than {_words(most)}, which is this server's limit "
            f"(--max-body-mb for texts, and --max-images-mb for images). {_REMEDY}",
        ) from None
    except ClientDisconnected:
        raise ApiError(
            400, f"The body ended before its {request.content_length} bytes had arrived."
        ) from None
    if len(body) > max_bytes:
        _check_size(body, _images_in(body), max_bytes, max_images_bytes)
    return body


def check_places(body: bytes, max_bytes: int, max_images_bytes: int) -> None:
    """Raise the 413 of a body that is larger than its texts may be by images where none may stand.

    The body is decoded for it; a smaller one is not looked at.
    """
    if len(body) > max_bytes and (misplaced := misplaced_characters(decode_json(body))):
        _check_size(body, _images_in(body) - misplaced, max_bytes, max_images_bytes)


def _encoding_of(request: Request) -> str | None:
    """Return how the body is compressed, None if it is not. Raises the 415 for what is not known here."""
    written = request.headers.get("Content-Encoding", "")
    names = [name for part in written.split(",") if (name := part.strip().lower()) not in ("", "identity")]
    if not names:
        return None
    if len(names) > 1 or names[0] not in _ENCODINGS:
        raise ApiError(
            415,
            f"The body has the Content-Encoding {excerpt(written)}: send it with gzip or deflate, or as it is.",
            headers=(("Accept-Encoding", "gzip, deflate"),),
        )
    return names[0]


def _decompressed(body: bytes, encoding: str, most: int, hold: Callable[[int], bool]) -> bytes:
    """Decompress a body, and count it as held. Raises RequestEntityTooLarge as soon as it is more than allowed."""
    bits = _ENCODINGS[encoding]
    if bits == _ZLIB and (int.from_bytes(body[:2]) % 31 or not body or body[0] & 15 != 8):
        bits = _RAW_DEFLATE  # without the header that belongs to it, as several clients send it
    pieces: list[bytes] = []
    count = 0
    try:
        for piece in _inflated(body, bits):
            count += len(piece)
            if count > most:
                raise RequestEntityTooLarge
            if hold(count):
                raise ApiError(503, TOO_MANY_BODIES)
            pieces.append(piece)
    except zlib.error:
        raise ApiError(
            400, f"The body is not what its Content-Encoding says: one whole stream of {encoding}."
        ) from None
    return b"".join(pieces)


def _inflated(body: bytes, bits: int) -> Iterator[bytes]:
    """Yield what a body becomes, in pieces. Raises zlib.error unless it is one whole stream and nothing else."""
    stream = zlib.decompressobj(bits)
    for start in range(0, len(body), _PIECE):
        rest = body[start : start + _PIECE]
        while not stream.eof:
            piece = stream.decompress(rest, _PIECE)
            yield piece
            rest = stream.unconsumed_tail
            if not rest and len(piece) < _PIECE:
                break
        if stream.eof and (stream.unused_data or start + _PIECE < len(body)):
            raise zlib.error
    if not stream.eof:
        raise zlib.error


def _images_in(body: bytes) -> int:
    return sum(match.end() - match.start() for match in _IMAGE.finditer(body))


def _check_size(body: bytes, images: int, max_bytes: int, max_images_bytes: int) -> None:
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
