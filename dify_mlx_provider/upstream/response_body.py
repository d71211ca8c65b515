"""The bytes of a response's body as they arrive, unpacked in pieces of bounded size. Knows nothing of what is in it."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from urllib3.exceptions import DecodeError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from requests import Response

PIECE_BYTES = 65_536

_ZLIB_OR_GZIP = 32 + zlib.MAX_WBITS


def iter_body(response: Response) -> Iterator[bytes]:
    """Yield the body as it arrives; requests would wait for the end of a body of known size.

    One layer of gzip or deflate is unpacked, `PIECE_BYTES` at a time: urllib3 would unpack any number of layers, and a
    few kilobytes then become gigabytes. Raises urllib3's DecodeError for what is packed otherwise, or badly.
    """
    packed = _received(response)
    encodings = [name.strip().lower() for name in (response.headers.get("Content-Encoding") or "").split(",")]
    encodings = [name for name in encodings if name not in ("", "identity")]
    if not encodings:
        yield from packed
        return
    if len(encodings) > 1 or encodings[0] not in ("gzip", "x-gzip", "deflate"):
        raise DecodeError(f"a body packed as {', '.join(encodings)[:100]}")
    yield from _unpacked(packed)


def _received(response: Response) -> Iterator[bytes]:
    while piece := response.raw.read1(PIECE_BYTES, decode_content=False):
        yield piece


def _unpacked(pieces: Iterator[bytes]) -> Iterator[bytes]:
    unpacker = zlib.decompressobj(_ZLIB_OR_GZIP)
    try:
        for received in pieces:
            rest = received
            while rest:
                if unpacker.eof:  # gzip allows one member after another
                    unpacker = zlib.decompressobj(_ZLIB_OR_GZIP)
                if piece := unpacker.decompress(rest, PIECE_BYTES):
                    yield piece
                rest = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail
    except zlib.error as error:
        raise DecodeError(str(error)) from error
    if not unpacker.eof:
        raise DecodeError("a packed body without its end")
