"""Reasoning as an opaque text that clients send back: `encrypted_content` of one API, `signature` of another.

    seal(reasoning) ─▶ "mlx1." + base64(SHA-256 of what follows, cut, and the compressed text)

It hides nothing, since the client was sent the reasoning anyway or asked not to be: it is for telling our own texts
from others', and survives a restart of the server. Knows no API.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib

_PREFIX = "mlx1."
_DIGEST_BYTES = 12
MAX_CHARACTERS = 4_000_000
"""What is opened at most: a few bytes can be written that unpack to gigabytes."""


class NotSealedHere(ValueError):
    """A text that `seal` did not make, or that was changed or cut on its way."""


def seal(reasoning: str) -> str:
    """Return the opaque text of some reasoning: letters, digits and punctuation that need no quoting."""
    packed = zlib.compress(reasoning.encode("utf-8", "replace"), 1)
    return _PREFIX + base64.urlsafe_b64encode(_digest(packed) + packed).decode()


def unseal(sealed: str) -> str:
    """Return the reasoning. Raises NotSealedHere."""
    try:
        data = base64.b64decode(sealed.removeprefix(_PREFIX), altchars=b"-_", validate=True)
        digest, packed = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if not sealed.startswith(_PREFIX) or digest != _digest(packed):
            raise NotSealedHere
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(packed, 4 * MAX_CHARACTERS)
        if not unpacker.eof:
            raise NotSealedHere
        return text.decode()
    except (binascii.Error, zlib.error, UnicodeDecodeError, ValueError) as error:
        raise NotSealedHere from error


def _digest(packed: bytes) -> bytes:
    return hashlib.sha256(b"mlx-backend reasoning" + packed).digest()[:_DIGEST_BYTES]
