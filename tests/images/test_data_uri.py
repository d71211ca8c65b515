"""Data URIs, as clients write them and as they should not."""

import base64

import pytest

from mlx_backend.images import ImageError
from mlx_backend.images.loader import decode_data_uri, is_data_uri

DATA = bytes(range(256)) * 3 + b"\xfb\xff"
TEXT = base64.b64encode(DATA).decode()
LINES = "\r\n".join(TEXT[at : at + 76] for at in range(0, len(TEXT), 76))
LIMIT = 4096


@pytest.mark.parametrize(
    "uri",
    [
        f"data:image/png;base64,{TEXT}",
        f"data:;base64,{TEXT}",
        f"DATA:image/png;charset=utf-8;name=a.png;BASE64,{TEXT}",
        f"data:text/plain;base64,{TEXT}",
        f"data:image/png;base64,{LINES}",
        f"data:image/png;base64, {TEXT.rstrip('=')}",
        f"data:image/png;base64,{TEXT.replace('+', '-').replace('/', '_')}",
        f"data:image/png;base64,{TEXT.replace('+', '%2B').replace('/', '%2F').replace('=', '%3D')}",
    ],
    ids=["plain", "no type", "parameters", "another type", "lines", "no padding", "for URLs", "escaped"],
)
def test_a_data_uri_is_read_however_its_base64_is_written(uri: str) -> None:
    assert is_data_uri(uri)
    assert decode_data_uri(uri, LIMIT) == DATA


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("data:image/png,%89PNG", "not in base64"),
        ("data:image/png;base64", "not in base64"),
        ("data:image/svg+xml;utf8,<svg/>", "not in base64"),
        ("data:image/png;base64,", "is empty"),
        ("data:image/png;base64,=", "is empty"),
        ("data:image/png;base64,A", "not base64"),
        ("data:image/png;base64,AA*A", "not base64"),
        ("data:image/png;base64,画像", "not base64"),
        ("data:image/png;base64," + "A" * (2 * LIMIT), "larger than"),
        ("data:image/png;base64," + "%41" * (2 * LIMIT), "larger than"),
        ("data:image/png;base64," + " " * (20 * LIMIT), "larger than"),
    ],
)
def test_a_data_uri_that_holds_no_bytes_is_refused_in_a_sentence(uri: str, says: str) -> None:
    with pytest.raises(ImageError, match=says):
        decode_data_uri(uri, LIMIT)


def test_a_file_of_exactly_the_limit_is_read() -> None:
    uri = "data:;base64," + base64.b64encode(bytes(LIMIT)).decode()
    assert len(decode_data_uri(uri, LIMIT)) == LIMIT
    with pytest.raises(ImageError, match=r"larger than 0\.0039"):
        decode_data_uri(uri, LIMIT - 1)
