"""The images of a request, from what it names to pictures, and the sentences for those that cannot be used."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import TYPE_CHECKING

import pytest
from picture_files import data_uri, png, png_claiming
from picture_site import PictureSite, found, moved

from mlx_backend.errors import RequestError
from mlx_backend.images import Detail, ImageSource, Picture
from mlx_backend.images.decode import BYTES_PER_PIXEL
from mlx_backend.images.fetch import AllowedAddresses, ImageFetcher
from mlx_backend.images.loader import (
    COPIES,
    MAX_FETCHED_FROM_HOST,
    MAX_FETCHED_OF_CLIENT,
    ImageLimits,
    ImageLoader,
)
from mlx_backend.preparation import Preparation

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Sequence


def source(data: bytes, at: int = 0, detail: Detail = Detail.AUTO) -> ImageSource:
    return ImageSource(where=f"messages[0].content[{at}]", url=data_uri(data), detail=detail)


def loaded(loader: ImageLoader, sources: Sequence[ImageSource]) -> list[Picture]:
    return list(loader.load(sources))


def test_pictures_come_in_the_order_in_which_they_are_named() -> None:
    with PictureSite({"/a.png": found(png(16, 8))}) as site:
        loader = ImageLoader(ImageLimits(allow_urls=True, hosts=("127.0.0.1",)))
        pictures = loaded(
            loader,
            [
                source(png(8, 4)),
                ImageSource(where="messages[1].content[0]", url=site.url()),
                source(png(12, 4), 1),
            ],
        )
    assert [picture.width for picture in pictures] == [8, 16, 12]


def test_the_log_says_what_a_model_is_shown_and_not_where_it_came_from(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "mlx_backend.images")
    loaded(ImageLoader(ImageLimits()), [source(png(2000, 1000), 3, Detail.LOW)])
    assert caplog.messages == [
        "messages[0].content[3]: a PNG image of 2000 x 1000 pixels, detail low: shown as 724 x 362."
    ]


def test_the_error_names_the_part_and_says_which_of_several_images_it_is() -> None:
    loader = ImageLoader(ImageLimits())
    with pytest.raises(RequestError) as alone:
        loaded(loader, [source(b"%PDF")])
    with pytest.raises(RequestError) as second:
        loaded(loader, [source(png()), source(b"%PDF", 7), source(png())])
    assert str(alone.value).startswith("The image's file is a PDF")
    assert str(second.value).startswith("Image 2 of 3: The image's file is a PDF")
    assert (second.value.param, second.value.code) == ("messages[0].content[7]", "unsupported_image_format")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("file:///etc/passwd", "'file:///etc/passwd'"),
        ("C:\\pictures\\a.png", "'C:\\\\pictures\\\\a.png'"),
        ("iVBORw0KGgo" * 1000, "'iVBORw0KGgoiVBORw0KGgoiVBORw0KGgoiVBORw0…'"),
        ("", "''"),
    ],
)
@pytest.mark.parametrize("allow_urls", [False, True])
def test_what_is_neither_a_data_uri_nor_an_address_is_refused_with_its_beginning(
    url: str, shown: str, allow_urls: bool
) -> None:
    with pytest.raises(RequestError) as raised:
        loaded(ImageLoader(ImageLimits(allow_urls=allow_urls)), [ImageSource(where="", url=url)])
    assert str(raised.value).startswith(f"{shown} is neither a data URI nor an http or https address.")
    assert raised.value.code == "image_url_refused"


@pytest.mark.parametrize("url", ["http://127.0.0.1/a.png", "HTTPS://example.com/a.png"])
def test_addresses_are_not_fetched_from_unless_that_is_allowed(url: str) -> None:
    with pytest.raises(RequestError, match="--allow-image-urls") as raised:
        loaded(ImageLoader(ImageLimits()), [ImageSource(where="messages[0].content[0]", url=url)])
    assert raised.value.code == "image_url_refused"


def test_with_addresses_allowed_this_machine_still_is_not() -> None:
    with PictureSite({"/a.png": moved("file:///etc/passwd")}) as site:
        loader = ImageLoader(ImageLimits(allow_urls=True))
        for host in ("127.0.0.1", "localhost"):
            with pytest.raises(RequestError, match="private network"):
                loaded(loader, [ImageSource(where="messages[0].content[0]", url=site.url(host=host))])
        assert site.connections == 0


@pytest.mark.parametrize(
    ("limits", "sources", "says", "code"),
    [
        (
            ImageLimits(max_images=2),
            [source(png())] * 3,
            "3 images; this server takes at most 2",
            "too_many_images",
        ),
        (
            ImageLimits(),
            [ImageSource(where="messages[0].content[0]", url="data:image/svg+xml;utf8,<svg/>")],
            "not in base64",
            "invalid_image",
        ),
        (ImageLimits(max_bytes=50), [source(png())], "larger than", "image_too_large"),
        (ImageLimits(max_pixels=31), [source(png())], "8 x 4 pixels", "image_too_large"),
        (ImageLimits(), [source(png_claiming(10_000, 10_000))], "100 million", "image_too_large"),
    ],
)
def test_each_limit_is_said_with_its_value(
    limits: ImageLimits, sources: list[ImageSource], says: str, code: str
) -> None:
    with pytest.raises(RequestError, match=says) as raised:
        loaded(ImageLoader(limits), sources)
    assert raised.value.code == code


def test_pictures_wait_for_the_memory_that_decoding_them_takes() -> None:
    size = 8 * 4 * 3 * COPIES
    loader = ImageLoader(ImageLimits(), decoding_bytes=2 * size)
    with ExitStack() as held:
        held.enter_context(loader._reserve(size))
        assert loaded(loader, [source(png())])  # there is room for one more
        held.enter_context(loader._reserve(1))
        with Preparation(0.1).running(), pytest.raises(RequestError, match="took longer than"):
            loaded(loader, [source(png())])
        waiting = threading.Thread(target=loaded, args=(loader, [source(png())]))
        waiting.start()
    waiting.join()


def test_a_picture_that_takes_more_memory_than_there_is_at_once_is_decoded_alone() -> None:
    loader = ImageLoader(ImageLimits(), decoding_bytes=10)
    assert loaded(loader, [source(png()), source(png())])
    with (
        loader._reserve(1),
        Preparation(0.1).running(),
        pytest.raises(RequestError, match="took longer than"),
    ):
        loaded(loader, [source(png())])


def test_a_picture_is_loaded_when_the_one_before_has_been_used_and_its_memory_is_free() -> None:
    loader = ImageLoader(ImageLimits(), decoding_bytes=16 * 16 * BYTES_PER_PIXEL)
    with closing(loader.load([source(png(16, 16)), source(b"broken")])) as pictures:
        assert next(pictures).width == 16
        with Preparation(0.1).running(), pytest.raises(RequestError, match="took longer than"):
            loaded(loader, [source(png(16, 16))])
        with pytest.raises(RequestError, match="Image 2 of 2"):
            next(pictures)
    assert loaded(loader, [source(png(16, 16))])


def test_others_are_prepared_while_a_request_waits_for_a_fetch_and_not_while_it_decodes() -> None:
    events: list[str] = []

    @contextmanager
    def without_turn() -> Iterator[None]:
        events.append("others have the turn")
        yield
        events.append("it has the turn")

    def answer(connection: socket.socket) -> None:
        events.append("fetched")
        connection.sendall(found(png()))

    limits = ImageLimits(allow_urls=True, hosts=("127.0.0.1",))
    with PictureSite({"/a.png": answer}) as site, Preparation(60).running(without_turn):
        assert loaded(ImageLoader(limits), [ImageSource(where="here", url=site.url()), source(png())])
    assert events == ["others have the turn", "fetched", "it has the turn"]


def test_addresses_that_never_answer_hold_up_no_other_client_and_no_other_host() -> None:
    asked, is_over = threading.Semaphore(0), threading.Event()

    def never(_connection: socket.socket) -> None:
        asked.release()
        is_over.wait(60)

    hosts = ("127.0.0.1", "localhost")
    loader = ImageLoader(ImageLimits(allow_urls=True, hosts=hosts, seconds=60))

    def load(url: str, client: str) -> None:
        with suppress(RequestError), Preparation(60, client).running():
            loaded(loader, [ImageSource(where="here", url=url)])

    with PictureSite({"/never.png": never, "/a.png": found(png())}) as site:
        dead, good = site.url("/never.png"), site.url("/a.png")
        elsewhere = good.replace("127.0.0.1", "localhost")
        with ThreadPoolExecutor(40) as clients:
            try:
                for number in range(20):
                    clients.submit(load, dead, f"client {number % 2}")
                for _ in range(MAX_FETCHED_FROM_HOST):
                    assert asked.acquire(timeout=60)
                with Preparation(60, "another").running():  # the dead host's others wait, and hold up nobody
                    assert loaded(loader, [ImageSource(where="here", url=elsewhere)])
                assert not asked.acquire(blocking=False)
            finally:
                is_over.set()


def test_one_client_has_some_of_the_fetches_whatever_hosts_it_names() -> None:
    asked, is_over = threading.Semaphore(0), threading.Event()

    class Fetcher(ImageFetcher):
        def fetch(self, url: str) -> bytes:
            if "never" in url:
                asked.release()
                is_over.wait(60)
            return png()

    loader = ImageLoader(
        ImageLimits(allow_urls=True), fetcher=Fetcher(AllowedAddresses(), max_bytes=1, seconds=1)
    )

    def load(url: str, client: str) -> list[Picture]:
        with Preparation(60, client).running():
            return loaded(loader, [ImageSource(where="here", url=url)])

    with ThreadPoolExecutor(40) as clients:
        try:
            for number in range(40):
                clients.submit(load, f"http://never{number}.test/a.png", "one")
            for _ in range(MAX_FETCHED_OF_CLIENT):
                assert asked.acquire(timeout=60)
            assert load("http://pictures.test/a.png", "another")
            assert not asked.acquire(blocking=False)
        finally:
            is_over.set()
