"""The HTTP client against a server that sends any bytes, or none."""

from __future__ import annotations

import gzip
import json
import time
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import gevent
import pytest
from raw_server import DONE, JSON, STREAM, RawServer, event, status

from dify_mlx_provider.upstream import client, sse
from dify_mlx_provider.upstream.client import MAX_RETRY_WAIT, OpenAIClient
from dify_mlx_provider.upstream.credentials import Credentials
from dify_mlx_provider.upstream.errors import (
    KeyRefused,
    Overloaded,
    Refused,
    ServerError,
    Unavailable,
    Unreachable,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

HI = event({"content": "Hi"})


def chat(*pieces: bytes | None, timeout: float = 60.0) -> list[dict[str, Any]]:
    """The chunks the client returns for one answer."""
    with RawServer(list(pieces)) as server:
        return list(OpenAIClient(Credentials(base_url=server.address, timeout=timeout)).chat({}))


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"] or ()
    )


# -- cancelling -----------------------------------------------------------------------------------------


def test_closing_the_iterator_closes_the_connection() -> None:
    with RawServer([STREAM, HI, None]) as server:
        chunks = OpenAIClient(Credentials(base_url=server.address)).chat({})
        assert next(iter(chunks))["choices"][0]["delta"] == {"content": "Hi"}
        assert not server.left.is_set()
        chunks.close()
        assert server.left.wait(60)


ENDLESS_HEADS = {
    "headers": b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: a\r\n" % at for at in range(20_000)),
    "one header": b"HTTP/1.1 200 OK\r\nX: " + b"a" * 1_000_000,
    "100 Continue": b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000,
    "a status line": b"H" * 1_000_000,
    "blank lines": b"\r\n" * 500_000,
}


@pytest.mark.parametrize("head", ENDLESS_HEADS.values(), ids=ENDLESS_HEADS)
def test_a_head_that_does_not_end_is_no_server_of_ours(head: bytes) -> None:
    with pytest.raises(Refused, match="is not an OpenAI-compatible server"):
        chat(head, None)


def test_a_head_that_comes_too_slowly_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_HEAD_SECONDS", -1.0)
    with pytest.raises(Refused, match="is not an OpenAI-compatible server"):
        chat(STREAM[:40], None)


CHUNKED = JSON.replace(b"Connection", b"Transfer-Encoding: chunked\r\nConnection")


def test_trailers_that_do_not_end_are_abandoned() -> None:
    with pytest.raises(Unavailable, match="broke off"):
        chat(CHUNKED + b"2\r\n{}\r\n0\r\n" + b"a: b\r\n" * 50_000, None)


def test_the_size_of_a_chunk_that_comes_too_slowly_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with RawServer([CHUNKED, b"0", None]) as server:
        chunks = OpenAIClient(Credentials(base_url=server.address)).chat({})
        monkeypatch.setattr(client, "MAX_HEAD_SECONDS", -1.0)
        with pytest.raises(Unavailable, match="broke off"):
            list(chunks)


def test_a_server_may_be_silent_between_its_head_and_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    answer = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (HI, DONE))
    with RawServer(
        [STREAM.replace(b"Connection", b"Transfer-Encoding: chunked\r\nConnection"), answer]
    ) as server:
        chunks = OpenAIClient(Credentials(base_url=server.address)).chat({})
        now[0] = 100.0
        assert text_of(list(chunks)) == "Hi"


def test_many_small_chunks_are_no_endless_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_HEAD_BYTES", 200)
    stream = STREAM.replace(b"Connection", b"Transfer-Encoding: chunked\r\nConnection")
    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in HI + DONE)
    assert text_of(chat(stream + pieces + b"0\r\n\r\n")) == "Hi"


def test_a_server_may_say_continue_before_it_answers_and_cut_its_head_anywhere() -> None:
    whole = b"HTTP/1.1 100 Continue\r\n\r\n" * 2 + STREAM
    assert all(text_of(chat(whole[:at], whole[at:] + HI + DONE)) == "Hi" for at in range(1, len(whole)))


def test_an_error_that_does_not_end_is_read_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_ERROR_SECONDS", -1.0)
    with pytest.raises(ServerError):
        chat(b"HTTP/1.1 500 Internal Server Error\r\n\r\n", b"wait", None)


