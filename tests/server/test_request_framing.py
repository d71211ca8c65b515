"""Where a request ends among the bytes of a connection, and what is no request."""

from __future__ import annotations

from itertools import pairwise

import pytest

from mlx_backend.server.request_framing import FramingError, RequestFraming

HEAD = b"POST /v1/x?a=%2F HTTP/1.1\r\nHost: h\r\nX-Name: a: b\r\n"
NEXT = b"GET /next HTTP/1.1\r\nHost: h\r\n\r\n"
REQUESTS = {
    "a length": (HEAD + b"Content-Length: 6\r\n\r\na\r\nb\r\n", b"Content-Length: 6\r\n\r\na\r\nb\r\n"),
    "the length of nothing": (HEAD + b"Content-Length: 0\r\n\r\n", b"\r\n"),
    "chunks": (
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n1;x=y\r\nd\r\n0\r\nTrailer: t\r\n\r\n",
        b"Content-Length: 4\r\n\r\nabcd",
    ),
    "no body": (HEAD + b"\r\n", b"\r\n"),
    "an empty line before it": (b"\r\n" + HEAD + b"\r\n", b"\r\n"),
    "a request to go on": (
        HEAD + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\nab",
        b"Content-Length: 2\r\n\r\nab",
    ),
}
TAKEN = b"POST /v1/x?a=%2F HTTP/1.1\r\nhost: h\r\nx-name: a: b\r\n"


def feed_all(framing: RequestFraming, *pieces: bytes) -> None:
    for piece in pieces:
        framing.feed(piece)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_comes_out_with_a_length_however_it_is_split(name: str) -> None:
    sent, end = REQUESTS[name]
    for cut in range(1, len(sent)):
        framing = RequestFraming(1000)
        for start, stop in pairwise((0, cut, len(sent))):
            assert not framing.is_complete
            framing.feed(sent[start:stop])
        assert framing.is_complete, cut
        assert framing.take() == TAKEN + end


@pytest.mark.parametrize("name", REQUESTS)
def test_what_follows_a_request_is_the_beginning_of_the_next(name: str) -> None:
    sent, end = REQUESTS[name]
    framing = RequestFraming(1000)
    framing.feed(sent + NEXT)
    assert framing.take() == TAKEN + end
    assert framing.rest() == NEXT


def test_a_request_that_is_not_whole_keeps_the_length_that_was_announced() -> None:
    framing = RequestFraming(1000)
    framing.feed(HEAD + b"Content-Length: 500\r\n\r\nab")
    assert not framing.is_complete
    assert framing.take().endswith(b"Content-Length: 500\r\n\r\nab")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"NONSENSE\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nBad Name: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nName : b\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
        (HEAD + b"Content-Length: -1\r\n\r\n", 400),
        (HEAD + b"Content-Length: 1, 2\r\n\r\n", 400),
        (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (HEAD + b"Content-Length: +1\r\n\r\n", 400),
        (HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", 400),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n", 400),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n", 400),
        (HEAD + b"X-Long: " + b"x" * 1000 + b"\r\n\r\n", 431),
        (b"GET /" + b"x" * 1000, 431),
        (HEAD + b"X: y\r\n" * 200, 431),
    ],
    ids=range(19),
)
def test_what_is_ambiguous_or_endless_is_refused_however_it_is_split(sent: bytes, status: int) -> None:
    for size in (1, 7, len(sent)):
        framing = RequestFraming(900)
        with pytest.raises(FramingError) as raised:
            feed_all(framing, *(sent[at : at + size] for at in range(0, len(sent), size)))
        assert raised.value.status == status
        assert "x" * 100 not in raised.value.message


def test_a_body_in_chunks_of_one_byte_is_refused_before_it_costs_much() -> None:
    framing = RequestFraming(1000)
    framing.feed(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    with pytest.raises(FramingError, match="too many chunks") as raised:
        feed_all(framing, *[b"1\r\nx\r\n"] * 10_000)
    assert raised.value.status == 400
    assert framing.body_bytes < 2000


def test_a_large_body_in_usual_chunks_is_taken() -> None:
    framing = RequestFraming(1000)
    framing.feed(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    for _ in range(3000):
        framing.feed(b"40\r\n" + b"x" * 64 + b"\r\n")
    framing.feed(b"0\r\n\r\n")
    assert framing.take().endswith(b"x" * 192_000)


def test_a_header_with_an_underscore_is_left_out_and_one_that_came_twice_is_one() -> None:
    framing = RequestFraming(1000)
    framing.feed(
        b"GET / HTTP/1.1\r\nHost: h\r\nX_Forwarded_For: 1.1.1.1\r\nX-Forwarded-For: 2.2.2.2, 3.3.3.3\r\n"
        b"X_Api_Key: k\r\nx-forwarded-for: 4.4.4.4\r\nX-Other: o\r\n\r\n"
    )
    assert framing.take() == (
        b"GET / HTTP/1.1\r\nhost: h\r\nx-other: o\r\nx-forwarded-for: 2.2.2.2, 3.3.3.3, 4.4.4.4\r\n\r\n"
    )
