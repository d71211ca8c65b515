"""Fetches an image from an http(s) address that somebody else chose, which may be anything.

So that no client reaches through this server what only it can reach, images come from public addresses, and from those
that the server's operator names. Each step of a redirect is judged like the first address: its scheme, and the
addresses that its name has. A name is looked up once for each step, and the connection is made to what that gave, so
that a second answer of a name server changes nothing. Proxies are not used: they would look names up themselves.
Cookies, credentials and compression are not sent or accepted.

A fetch ends when its time is over, whatever the other side does meanwhile, and when its request is cancelled. Knows
no formats: what it returns may be no image.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
import threading
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException, HTTPResponse
from importlib.util import find_spec
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from time import monotonic
from typing import TYPE_CHECKING
from urllib.parse import quote, urljoin, urlsplit

from mlx_backend.images import ImageError, too_many_bytes
from mlx_backend.preparation import current

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from ipaddress import IPv4Network

    # A host's name and a port -> the addresses it has, as text, without names. Raises OSError.
    type LookUp = Callable[[str, int], Sequence[str]]

MAX_REDIRECTS = 5
MAX_ADDRESSES = 4
"""Addresses of one name that are tried one after the other."""
_NAT64 = IPv6Network("64:ff9b::/96")
_LOCAL_NAT64 = IPv6Network("64:ff9b:1::/48")
"""Translation by a network's own rules: what an address leads to cannot be known."""
_READ_BYTES = 64 << 10
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_KEPT_IN_PATHS = "%/:=&?~#+!$,;'@()*[]-._"


class AllowedAddresses:
    """Judges addresses. `named` are host names, addresses and networks (10.0.0.0/8) that may be private."""

    def __init__(self, named: Iterable[str] = ()) -> None:
        self._hosts: set[str] = set()
        self._networks: list[IPv4Network | IPv6Network] = []
        for each in named:
            try:
                self._networks.append(ip_network(each.strip("[]"), strict=False))
            except ValueError:
                self._hosts.add(_normal(each))

    def names(self, host: str, address: str) -> bool:
        """Whether the operator has named this host, or this address or a network that holds it."""
        return _normal(host) in self._hosts or any(
            _parse(address).version == network.version and _parse(address) in network
            for network in self._networks
        )

    def allows(self, host: str, address: str) -> bool:
        """Whether this address, which `host` has, may be connected to."""
        return self.names(host, address) or is_public(address)


def is_public(address: str) -> bool:
    """Whether an address belongs to the public internet, as IANA's registries of special addresses say.

    Addresses that carry an IPv4 address inside are public if that is.
    """
    parsed = _parse(address)
    if isinstance(parsed, IPv6Address):
        if parsed in _LOCAL_NAT64:
            return False
        inner = parsed.ipv4_mapped or parsed.sixtofour
        if parsed in _NAT64:
            inner = IPv4Address(parsed.packed[-4:])
        if inner is not None:
            return is_public(str(inner))
        if parsed.is_site_local or parsed.teredo is not None:
            return False
    return parsed.is_global and not (parsed.is_multicast or parsed.is_reserved or parsed.is_unspecified)


def _parse(address: str) -> IPv4Address | IPv6Address:
    return ip_address(address.partition("%")[0])  # without the interface of a link-local address


def _normal(host: str) -> str:
    return host.strip().rstrip(".").casefold()


