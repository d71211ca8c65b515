"""From the images that a request names to pictures: fetched, decoded and shrunk within the server's limits.

Runs on the thread that prepares the request, one image after the other, so that a request never has more than one in
memory here. All requests together have at most `DECODING_BYTES` for that; who needs more of it waits for a slot. While
a request waits for a fetch, others are prepared.
"""

from __future__ import annotations

import base64
import binascii
import logging
import re
import sys
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes, urlsplit

from mlx_backend.errors import RequestError
from mlx_backend.images import ImageError, too_many_bytes
from mlx_backend.images.decode import decode
from mlx_backend.images.fetch import AllowedAddresses, ImageFetcher
from mlx_backend.preparation import Slots, current

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence
    from contextlib import AbstractContextManager

    from mlx_backend.images import ImageSource, Picture

log = logging.getLogger(__name__)

DECODING_BYTES = 1 << 30
MAX_FETCHED, MAX_FETCHED_OF_CLIENT, MAX_FETCHED_FROM_HOST = 8, 4, 4
"""Files that are fetched, or were and are being decoded, at the same time: altogether, for one client, from one host.

So addresses that never answer hold up who asks for them, and who else asks the same host.
"""
SHOWN_CHARACTERS = 40
"""Characters that an error repeats of what is no address."""
COPIES = 26
"""Bytes for each byte of a picture, while a model's processor makes floats of it: Qwen's took 22 to 26, others less."""
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_BLANKS = re.compile(rb"\s+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """What images a server accepts. `hosts` are those that may be in private networks (fetch.py)."""

    allow_urls: bool = False
    hosts: tuple[str, ...] = ()
    max_images: int = 32
    max_bytes: int = 20 << 20
    max_pixels: int = 50_000_000
    seconds: float = 10.0


class ImageLoader:
    """Loads the images of one server's requests. Safe to use from any thread."""

    def __init__(
        self,
        limits: ImageLimits,
        *,
        fetcher: ImageFetcher | None = None,
        decoding_bytes: int = DECODING_BYTES,
    ) -> None:
        self._limits = limits
        self._fetcher = fetcher or ImageFetcher(
            AllowedAddresses(limits.hosts), max_bytes=limits.max_bytes, seconds=limits.seconds
        )
        self._fetching = Slots(MAX_FETCHED, max_of_client=MAX_FETCHED_OF_CLIENT)
        self._hosts = Slots(sys.maxsize, max_of_client=MAX_FETCHED_FROM_HOST)
        self._decoding = Slots(decoding_bytes)

    @property
    def max_images(self) -> int:
        """How many images a request may have."""
        return self._limits.max_images

    def load(self, sources: Sequence[ImageSource]) -> Generator[Picture]:
        """Yield the pictures, in the order of their sources. Raises RequestError naming the part that is wrong.

        Each is to be used before the next is asked for: until then its memory is counted.
        """
        if len(sources) > self._limits.max_images:
            raise RequestError(
                f"The request has {len(sources)} images; this server takes at most {self._limits.max_images} in one "
                "request. Send fewer.",
                "messages",
                "too_many_images",
            )
        for number, source in enumerate(sources, 1):
            current().check()
            try:
                picture = self._load(source)
            except ImageError as error:
                text = f"Image {number} of {len(sources)}: {error}" if len(sources) > 1 else str(error)
                raise RequestError(text, source.where, error.code) from error
            with self._reserve(COPIES * len(picture.rgb)):
                yield picture
            del picture

    def _load(self, source: ImageSource) -> Picture:
        if is_data_uri(source.url):
            return self._decoded(source, decode_data_uri(source.url, self._limits.max_bytes))
        with ExitStack() as stack:
            with current().waiting(), _slot_for(self._hosts, _host_of(source.url)):
                # Until it is decoded: the file takes memory.
                stack.enter_context(_slot_for(self._fetching, current().client))
                data = self._fetch(source.url)
            return self._decoded(source, data)

    def _decoded(self, source: ImageSource, data: bytes) -> Picture:
        picture, format_name, (width, height) = decode(
            data, source.detail, max_pixels=self._limits.max_pixels, reserve=self._reserve
        )
        log.info(
            "%s: a %s image of %d x %d pixels, detail %s: shown as %d x %d.",
            *(source.where, format_name, width, height, source.detail, picture.width, picture.height),
        )
        return picture

    def _fetch(self, url: str) -> bytes:
        # A file's path, say, or Base64 without what goes before it.
        if not url.lower().startswith(("http:", "https:")):
            raise ImageError(
                f"{_beginning(url)!r} is neither a data URI nor an http or https address. Send the image itself, as a "
                "data URI: data:image/png;base64,…",
                "image_url_refused",
            )
        if not self._limits.allow_urls:
            raise ImageError(
                "This server fetches no images from addresses. Send the image itself, as a data URI; the server's "
                "operator can allow addresses with --allow-image-urls.",
                "image_url_refused",
            )
        return self._fetcher.fetch(url)

    def _reserve(self, nbytes: int) -> AbstractContextManager[None]:
        return _slot_for(self._decoding, amount=nbytes)


# -- data URIs (RFC 2397); the media type that they state is ignored: the content tells -------------------------


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


def _beginning(url: str) -> str:
    return url if len(url) <= SHOWN_CHARACTERS else url[:SHOWN_CHARACTERS] + "…"


def _host_of(url: str) -> str:
    with suppress(ValueError):
        return urlsplit(url).hostname or ""
    return ""


@contextmanager
def _slot_for(slots: Slots, client: str = "", amount: int = 1) -> Iterator[None]:
    preparation = current()
    with slots.slot_for(preparation, preparation.seconds_left, client, amount) as has_slot:
        preparation.check()
        assert has_slot  # without one, there is no time left, and the line above has raised
        yield
