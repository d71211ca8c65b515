"""A request's body: whole, and no longer than allowed."""

from __future__ import annotations

import io
from typing import Any

import pytest
from werkzeug import Request
from werkzeug.test import EnvironBuilder

from mlx_backend.api.errors import ApiError
from mlx_backend.server.request_body import read_body


def request(stream: Any, length: int | None) -> Request:
    """A request as the server hands it over; without a length its body comes in chunks."""
    environ = EnvironBuilder(method="POST").get_environ()
    environ["wsgi.input"] = stream
    if length is None:
        environ |= {"HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input_terminated": True}
    else:
        environ["CONTENT_LENGTH"] = str(length)
    return Request(environ)


class Failing(io.RawIOBase):
    """Some bytes, and then a failure."""

    def __init__(self, data: bytes, failure: Exception) -> None:
        self._data = data
        self._failure = failure

    def read(self, _size: int = -1) -> bytes:
        if not self._data:
            raise self._failure
        data, self._data = self._data, b""
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read()
        buffer[: len(data)] = data
        return len(data)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [0, 1, 99, 100])
def test_a_body_up_to_the_limit_is_read_whole(size: int, chunked: bool) -> None:
    body = b"x" * size
    assert read_body(request(io.BytesIO(body), None if chunked else size), 100) == body


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [101, 1000])
def test_a_longer_one_is_refused(size: int, chunked: bool) -> None:
    with pytest.raises(ApiError, match="larger than 100 bytes") as raised:
        read_body(request(io.BytesIO(b"x" * size), None if chunked else size), 100)
    assert raised.value.status == 413


def test_a_body_that_ends_before_its_length_is_refused() -> None:
    with pytest.raises(ApiError, match="before its 50 bytes") as raised:
        read_body(request(io.BytesIO(b"x" * 49), 50), 100)
    assert raised.value.status == 400


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("failure", [OSError("reset"), ValueError("bad chunk")])
def test_a_body_that_cannot_be_read_closes_the_connection(failure: Exception, chunked: bool) -> None:
    with pytest.raises(ApiError) as raised:
        read_body(request(Failing(b"xx", failure), None if chunked else 50), 100)
    assert raised.value.status == 400
    assert raised.value.headers == (("Connection", "close"),)


def test_no_body_at_all_is_an_empty_one() -> None:
    environ = EnvironBuilder(method="POST").get_environ()
    assert read_body(Request(environ), 100) == b""
