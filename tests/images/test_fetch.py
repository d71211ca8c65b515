"""Fetching from addresses that somebody else chose: real sockets on loopback; the tests name those that are allowed."""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from picture_files import png
from picture_site import PictureSite, found, moved

from mlx_backend.images import ImageError
from mlx_backend.images.fetch import MAX_REDIRECTS, AllowedAddresses, ImageFetcher
from mlx_backend.preparation import Preparation, PreparationCancelled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PNG = png()
LIMIT = 1 << 20
LONG = 60.0  # seconds: a test that needs them has failed
SHORT = 0.3
CERTIFICATES = Path(__file__).parent / "certificates"


def fetcher(*named: str, seconds: float = LONG, max_bytes: int = LIMIT, **options: Any) -> ImageFetcher:
    return ImageFetcher(AllowedAddresses(named), max_bytes=max_bytes, seconds=seconds, **options)


LOCAL = "127.0.0.1"


def refusal(url: str, *named: str, **options: Any) -> ImageError:
    with pytest.raises(ImageError) as raised:
        fetcher(*named, **options).fetch(url)
    return raised.value


def at(*addresses: str) -> Callable[[str, int], Sequence[str]]:
    return lambda _host, _port: addresses


# -- what is fetched --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        found(PNG),
        found(PNG, "Content-Type: text/plain"),
        b"HTTP/1.1 200 OK\r\n\r\n" + PNG,
        b"HTTP/1.0 200 OK\r\n\r\n" + PNG,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(PNG), PNG),
        b"HTTP/1.1 100 Continue\r\n\r\n" + found(PNG),
    ],
    ids=["length", "another type", "until closed", "HTTP/1.0", "chunked", "after Continue"],
)
def test_a_file_is_fetched_however_it_is_sent(answer: bytes) -> None:
    with PictureSite({"/a.png": answer}) as site:
        assert fetcher(LOCAL).fetch(site.url()) == PNG
    assert site.heads[0].startswith(f"GET /a.png HTTP/1.1\r\nHost: 127.0.0.1:{site.port}\r\n")


def test_a_path_is_sent_as_it_is_and_what_is_not_ascii_escaped() -> None:
    with PictureSite({"/%E7%94%BB%20a?b=c%2Fd&e=%C3%A9": found(PNG)}) as site:
        assert fetcher(LOCAL).fetch(site.url("/画%20a?b=c%2Fd&e=é#part")) == PNG


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize(
    "location", ["/b.png", "b.png", "//127.0.0.1:{port}/b.png", "HTTP://127.0.0.1:{port}/b.png"]
)
def test_a_redirect_is_followed(status: int, location: str) -> None:
    with PictureSite({"/b.png": found(PNG)}) as site:
        site.answers["/a.png"] = moved(location.format(port=site.port), status)
        assert fetcher(LOCAL).fetch(site.url()) == PNG


@pytest.mark.parametrize("encoding", ["utf-8", "shift_jis"])
def test_a_redirect_may_be_written_without_escapes(encoding: str) -> None:
    bytes_of_path = "/画 像.png".encode(encoding)
    with PictureSite({quote(bytes_of_path): found(PNG)}) as site:
        site.answers["/a.png"] = moved("/b").replace(b"/b", bytes_of_path)
        assert fetcher(LOCAL).fetch(site.url()) == PNG


def test_https_is_spoken_and_the_certificate_is_checked_for_the_name() -> None:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(CERTIFICATES / "server.pem", CERTIFICATES / "server.key")
    trust = ssl.create_default_context(cafile=str(CERTIFICATES / "ca.pem"))
    with PictureSite({"/a.png": found(PNG)}, tls=server) as site:
        url = site.url(host="localhost", scheme="https")
        assert fetcher(LOCAL, tls=trust, look_up=at(LOCAL)).fetch(url) == PNG
        other = site.url(host="other.example", scheme="https")
        assert "connection failed" in str(refusal(other, LOCAL, tls=trust, look_up=at(LOCAL)))
        assert "connection failed" in str(refusal(url, LOCAL, look_up=at(LOCAL)))
    assert len(site.heads) == 1


def test_of_several_addresses_the_first_that_answers_is_used() -> None:
    with PictureSite({"/a.png": found(PNG)}) as site:
        own = at("127.0.0.2", LOCAL)  # nothing listens there
        assert fetcher("127.0.0.0/8", look_up=own).fetch(site.url(host="two.example")) == PNG


# -- server-side request forgery --------------------------------------------------------------------------------

WRITTEN = [
    *("127.0.0.1", "localhost", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "0.0.0.0", "127.0.0.1."),
    *("[::ffff:127.0.0.1]", "[::ffff:7f00:1]"),
]


@pytest.mark.parametrize("host", WRITTEN)
def test_this_machine_is_not_connected_to_however_its_address_is_written(host: str) -> None:
    with PictureSite({"/a.png": found(PNG)}) as site:
        error = refusal(site.url(host=host))
    assert error.code in (
        "image_url_refused",
        "image_not_fetched",
    )  # some systems do not know all ways to write it
    assert site.connections == 0