def test_a_server_that_falls_silent_times_out_and_is_disconnected() -> None:
    with RawServer([STREAM, HI, None]) as server:
        with pytest.raises(Unavailable, match=r"sent nothing for 0\.2 seconds"):
            list(OpenAIClient(Credentials(base_url=server.address, timeout=0.2)).chat({}))
        assert server.left.wait(60)


def test_a_server_that_never_answers_times_out_and_is_disconnected() -> None:
    with RawServer([None]) as server:
        with pytest.raises(Unavailable, match=r"sent nothing for 0\.2 seconds"):
            OpenAIClient(Credentials(base_url=server.address, timeout=0.2)).chat({})
        assert server.left.wait(60)


# -- streams -----------------------------------------------------------------------------------------


def test_a_stream_gives_the_same_events_however_it_is_split_into_packets() -> None:
    stream = (
        b'\xef\xbb\xbf: hello\r\n\r\ndata: {"a":\r\ndata: "\xe3\x81\x82"}\r\n\r\ndata:{}\rdata: [DONE]\r\r'
    )
    events = [{"a": "あ"}, {}, sse.DONE]
    assert list(sse.iter_events([stream])) == events
    for first, second in combinations(range(len(stream) + 1), 2):
        assert list(sse.iter_events([stream[:first], stream[first:second], stream[second:]])) == events


def test_two_events_in_one_packet_are_two_chunks() -> None:
    assert text_of(chat(STREAM + HI + HI, DONE)) == "HiHi"


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_lines_may_end_in_each_of_the_three_ways(end: bytes) -> None:
    assert text_of(chat(STREAM, (HI + DONE).replace(b"\n", end))) == "Hi"


def test_events_without_an_empty_line_between_them_are_read() -> None:
    assert text_of(chat(STREAM, (HI + HI + DONE).replace(b"\n\n", b"\n"))) == "HiHi"


def test_a_compressed_stream_is_read_as_it_arrives() -> None:
    head = STREAM.replace(b"Connection", b"Content-Encoding: gzip\r\nConnection")
    assert text_of(chat(head, gzip.compress(HI + DONE))) == "Hi"


def test_a_broken_compression_is_an_answer_that_broke_off() -> None:
    head = STREAM.replace(b"Connection", b"Content-Encoding: gzip\r\nConnection")
    with pytest.raises(Unavailable, match="broke off"):
        chat(head, gzip.compress(HI + DONE)[:20] + b"no gzip at all" * 9)


def test_a_body_packed_in_layers_is_not_unpacked() -> None:
    head = STREAM.replace(b"Connection", b"Content-Encoding: gzip, gzip\r\nConnection")
    with pytest.raises(Unavailable, match="broke off"):
        chat(head, gzip.compress(gzip.compress(HI + DONE)))


