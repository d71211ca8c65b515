"""A request's body as the server hands it over: there, with its length, and no longer than allowed."""

from __future__ import annotations

import io

import pytest
from werkzeug import Request
from werkzeug.test import EnvironBuilder

from mlx_backend.api.errors import ApiError
from mlx_backend.server.handlers import read_body


def request(body: bytes, length: int | None = None) -> Request:
    environ = EnvironBuilder(method="POST").get_environ()
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