@pytest.mark.parametrize("address", ["10.0.0.1", "192.168.0.1", "169.254.169.254", "fe80::1%lo", "fd00::1"])
def test_a_name_with_a_private_address_is_refused_without_a_connection(address: str) -> None:
    error = refusal("http://inside.example/a.png", look_up=at(address))
    assert error.code == "image_url_refused"
    assert str(error) == (
        "Images are not fetched from inside.example: it is in a private network, or this server's own machine. Send "
        "the image itself; the server's operator can name hosts that are allowed (--image-host)."
    )


def test_a_public_address_of_this_machine_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_backend.images.fetch.is_public", lambda _address: True)
    with PictureSite({"/a.png": found(PNG)}) as site:
        assert refusal(site.url()).code == "image_url_refused"
        assert site.connections == 0
        assert fetcher(LOCAL).fetch(site.url()) == PNG  # unless it is named


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.3:{port}/secret",
        "http://localhost.:{port}/secret",
        "http://169.254.169.254/latest/meta-data/",
        "http://[::1]:{port}/secret",
        "file:///etc/passwd",
        "gopher://127.0.0.1:{port}/_x",
        "ftp://127.0.0.1/a.png",
        "data:image/png;base64,AAAA",
        "javascript:alert(1)",
        "http://user:password@127.0.0.1:{port}/secret",
    ],
)
def test_each_step_of_a_redirect_is_judged_again(location: str) -> None:
    with PictureSite({"/secret": found(PNG)}, host="0.0.0.0") as site:
        target = location.format(port=site.port)
        site.answers["/a.png"] = moved("/b.png")
        site.answers["/b.png"] = moved(target)
        allowed = ImageFetcher(
            AllowedAddresses(["127.0.0.1"]),
            max_bytes=LIMIT,
            seconds=LONG,
            look_up=lambda host, _port: ["127.0.0.3"] if host.startswith("localhost") else [host],
        )
        with pytest.raises(ImageError) as raised:
            allowed.fetch(site.url())
    assert raised.value.code == "image_url_refused"
    assert len(site.heads) == site.connections == 2


def test_a_name_is_looked_up_once_so_that_its_second_answer_changes_nothing() -> None:
    answers = [[LOCAL], ["127.0.0.9"], ["127.0.0.9"]]
    asked: list[str] = []

    def look_up(host: str, _port: int) -> list[str]:
        asked.append(host)
        return answers[len(asked) - 1]

    with PictureSite({"/a.png": found(PNG)}) as site:
        assert fetcher(LOCAL, look_up=look_up).fetch(site.url(host="changing.example")) == PNG
        assert asked == ["changing.example"]
        assert "Host: changing.example:" in site.heads[0]
        refused = refusal(site.url(host="changing.example"), LOCAL, look_up=look_up)
        assert refused.code == "image_url_refused"  # by the second answer
        assert len(site.heads) == 1


def test_only_allowed_addresses_of_a_name_are_connected_to() -> None:
    with PictureSite({"/a.png": found(PNG)}) as site:
        both = at("127.0.0.9", LOCAL)
        assert fetcher(LOCAL, look_up=both).fetch(site.url(host="both.example")) == PNG


def test_neither_credentials_nor_cookies_are_sent_on() -> None:
    with PictureSite({"/b.png": found(PNG)}) as site:
        site.answers["/a.png"] = moved("/b.png").replace(b"Content", b"Set-Cookie: a=b\r\nContent", 1)
        assert fetcher(LOCAL).fetch(site.url()) == PNG
    assert not any(
        word in head.lower() for head in site.heads for word in ("cookie", "authorization", "referer")
    )


def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with PictureSite({}) as proxy, PictureSite({"/a.png": found(PNG)}) as site:
        monkeypatch.setenv("http_proxy", proxy.url("/"))
        assert fetcher(LOCAL).fetch(site.url()) == PNG
        assert not proxy.connections


# -- addresses that lead nowhere --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://", "names no host"),
        ("http:///a.png", "names no host"),
        ("http://a b/a.png", "names no host"),
        ("http://[::1/a.png", "cannot be read"),
        ("http://a.example:99999/", "cannot be read"),
        ("http://a.example:x/", "cannot be read"),
        ("//a.example/a.png", "relative addresses"),
        ("picture.png", "relative addresses"),
        ("file:///etc/passwd", "from file addresses, only from http and https"),
        ("FTP://a.example/a.png", "from ftp addresses"),
        ("http://a.example\r\nX: y/", "cannot be read"),
        ("http://a.example/\r\nX: y", "cannot be found"),
        ("http://" + "é" * 70 + ".example/", "cannot be read"),
        ("http://user@a.example/", "user name"),
    ],
)
def test_an_address_that_leads_nowhere_is_refused_in_a_sentence(url: str, says: str) -> None:
    def look_up(_host: str, _port: int) -> list[str]:
        raise OSError("no such name")

    with pytest.raises(ImageError, match=says):
        fetcher(look_up=look_up).fetch(url)