@pytest.mark.parametrize("limit", ["MAX_LINE_BYTES", "MAX_BODY_BYTES"])
def test_little_that_unpacks_to_very_much_is_abandoned_in_pieces(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, limit, 1 << 20)
    sizes: list[int] = []
    split = client._unpacked

    def unpacked(pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in split(pieces):
            sizes.append(len(piece))
            yield piece

    monkeypatch.setattr(client, "_unpacked", unpacked)
    head = (STREAM if limit == "MAX_LINE_BYTES" else JSON).replace(
        b"Connection", b"Content-Encoding: gzip\r\nConnection"
    )
    start = b"data: " if limit == "MAX_LINE_BYTES" else b"{"
    with pytest.raises((Unavailable, Refused)):
        chat(head, gzip.compress(start + b"x" * (64 << 20)))
    assert max(sizes) <= client.PIECE_BYTES
    assert sum(sizes) < 2 << 20


def test_a_packed_body_may_have_several_members() -> None:
    head = STREAM.replace(b"Connection", b"Content-Encoding: gzip\r\nConnection")
    assert text_of(chat(head, gzip.compress(HI) + gzip.compress(HI + DONE))) == "HiHi"


@pytest.mark.parametrize("endless", [b": comment\n", b"\n", b"event: x\n"])
def test_lines_without_an_event_are_abandoned(endless: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_IGNORED_CHARACTERS", 10_000)
    with pytest.raises(Unavailable, match="broke off"):
        chat(STREAM, endless * 20_000)


def test_a_stream_of_comments_is_abandoned_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_COMMENT_SECONDS", -1.0)
    with pytest.raises(Unavailable, match="nothing but comments for"):
        chat(STREAM, HI, b": keepalive\n\n", None)


@pytest.mark.parametrize(
    "pieces", [(STREAM, HI, HI, None), (STREAM, b": comment\n", None), (JSON, b'{"choices": [', None)]
)
def test_an_answer_that_never_ends_is_abandoned_after_a_time(
    monkeypatch: pytest.MonkeyPatch, pieces: tuple[bytes | None, ...]
) -> None:
    monkeypatch.setattr(client, "MAX_ANSWER_SECONDS", -1.0)
    with pytest.raises(Unavailable, match="has sent one answer for"):
        chat(*pieces)


def test_blanks_without_an_end_are_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_IGNORED_CHARACTERS", 10_000)
    with pytest.raises(Refused, match="not an OpenAI-compatible server"):
        chat(JSON, b" \n" * 20_000)


ECHO = {
    "error": {
        "message": "Bad header 'Bearer sesame-street'",
        "details": [{"sesame-street": ["sesame-street"]}],
    }
}


@pytest.mark.parametrize(
    "answer",
    [
        status("500 Oops", json.dumps(ECHO).encode()),
        status("401 No", json.dumps(ECHO).encode()),
        status("302 Found", b"", "Location: https://elsewhere/sesame-street"),
        STREAM + b"data: " + json.dumps(ECHO).encode() + b"\n\n",
        JSON + json.dumps(ECHO).encode(),
        status("500 Oops", json.dumps({"error": "x" * 490 + "sesame-street"}).encode()),
    ],
    ids=["status", "refused key", "redirect", "in mid-stream", "whole", "cut within it"],
)
def test_a_server_that_repeats_the_key_does_not_bring_it_to_the_user(answer: bytes) -> None:
    with RawServer([answer]) as server, pytest.raises(ServerError) as caught:
        list(OpenAIClient(Credentials(base_url=server.address, api_key="sesame-street")).chat({}))
    assert "sesame" not in str(caught.value)


def test_a_server_that_repeats_the_key_with_status_200_does_not_bring_it_to_the_user() -> None:
    with RawServer([JSON + json.dumps(ECHO).encode()]) as server:
        answer = OpenAIClient(Credentials(base_url=server.address, api_key="sesame-street")).post_json(
            "/x", {}
        )
    assert "sesame" not in str(answer["error"]["message"])


def test_a_stream_with_another_content_type_is_read_as_a_stream() -> None:
    assert text_of(chat(STREAM.replace(b"text/event-stream", b"text/plain"), b"\n", HI, DONE)) == "Hi"


def test_nan_and_null_fields_are_accepted() -> None:
    odd = b'data: {"choices": null, "usage": null, "error": null, "x": NaN, "y": -Infinity}\n\n'
    assert text_of(chat(STREAM, odd, HI, DONE)) == "Hi"


def test_half_a_line_after_the_end_of_the_answer_is_ignored() -> None:
    assert text_of(chat(STREAM, HI, event({}, "stop"), b'data: {"usage"')) == "Hi"


def test_a_finished_answer_needs_no_done_event() -> None:
    assert text_of(chat(STREAM, HI, event({}, "stop"))) == "Hi"


@pytest.mark.parametrize("end", [b"", b'data: {"choices"', b"data: nonsense\n\n", b"data: " + b"[" * 100_000])
def test_a_stream_that_ends_too_soon_is_reported_as_broken_off(end: bytes) -> None:
    with pytest.raises(Unavailable, match="broke off"):
        chat(STREAM, HI, end)


def test_an_error_without_a_field_name_in_mid_stream_is_read() -> None:
    with pytest.raises(Unavailable, match="out of memory"):
        chat(STREAM, HI, b'{"error": {"message": "out of memory"}}\n')


def test_an_event_that_is_an_error_is_read_as_one() -> None:
    with pytest.raises(Unavailable, match="out of memory"):
        chat(STREAM, HI, b'event: error\ndata: {"message": "out of memory", "code": 500}\n\n')


def test_a_line_without_an_end_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_LINE_BYTES", 100_000)
    with pytest.raises(Unavailable, match="broke off"):
        chat(STREAM, b"data: ", *[b"x" * 50_000] * 10)


def test_an_event_may_have_many_lines() -> None:
    lines = ["{", *(f'"k{at}": {at},' for at in range(100)), '"choices": [{"finish_reason": "stop"}]}']
    [chunk] = chat(STREAM + "".join(f"data: {line}\n" for line in lines).encode() + b"\ndata: [DONE]\n\n")
    assert chunk["k99"] == 99


def test_an_event_whose_lines_do_not_end_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_LINE_BYTES", 1000)
    parsed: list[str] = []

    def parse(text: str) -> object:
        parsed.append(text)
        return sse.INCOMPLETE

    monkeypatch.setattr(sse, "parse_json", parse)
    with pytest.raises(Unavailable, match="broke off"):
        chat(STREAM + b"data: [1\n" + b"data: ,2\n" * 900, None)
    assert sum(map(len, parsed)) < 2000, "not parsed again with every line"


def test_a_very_long_line_takes_linear_work() -> None:
    long = event({"content": "x" * 5_000_000})
    pieces = [long[at : at + 1000] for at in range(0, len(long), 1000)]
    assert len(text_of(list(sse.iter_events(pieces)))) == 5_000_000


def test_comments_keep_a_stream_alive() -> None:
    comments = b": keepalive\n\n" * 1000
    assert text_of(chat(STREAM, comments, HI, comments, DONE)) == "Hi"


def test_a_server_faster_than_the_plugin_does_not_starve_other_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "sleep", gevent.sleep)  # as the SDK has it
    turns: list[str] = []

    def other() -> None:
        while True:
            turns.append("other")
            gevent.sleep(0)

    with RawServer([STREAM + HI * 100 + DONE]) as server:
        chunks = OpenAIClient(Credentials(base_url=server.address)).chat({})
        another_call = gevent.spawn(other)
        for _ in chunks:
            turns.append("chunk")
        another_call.kill()
    assert turns.count("chunk") == 101
    assert ("chunk", "chunk") not in pairwise(turns)


# -- whole answers -----------------------------------------------------------------------------------

WHOLE = json.dumps({"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}]}).encode()


@pytest.mark.parametrize("beginning", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_an_answer_that_is_not_streamed_is_a_stream_of_one_chunk(beginning: bytes) -> None:
    assert text_of(chat(JSON, beginning, WHOLE)) == "Hi"


@pytest.mark.parametrize(
    "answer",
    [b"<html>welcome</html>", b"", b"null", b"[]", b'{"choices": null}', b"\xff\xfe", b"[" * 100_000],
)
def test_a_body_that_is_no_answer_is_reported_as_another_kind_of_server(answer: bytes) -> None:
    with pytest.raises(Refused, match="not an OpenAI-compatible server"):
        chat(JSON, answer)


def test_a_body_without_an_end_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_BODY_BYTES", 100_000)
    with pytest.raises(Refused, match="not an OpenAI-compatible server"):
        chat(JSON, b"{", *[b" " * 50_000] * 10)


# -- refusals ----------------------------------------------------------------------------------------


def test_a_redirect_is_reported_with_its_target() -> None:
    with pytest.raises(Refused, match="redirects to https://elsewhere/v1"):
        chat(status("302 Found", b"", "Location: https://elsewhere/v1"))


def test_secrets_in_a_redirect_are_not_shown() -> None:
    with pytest.raises(Refused, match=r"redirects to https://elsewhere:8/login\. Enter") as caught:
        chat(status("302 Found", b"", "Location: https://me:hunter2@elsewhere:8/login?token=abc#x"))
    assert "hunter2" not in str(caught.value)
    assert "abc" not in str(caught.value)


def test_a_closed_connection_no_server_and_another_protocol_are_different_errors() -> None:
    with pytest.raises(Unreachable, match="the connection was closed instead"):
        chat()
    with pytest.raises(Refused, match="not an OpenAI-compatible server"):
        chat(b"SSH-2.0-OpenSSH_9.6\r\n")


def test_a_proxy_without_a_server_behind_it_is_recognised() -> None:
    with pytest.raises(Unavailable, match="the server behind it does not"):
        chat(status("502 Bad Gateway", b"<html>nginx</html>"))


def test_a_large_error_page_is_not_read_to_its_end() -> None:
    with pytest.raises(Unavailable, match="status 500"):
        chat(status("500 Oops", b"<p>" * 1_000_000))


def test_a_traceback_in_an_error_stays_on_the_server() -> None:
    words = {"error": {"message": "out of memory\nTraceback (most recent call last):\n  File x"}}
    with pytest.raises(Unavailable, match=r"^out of memory$"):
        chat(status("500 Oops", json.dumps(words).encode()))


def test_a_list_of_validation_errors_becomes_a_sentence() -> None:
    words = {"detail": [{"loc": ["body", "top_k"], "msg": "Input should be greater than 0"}]}
    with pytest.raises(Refused, match=r"^Input should be greater than 0$"):
        chat(status("422 Unprocessable", json.dumps(words).encode()))


def test_a_key_with_a_space_is_sent_as_it_is() -> None:
    with RawServer([status("401 Unauthorized")]) as server:
        with pytest.raises(KeyRefused) as caught:
            OpenAIClient(Credentials(base_url=server.address, api_key="two words")).chat({})
        assert b"\r\nAuthorization: Bearer two words\r\n" in server.requests[0]
    assert "two words" not in str(caught.value)


def test_https_to_a_server_without_tls_suggests_http() -> None:
    with RawServer([b"HTTP/1.1 400 Bad Request\r\n\r\n"]) as server:
        address = server.address.replace("http:", "https:")
        with pytest.raises(Unreachable, match="http://"):
            OpenAIClient(Credentials(base_url=address)).chat({})


# -- retrying -----------------------------------------------------------------------------------------

LOADING = b'{"error": {"message": "The model is being loaded (40 %).", "code": "model_loading"}}'
FULL = b'{"error": {"message": "8 requests are waiting; try again in 900 s.", "code": "queue_full"}}'


def test_a_request_is_retried_while_the_server_loads_its_model() -> None:
    pauses: list[float] = []
    loading = status("503 Service Unavailable", LOADING, "Retry-After: 2")
    with RawServer([loading], [loading], [STREAM, HI, DONE]) as server:
        client = OpenAIClient(Credentials(base_url=server.address), sleep=pauses.append)
        assert text_of(list(client.chat({}))) == "Hi"
    assert pauses == [2.0, 2.0]


def test_retries_end_with_the_timeout_and_are_never_a_busy_loop() -> None:
    pauses: list[float] = []
    loading = status("503 Service Unavailable", LOADING, "Retry-After: 0")
    with RawServer(*[[loading]] * 21) as server:
        client = OpenAIClient(Credentials(base_url=server.address, timeout=10.0), sleep=pauses.append)
        with pytest.raises(Unavailable, match=r"\(40 %\)"):
            for _ in client.chat({}):
                pass
    assert pauses == [0.5] * 20


def test_a_retry_after_beyond_the_timeout_is_reported_at_once() -> None:
    with pytest.raises(Overloaded, match="900 s") as caught:
        chat(status("503 Service Unavailable", FULL, "Retry-After: 900"))
    assert caught.value.retry_after == 900
    words = json.dumps({"error": {"message": "slow down."}}).encode()
    with pytest.raises(Overloaded, match=r"^slow down; try again in 900 s\.$"):
        chat(status("429 Too Many Requests", words, "Retry-After: 900"))


def test_without_retry_after_a_request_is_not_retried() -> None:
    with pytest.raises(Overloaded):
        chat(status("429 Too Many Requests"))


def test_retry_after_may_be_a_fraction_of_a_second() -> None:
    pauses: list[float] = []
    busy = status("429 Too Many Requests", b"", "Retry-After: 1.5")
    with RawServer([busy], [STREAM, HI, DONE]) as server:
        client = OpenAIClient(Credentials(base_url=server.address), sleep=pauses.append)
        assert text_of(list(client.chat({}))) == "Hi"
    assert pauses == [1.5]


def test_retry_after_may_be_a_date() -> None:
    with pytest.raises(Overloaded) as caught:
        chat(status("429 Too Many Requests", b"", "Retry-After: Fri, 31 Dec 2100 23:59:59 GMT"))
    assert caught.value.retry_after is not None
    assert caught.value.retry_after > MAX_RETRY_WAIT


@pytest.mark.parametrize("header", ["soon", "nan", "-1", "Fri, 31 Dec 99999 23:59:59 GMT"])
def test_an_invalid_retry_after_is_ignored(header: str) -> None:
    with pytest.raises(Overloaded) as caught:
        chat(status("429 Too Many Requests", b"", f"Retry-After: {header}"))
    assert caught.value.retry_after is None
