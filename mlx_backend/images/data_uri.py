"""Data URIs (RFC 2397) that hold an image in base64. The media type they state is ignored: the content tells."""

from __future__ import annotations

import base64
import binascii
import re
from urllib.parse import unquote_to_bytes

from mlx_backend.images import ImageError, too_many_bytes

_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_BLANKS = re.compile(rb"\s+")


def is_data_uri(text: str) -> bool:
    """Whether a text begins as a data URI does."""
    return text[:5].lower() == "data:"


def decode_data_uri(uri: str, max_bytes: int) -> bytes:
    """Return the bytes of a data URI. Raises ImageError.

    Clients break lines, leave the padding out, escape characters and use the alphabet for URLs: all of that is read.
    """
    header, comma, body = uri.partition(",")
    if not comma or "base64" not in [each.strip().lower() for each in header.split(";")[1:]]:
        raise ImageError(
            "The image's data URI is not in base64. Write it as data:image/png;base64, and the encoded file."
        )
    if len(body) > 3 * (max_bytes + 3):  # each byte escaped, at the worst
        raise too_many_bytes(max_bytes)
    try:
        encoded = body.encode("ascii")
    except UnicodeEncodeError:
        raise _not_base64() from None
    if b"%" in encoded:
        encoded = unquote_to_bytes(encoded)
    encoded = _BLANKS.sub(b"", encoded).translate(_URL_SAFE).rstrip(b"=")
    if len(encoded) * 3 // 4 > max_bytes:
        raise too_many_bytes(max_bytes)
    try:
        data = base64.b64decode(encoded + b"=" * (-len(encoded) % 4), validate=True)
    except binascii.Error:
        raise _not_base64() from None
    if not data:
        raise ImageError("The image is empty: its data URI holds nothing after the comma.")
    return data


def _not_base64() -> ImageError:
    return ImageError(
        "The image's data URI holds characters that are not base64. Encode the file's bytes again."
    )
