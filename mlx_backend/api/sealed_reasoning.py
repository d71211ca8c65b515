"""Reasoning as an opaque text that clients send back: `encrypted_content` of one API, `signature` of another.

    seal(reasoning) ─▶ "mlx1." + base64(SHA-256 of what follows, cut, and the compressed text)
    sign(reasoning) ─▶ "mlx2." + base64(SHA-256 of the text, cut), for a text that goes along with it

It hides nothing, since the client was sent the reasoning anyway or asked not to be: it is for telling our own texts
from others', and survives a restart of the server. Knows no API.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib

_SEALED, _SIGNED = "mlx1.", "mlx2."
_DIGEST_BYTES = 12
MAX_CHARACTERS = 4_000_000
"""What is opened at most: a few bytes can be written that unpack to gigabytes."""


class NotSealedHere(ValueError):
    """A text that was not made here, or that was changed or cut on its way."""


def seal(reasoning: str) -> str:
    """Return the opaque text of some reasoning: letters, digits and punctuation that need no quoting."""
    packed = zlib.compress(_bytes(reasoning), 1)
    return _SEALED + _written(_digest(packed) + packed)


def sign(reasoning: str) -> str:
    """Return the signature of some reasoning."""
    return _SIGNED + _written(_digest(_bytes(reasoning)))


def unseal(sealed: str, text: str = "") -> str:
    """Return the reasoning that was sealed, or the text that was signed. Raises NotSealedHere."""
    if sealed.startswith(_SIGNED):
        if sealed != sign(text):
            raise NotSealedHere
        return text
    try:
        data = base64.b64decode(sealed.removeprefix(_SEALED), altchars=b"-_", validate=True)
        digest, packed = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if not sealed.startswith(_SEALED) or digest != _digest(packed):
            raise NotSealedHere
        unpacker = zlib.decompressobj()
        opened = unpacker.decompress(packed, 4 * MAX_CHARACTERS)
        if not unpacker.eof:
            raise NotSealedHere
        return opened.decode()
    except (binascii.Error, zlib.error, UnicodeDecodeError, ValueError) as error:
        raise NotSealedHere from error


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _written(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode()


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(b"mlx-backend reasoning" + data).digest()[:_DIGEST_BYTES]
