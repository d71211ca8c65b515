"""A request's body as the server hands it over: there, with its length, and no longer than allowed."""

from __future__ import annotations

import gzip
import io
import random
import tracemalloc
import zlib
from typing import Any

import pytest
from werkzeug import Request
from werkzeug.test import EnvironBuilder

from mlx_backend.api.errors import ApiError
from mlx_backend.server.request_body import read_body
from mlx_backend.server.request_tasks import HOLD_BODY


def request(body: bytes, length: int | None = None, encoding: str = "") -> Request:
    environ = EnvironBuilder(method="POST", headers=[("Content-Encoding", encoding)]).get_environ()
    environ["wsgi.input"] = io.BytesIO(body)
    environ["CONTENT_LENGTH"] = str(len(body) if length is None else length)
    return Request(environ)


@pytest.mark.parametrize("size", [0, 1, 59, 60])
def test_a_body_up_to_the_limit_is_read_whole(size: int) -> None:
    assert read_body(request(b"x" * size), 60, 40) == b"x" * size


@pytest.mark.parametrize("size", [61, 100])
def test_what_is_no_image_has_no_part_in_what_images_may_take(size: int) -> None:
    with pytest.raises(ApiError, match="larger than 60 bytes without its images") as raised:
        read_body(request(b"x" * size), 60, 40)
    assert raised.value.status == 413


@pytest.mark.parametrize("size", [101, 1000])
@pytest.mark.parametrize("arrived", [True, False])
def test_a_longer_one_is_refused_by_its_length(size: int, arrived: bool) -> None:
    with pytest.raises(ApiError, match="larger than 100 bytes") as raised:
        read_body(request(b"x" * size if arrived else b"", size), 60, 40)
    assert raised.value.status == 413


def test_a_body_that_ends_before_its_length_is_refused() -> None:
    with pytest.raises(ApiError, match="before its 50 bytes") as raised:
        read_body(request(b"x" * 49, 50), 60, 40)
    assert raised.value.status == 400


def test_no_body_at_all_is_an_empty_one() -> None:
    environ = EnvironBuilder(method="POST").get_environ()
    assert read_body(Request(environ), 60, 40) == b""


# -- compressed ---------------------------------------------------------------------------------------------


def raw_deflate(body: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(body) + stream.flush()


COMPRESSED = [
    ("gzip", gzip.compress),
    ("x-gzip", gzip.compress),
    (" GZip , identity", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", raw_deflate),
    ("identity", bytes),
]
MOST = 3 << 20


@pytest.mark.parametrize(("encoding", "compress"), COMPRESSED)
@pytest.mark.parametrize("size", [1, 1000, 1 << 18, (1 << 18) + 1, 1 << 20])
def test_a_compressed_body_is_what_it_was(encoding: str, compress: Any, size: int) -> None:
    for body in (b"a" * size, random.Random(size).randbytes(size)):
        sent = compress(body)
        assert read_body(request(sent, encoding=encoding), MOST, 4096) == body


def test_the_limits_hold_for_what_it_becomes_and_no_more_than_that_is_made() -> None:
    bomb = gzip.compress(bytes(300 << 20), 9)
    assert len(bomb) < MOST
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match=r"larger than 4 MB.*--max-body-mb") as raised:
            read_body(request(bomb, encoding="gzip"), MOST, 1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert raised.value.status == 413
    with pytest.raises(ApiError, match="without its images"):
        read_body(request(gzip.compress(b"x" * 61), encoding="gzip"), 60, 40)


WHOLE = gzip.compress(b'{"messages": []}' * 99)


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", WHOLE[:-1], WHOLE[:20], WHOLE[:-6] + b"......", WHOLE + b"x", WHOLE * 2],
    ids=range(7),
)
def test_a_broken_one_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError, match="one whole stream of gzip") as raised:
        read_body(request(body, encoding="gzip"), 6000, 0)
    assert raised.value.status == 400


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "gzip\u00e9"])
def test_another_encoding_is_refused_with_those_that_are_known(encoding: str) -> None:
    with pytest.raises(ApiError, match="gzip or deflate, or as it is") as raised:
        read_body(request(b"...", encoding=encoding), 60, 0)
    assert (raised.value.status, raised.value.headers) == (415, (("Accept-Encoding", "gzip, deflate"),))


def test_what_a_body_becomes_counts_as_held_and_too_much_of_it_is_a_503() -> None:
    held: list[int] = []

    def hold(count: int) -> bool:
        held.append(count)
        return count > 700_000

    sent = request(gzip.compress(bytes(1 << 20)), encoding="gzip")
    sent.environ[HOLD_BODY] = hold
    with pytest.raises(ApiError, match="at once") as raised:
        read_body(sent, MOST, 0)
    assert raised.value.status == 503
    assert held == sorted(held)
    assert 700_000 < held[-1] <= 1 << 20