class FetchError(ImageError):
    """An image could not be fetched."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem, "image_not_fetched")


class ImageFetcher:
    """Fetches files of at most `max_bytes`, each within `seconds`. Safe to use from any thread."""

    def __init__(
        self,
        allowed: AllowedAddresses,
        *,
        max_bytes: int,
        seconds: float,
        look_up: LookUp | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._allowed = allowed
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._look_up = look_up or addresses_of
        self._tls = tls

    def fetch(self, url: str) -> bytes:
        """Return the bytes of the file at an address. Raises ImageError, and what the current preparation raises."""
        preparation = current()
        preparation.check()
        deadline = _Deadline(min(self._seconds, preparation.seconds_left))
        with preparation.cancelled_by(deadline.end), deadline:
            try:
                data = self._fetch(url, deadline)
                deadline.check()  # a connection that was shut down looks like one that the other side has closed
            except (ImageError, OSError, HTTPException, ValueError) as error:
                preparation.check()
                if deadline.is_over:
                    raise FetchError(
                        f"The image's address did not send it within {self._seconds:g} seconds. Try again, or send "
                        "the image itself."
                    ) from None
                if isinstance(error, ImageError):
                    raise
                raise FetchError(
                    "The image could not be fetched from its address: the connection failed. Check the address, or "
                    "send the image itself."
                ) from error
            return data

    def _fetch(self, url: str, deadline: _Deadline) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            target = _Target.of(url)
            with contextlib.closing(self._connect(target, deadline)) as connection:
                connection.sendall(target.request())
                with contextlib.closing(HTTPResponse(connection, method="GET")) as response:
                    response.begin()
                    location = response.getheader("Location")
                    if response.status not in _REDIRECTS or location is None:
                        return self._body(response)
            # Many servers write a path as it is, in UTF-8 or another encoding: its bytes are what they want back.
            url = urljoin(url, quote(location.encode("latin-1"), safe=_KEPT_IN_PATHS))
        raise FetchError(
            f"The image's address leads on to others, more than {MAX_REDIRECTS} times. Send the one where it is."
        )

    def _connect(self, target: _Target, deadline: _Deadline) -> socket.socket:
        """Connect to one of the addresses that the target's name has now, and that may be connected to."""
        host, port = target.host, target.port
        found = _within(deadline, lambda: self._look_up(host, port))
        allowed = [
            each
            for each in dict.fromkeys(found)
            if self._allowed.allows(host, each)
            and (self._allowed.names(host, each) or not _is_own(each, port))
        ]
        if not allowed:
            raise ImageError(
                f"Images are not fetched from {host}: it is in a private network, or this server's own machine. Send "
                "the image itself; the server's operator can name hosts that are allowed (--image-host).",
                "image_url_refused",
            )
        *earlier, last = allowed[:MAX_ADDRESSES]
        for address in earlier:
            with contextlib.suppress(OSError):  # half of the time is for the others
                return self._connect_to(address, target, deadline, deadline.seconds_left / 2)
        return self._connect_to(last, target, deadline, deadline.seconds_left)

    def _connect_to(
        self, address: str, target: _Target, deadline: _Deadline, seconds: float
    ) -> socket.socket:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        connection: socket.socket = deadline.watch(socket.socket(family, socket.SOCK_STREAM))
        try:
            connection.settimeout(seconds)
            connection.connect((address, target.port))
            connection.settimeout(deadline.seconds_left)
            if target.scheme == "https":
                context = self._tls or _tls_context()
                connection = deadline.watch(
                    context.wrap_socket(
                        connection, server_hostname=target.host, do_handshake_on_connect=False
                    )
                )
                connection.do_handshake()
        except BaseException:
            connection.close()
            raise
        return connection

    def _body(self, response: HTTPResponse) -> bytes:
        if response.status != 200:
            raise FetchError(
                f"The image's address answered with the status {response.status}, not with an image."
            )
        if response.getheader("Content-Encoding", "identity").strip().lower() not in ("identity", ""):
            raise FetchError("The image's address sends it compressed, although it was asked not to.")
        if (response.length or 0) > self._max_bytes:
            raise too_many_bytes(self._max_bytes)
        data = bytearray()
        while len(data) <= self._max_bytes:
            piece = response.read(min(_READ_BYTES, self._max_bytes + 1 - len(data)))
            if not piece:
                if response.length:  # a whole body leaves 0, one of unknown length None
                    raise FetchError("The image's address broke off before all of it was sent. Try again.")
                return bytes(data)
            data += piece
        raise too_many_bytes(self._max_bytes)


