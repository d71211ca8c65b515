"""What can go wrong between us and a server, as classes, and what a server's own error means.

    ServerError
    ├── Unreachable      nobody answers at the address
    ├── Unavailable      a server answers, but cannot serve now (5xx, silent, broken off in mid-answer)
    ├── Overloaded       it asks us to wait (429, or its queue is full)
    ├── KeyRefused       it does not take our key (401, 403)
    └── Refused          it does not take the request (other 4xx), or does not speak OpenAI's protocol
        ├── ModelNotFound
        └── NoSuchAddress    there is nothing at all at the path

Servers state errors in many shapes; here they become one of these, with a sentence for people. We put nothing of a
request into a sentence: neither the key nor the user's text. Knows neither HTTP's wires nor Dify (`dify_errors`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

from dify_mlx_provider.upstream.surrogates import mended

LONGEST_QUOTE = 500
"""Characters of a server's own words that are passed on."""

MAX_NAMES = 12
"""Models that are listed to people."""

SHORTEST = 16
"""Characters; a text of which even these are too many is not the trouble."""

_A_MODEL = re.compile(r"\bmodel\b", re.IGNORECASE)
_TOO_LONG = re.compile(
    r"context|too (?:long|large)|maximum|exceed|max_?len|n_ctx|batch size|the model holds", re.IGNORECASE
)
_BUSY_CODES = ("queue_full", "rate_limit", "overloaded")
_BARE_WORDS = ("", "not found", "method not allowed")


class ServerError(Exception):
    """Something went wrong between us and the server; the text is for people.

    `retry_after` is when the server wants to be asked again, in seconds, if it says so.
    """

    retry_after: float | None = None

    @property
    def is_of_length(self) -> bool:
        """Whether a text was too long, by the words of the servers there are."""
        return _TOO_LONG.search(str(self)) is not None

    def again_in(self, seconds: float | None) -> Self:
        """The same, with when to come again, in words too unless the server's own have it."""
        number = "" if seconds is None else f"{seconds:.0f}"
        words = str(self)
        again = self if number in words else type(self)(f"{words.rstrip('.')}; try again in {number} s.")
        again.retry_after = seconds
        return again


class Unreachable(ServerError):
    """Nobody answers at the address."""


class Unavailable(ServerError):
    """A server answers, but cannot serve now."""


class Overloaded(ServerError):
    """The server asks us to wait."""


class KeyRefused(ServerError):
    """The server does not take our key."""


class Refused(ServerError):
    """The server does not take the request."""


class ModelNotFound(Refused):
    """The server does not serve the model."""

    def with_list(self, served: Sequence[str]) -> ModelNotFound:
        """The same, and what there is instead, unless the server said so itself."""
        words = str(self)
        if not served or any(_names(words, name) for name in served[:MAX_NAMES]):
            return self
        words = words.rstrip(".")
        return ModelNotFound(f"{words}. The server at this address serves: {listed(served)}.")


class NoSuchAddress(Refused):
    """Something answers, and knows nothing of the path."""


def _names(words: str, name: str) -> bool:
    """Whether words name something: a model called `m` is not in every word with an m."""
    return re.search(rf"(?<![\w/.-]){re.escape(name)}(?![\w/-])", words) is not None


def from_status(status: int, body: Any, *, address: str, location: str | None = None) -> ServerError | None:
    """Return what a reply with an error status means; None if no OpenAI-compatible server answered."""
    words, code = _words_and_code(body)
    if 300 <= status < 400:
        to = f" to {_without_secrets(location)}" if location else ""
        return Refused(f"{address} leads on{to}. Enter the address of the server itself.")
    if code == "model_not_found" or (status == 404 and _A_MODEL.search(words)):
        return ModelNotFound(words or "the server does not serve this model.")
    if status == 407:
        return Refused(
            f"a proxy between Dify and {address} wants a password. Take the server out of the proxy's way."
        )
    if code == "model_not_allowed":
        return Refused(words)
    if status in (401, 403):
        return KeyRefused(
            f"the server at {address} refused the API key{_quote(words)} Enter the key the server was started with."
        )
    if status == 429 or (status == 503 and code.startswith(_BUSY_CODES)):
        return Overloaded(words or "the server is busy; try again in a moment.")
    if status in (502, 504) and not words:
        return Unavailable(
            f"a proxy answers at {address} with status {status}: the server behind it does not. Start it, or enter "
            "its own address."
        )
    if status >= 500:
        return Unavailable(words or f"the server answered with status {status}.")
    if status in (404, 405) and words.lower() in _BARE_WORDS:
        return None
    return Refused(words or f"the server answered with status {status}.")


def listed(names: Sequence[str]) -> str:
    """Write models' names into a sentence."""
    return ", ".join(names[:MAX_NAMES]) + (" …" if len(names) > MAX_NAMES else "")


def _without_secrets(location: str) -> str:
    """An address that may be shown: a redirect's may hold a password, or a token behind the question mark."""
    try:
        parts = urlsplit(location)
    except ValueError:
        return "another address"
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))[:LONGEST_QUOTE]


def unknown_name(address: str) -> Unreachable:
    """Return what it means that the host's name in an address cannot be looked up."""
    host = urlsplit(address).hostname
    if host == "host.docker.internal":
        advice = (
            'With Docker on Linux add extra_hosts: ["host.docker.internal:host-gateway"] to the service plugin_daemon. '
            "Without Docker enter http://127.0.0.1:8080/v1"
        )
    else:
        advice = (
            "Check its spelling, or enter an IP address: containers do not know names such as my-mac.local."
        )
    return Unreachable(f"no server at {address}: the name {host} is not known where Dify runs. {advice}")


def stated(error: Any) -> ServerError:
    """Return what an error inside a stream means, where no status says of which kind it is."""
    words, code = _words_and_code({"error": error})
    words = words or "the server reported an error."
    kind = f"{error.get('type', '')} {code}" if isinstance(error, Mapping) else ""
    if "model_not_found" in kind:
        return ModelNotFound(words)
    if "invalid_request" in kind or "context_length" in kind:
        return Refused(words)
    if "rate_limit" in kind or "429" in kind or any(busy in kind for busy in _BUSY_CODES):
        return Overloaded(words)
    if "authentication" in kind or "invalid_api_key" in kind:
        return KeyRefused(words)
    return Unavailable(words)


def _words_and_code(body: Any) -> tuple[str, str]:
    """The server's own message and error code, in any of the shapes servers use."""
    if not isinstance(body, Mapping):
        return "", ""
    error = body.get("error") or body.get("detail") or body.get("message")
    if isinstance(error, Mapping):
        words = error.get("message") or error.get("detail")
        return _one_line(words), str(error.get("code") or "")
    if isinstance(error, Sequence) and not isinstance(error, str):  # FastAPI lists what does not fit
        listed = [entry.get("msg") for entry in error if isinstance(entry, Mapping)]
        return _one_line("; ".join(str(words) for words in listed if words)), ""
    return _one_line(error), str(body.get("code") or "")


def _one_line(words: Any) -> str:
    """A server's words without the lines of a traceback, cut to a length people read."""
    text = mended(str(words or "")).split("Traceback (most recent call last)")[0].strip()
    return text if len(text) <= LONGEST_QUOTE else text[: LONGEST_QUOTE - 1] + "…"


def _quote(words: str) -> str:
    return f": {words.rstrip('.')}." if words else "."
