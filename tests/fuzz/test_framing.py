"""Bytes of a connection and of a server's answer: the same however they are split, and never more than a refusal."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import pairwise
from typing import Any

from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from dify_mlx_provider.upstream.sse import DONE, MalformedBody, iter_events, parse_body
from mlx_backend.server.request_framing import FramingError, RequestFraming

HEADS = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *(b"POST / HTTP/1.1\r\n", b"GET /v1 HTTP/1.0\r\n", b"Host: h\r\n", b"\r\n", b"\n", b"\r"),
                *(
                    b"Content-Length: 5\r\n",
                    b"Content-Length: -1\r\n",
                    b"Content-Length: 5, 5\r\n",
                    b"Content-Length",
                ),
                *(
                    b"Transfer-Encoding: chunked\r\n",
                    b"Transfer-Encoding: gzip\r\n",
                    b"5\r\nabcde\r\n",
                    b"0\r\n\r\n",
                ),
                *(
                    b"ffffffffffffffff\r\n",
                    b"5;x=y\r\n",
                    b"Expect: 100-continue\r\n",
                    b"X: \x00\r\n",
                    b" : \r\n",
                    b"abcde",
                ),
                *(
                    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                    b"\x16\x03\x01",
                    b"Connection: close\r\n",
                    b"Host: h, i\r\n",
                ),
            ]
        ),
        st.binary(max_size=6),
    ),
    max_size=12,
).map(b"".join)


def taken(parts: list[bytes]) -> tuple[Any, ...]:
    """What comes of a connection: refused, incomplete, or a request and what follows it."""
    framing = RequestFraming(2000)
    try:
        for part in parts:
            framing.feed(part)
            if framing.is_complete:  # what follows belongs to the next request
                break
    except FramingError:
        return ("refused",)
    if not framing.is_complete:
        return ("incomplete",)
    return (framing.take(),)


@examples(20)
@given(data=HEADS, cuts=st.lists(st.integers(0, 200), max_size=4))
def test_a_request_is_the_same_however_it_is_split(data: bytes, cuts: list[int]) -> None:
    places = sorted(min(cut, len(data)) for cut in cuts)
    whole = taken([data])
    split = taken([data[start:end] for start, end in pairwise([0, *places, len(data)])])
    # What follows a complete request may be broken, and is only looked at together with it.
    assert split == whole or (whole == ("refused",) and isinstance(split[0], bytes))


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=6)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


def events(pieces: list[bytes]) -> list[Any]:
    found: list[Any] = []
    try:
        found.extend(iter_events(pieces))
    except MalformedBody:
        found.append("malformed")
    return found


@examples(3)
@given(
    values=st.lists(JSON, max_size=5),
    end=st.sampled_from(["\n\n", "\r\n\r\n", "\r\r", "\n: a comment\n\n", "\nevent: x\nid: 5\n\n"]),
    begin=st.sampled_from(["data:", "data: ", ": hello\n\ndata: ", "\ufeffdata: "]),
    cuts=st.lists(st.integers(0, 500), max_size=6),
)
def test_events_that_are_well_formed_are_read_whatever_ends_their_lines(
    values: list[Any], end: str, begin: str, cuts: list[int]
) -> None:
    texts = [json.dumps(value, ensure_ascii=at % 2 == 0) for at, value in enumerate(values)]
    body = "".join(
        begin.lstrip("\ufeff" if at else "") + text + end for at, text in enumerate([*texts, "[DONE]"])
    )
    data = body.encode("utf-8", "replace")
    places = sorted(min(cut, len(data)) for cut in cuts)
    parts = [data[start:stop] for start, stop in pairwise([0, *places, len(data)])]
    expected = [json.loads(text.encode("utf-8", "replace")) for text in texts]
    assert events([data]) == events(parts) == [*expected, DONE]


@examples(5)
@given(
    lines=st.lists(
        st.one_of(
            st.binary(max_size=8),
            st.sampled_from(
                [
                    b"data: ",
                    b"data: {",
                    b"}",
                    b"\n",
                    b"\r",
                    b"[DONE]",
                    b"data: [DONE]\n\n",
                    b'{"a":',
                    b"1}",
                    b":\n",
                ]
            ),
        ),
        max_size=12,
    )
)
def test_any_bytes_are_events_or_malformed_and_the_same_a_byte_at_a_time(lines: list[bytes]) -> None:
    data = b"".join(lines)
    assert events([data]) == events([bytes([byte]) for byte in data])
    with suppress(MalformedBody):
        parse_body([data])