@dataclass(frozen=True, slots=True)
class _Target:
    """What one request is sent to."""

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def of(cls, url: str) -> _Target:
        """Take an address apart. Raises ImageError."""
        try:
            parts = urlsplit(url)
            scheme, host, port = parts.scheme.lower(), parts.hostname or "", parts.port
            if not host.isascii():
                host = host.encode("idna").decode("ascii")
        except (ValueError, UnicodeError):
            raise FetchError("The image's address cannot be read. Check how it is written.") from None
        if scheme not in _PORTS:
            raise ImageError(
                f"Images are not fetched from {scheme or 'relative'} addresses, only from http and https.",
                "image_url_refused",
            )
        if not host or any(each <= " " or each in "\x7f\"'<>\\^`{|}/?#@" for each in host):
            raise FetchError("The image's address names no host. Check how it is written.")
        if parts.username is not None or parts.password is not None:
            raise ImageError(
                "The image's address holds a user name or password, which are not sent on.",
                "image_url_refused",
            )
        path = quote(parts.path or "/", safe=_KEPT_IN_PATHS)
        if parts.query:
            path += "?" + quote(parts.query, safe=_KEPT_IN_PATHS)
        return cls(scheme, host, port or _PORTS[scheme], path)

    def request(self) -> bytes:
        """Return the bytes of the request."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        host = name if self.port == _PORTS[self.scheme] else f"{name}:{self.port}"
        return (
            f"GET {self.path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: mlx-backend\r\nAccept: image/*\r\n"
            "Accept-Encoding: identity\r\nConnection: close\r\n\r\n"
        ).encode("ascii")


class _Deadline:
    """Ends a fetch when its time is over: a socket's timeout is that of a single read, of which there may be many."""

    def __init__(self, seconds: float) -> None:
        self._until = monotonic() + seconds
        self._guard = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._has_ended = False
        self._timer = threading.Timer(seconds, self.end)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    @property
    def seconds_left(self) -> float:
        """The seconds until the end. Raises TimeoutError when there are none."""
        self.check()
        return max(self._until - monotonic(), 0.001)  # 0 would make a socket that waits for nothing

    def check(self) -> None:
        """Raise TimeoutError if the time is over."""
        if self.is_over:
            raise TimeoutError

    @property
    def is_over(self) -> bool:
        """Whether the time is over."""
        return self._has_ended or self._until <= monotonic()

    def watch[S: socket.socket](self, connection: S) -> S:
        """Have a connection shut down at the end."""
        self.on_end(partial(_shut_down, connection))
        return connection

    def on_end(self, callback: Callable[[], None]) -> None:
        """Have `callback` called at the end, from any thread; at once if that has come."""
        with self._guard:
            if not self._has_ended:
                self._callbacks.append(callback)
                return
        callback()

    def end(self) -> None:
        """Have what waits for something go on without it, from any thread. Idempotent."""
        with self._guard:
            self._has_ended = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # An SSLSocket's own method also drops its state, which the thread that reads is using.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def addresses_of(host: str, port: int) -> list[str]:
    """Return the addresses that a name has now, as the system looks it up. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def _within(deadline: _Deadline, look_up: Callable[[], Sequence[str]]) -> Sequence[str]:
    """Look a name up in a thread of its own: the system's resolver can be neither timed nor interrupted."""
    results: queue.SimpleQueue[Sequence[str] | Exception] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put(look_up())
        except Exception as error:
            results.put(error)

    deadline.on_end(lambda: results.put(TimeoutError()))  # also that of a cancelled request
    threading.Thread(target=run, name="image-look-up", daemon=True).start()
    try:
        result = results.get(timeout=deadline.seconds_left)
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(result, Exception):
        if isinstance(result, OSError | UnicodeError):
            raise FetchError(
                "The image's address names a host that cannot be found. Check the address."
            ) from result
        raise result
    return result


def _is_own(address: str, port: int) -> bool:
    """Whether an address is one of this machine's own. Sends nothing: a UDP socket only learns how it would."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((address, port))
        return str(probe.getsockname()[0]) == str(probe.getpeername()[0])
    return False


def _tls_context() -> ssl.SSLContext:
    """Return what servers' certificates are checked by: the system's, and certifi's where Python finds no others."""
    context = ssl.create_default_context()
    if not context.cert_store_stats()["x509_ca"] and find_spec("certifi") is not None:
        import certifi

        context.load_verify_locations(certifi.where())
    return context