def test_a_name_that_is_not_found_is_said_to_be() -> None:
    def look_up(host: str, _port: int) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, host)

    assert "cannot be found" in str(refusal("http://nowhere.example/a.png", look_up=look_up))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "status 404"),
        (b"HTTP/1.1 302 Found\r\n\r\n", "status 302"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "status 204"),
        (b"HTTP/1.1 206 Partial\r\nContent-Length: 0\r\n\r\n", "status 206"),
        (found(PNG, "Content-Encoding: gzip"), "compressed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n" + PNG, "broke off"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n", "larger than 1 MB"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + bytes(LIMIT + 1), "larger than 1 MB"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1000\r\n" + bytes(4096),
            "connection failed",
        ),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "connection failed"),
        (b"", "connection failed"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n", "connection failed"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000 + b"\r\n\r\n", "connection failed"),
    ],
)
def test_what_is_not_a_whole_file_is_refused_in_a_sentence(answer: bytes, says: str) -> None:
    with PictureSite({"/a.png": answer}) as site:
        assert says in str(refusal(site.url(), LOCAL))


def test_a_file_of_exactly_the_limit_is_fetched() -> None:
    with PictureSite({"/a.png": b"HTTP/1.1 200 OK\r\n\r\n" + bytes(LIMIT)}) as site:
        assert len(fetcher(LOCAL).fetch(site.url())) == LIMIT


def test_redirects_in_a_circle_end() -> None:
    with PictureSite({"/a.png": moved("/a.png")}) as site:
        assert "leads on to others" in str(refusal(site.url(), LOCAL))
    assert len(site.heads) == MAX_REDIRECTS + 1


# -- time -------------------------------------------------------------------------------------------------------


def drip(text: bytes, site: list[PictureSite]) -> Callable[[socket.socket], object]:
    """Send a byte every 20 milliseconds, for ever: each read is short, and there is no end of them."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(text)
        while not site[0].has_ended.wait(0.02):
            connection.sendall(b"x")

    return answer


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nX: ",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
    ids=["status", "header", "body", "body of known length", "chunk"],
)
def test_an_address_that_sends_a_byte_at_a_time_has_no_more_time_than_others(start: bytes) -> None:
    sites: list[PictureSite] = []
    with PictureSite({"/a.png": drip(start, sites)}) as site:
        sites.append(site)
        assert str(refusal(site.url(), LOCAL, seconds=SHORT)) == (
            "The image's address did not send it within 0.3 seconds. Try again, or send the image itself."
        )


def test_an_address_that_never_answers_is_left() -> None:
    with PictureSite({"/a.png": lambda connection: connection.recv(1)}) as site:
        assert "did not send it within 0.3 seconds" in str(refusal(site.url(), LOCAL, seconds=SHORT))


def test_a_server_that_accepts_and_never_speaks_tls_is_left() -> None:
    with socket.create_server((LOCAL, 0)) as listener:
        url = f"https://{LOCAL}:{listener.getsockname()[1]}/a.png"
        assert "did not send it within 0.3 seconds" in str(refusal(url, LOCAL, seconds=SHORT))


def test_a_name_server_that_never_answers_is_left() -> None:
    may_end = threading.Event()

    def look_up(_host: str, _port: int) -> list[str]:
        may_end.wait()
        return [LOCAL]

    try:
        error = refusal("http://slow.example/a.png", LOCAL, seconds=SHORT, look_up=look_up)
        assert "did not send it within 0.3 seconds" in str(error)
    finally:
        may_end.set()


def test_a_fetch_ends_when_its_client_leaves() -> None:
    preparation = Preparation(LONG)
    with ExitStack() as stack:
        site = stack.enter_context(PictureSite({}))

        def answer(connection: socket.socket) -> None:
            preparation.cancel()
            connection.recv(1)

        site.answers["/a.png"] = answer
        stack.enter_context(preparation.running())
        with pytest.raises(PreparationCancelled):
            fetcher(LOCAL).fetch(site.url())


def test_a_fetch_ends_when_its_client_leaves_while_a_name_is_looked_up() -> None:
    preparation = Preparation(10 * LONG)
    may_end, has_ended = threading.Event(), threading.Event()
    leaving = threading.Timer(SHORT, preparation.cancel)  # when it waits

    def look_up(_host: str, _port: int) -> list[str]:
        leaving.start()
        may_end.wait(LONG)
        has_ended.set()
        return [LOCAL]

    try:
        with preparation.running(), pytest.raises(PreparationCancelled):
            fetcher(LOCAL, seconds=10 * LONG, look_up=look_up).fetch("http://slow.example/a.png")
        assert not has_ended.is_set()
    finally:
        may_end.set()
