"""What can go wrong with a server, as classes, and what a server's own error means.

    ServerError
    ├── Unreachable      no server answers at the address
    ├── Unavailable      a server answers, but cannot serve now (5xx, silent, or its answer broke off)
    ├── Overloaded       it asks us to wait (429, or its queue is full)
    ├── KeyRefused       it does not accept our key (401, 403)
    └── Refused          it does not accept the request (other 4xx), or does not speak OpenAI's protocol
        ├── ModelNotFound
        ├── PromptTooLong    the conversation does not fit into the context
        └── NoSuchEndpoint   something answers, but has nothing at the path

Servers state errors in many shapes; each becomes one of these, with a sentence for people. No sentence repeats
anything of the request: neither the key nor the user's text. Knows neither sockets nor Dify (`dify_errors`).

That a prompt is longer than the context, mlx-backend and llama.cpp state in fields of the error, with both numbers; the
others put them into a sentence, each into its own:

    mlx-backend           code context_length_exceeded; prompt_tokens, max_model_len
    llama.cpp             type exceed_context_size_error; n_prompt_tokens, n_ctx
    OpenAI, older vLLM    … maximum context length is C tokens. However, you requested N tokens (P in the messages, …
    vLLM                  … maximum context length is C tokens and your request has P input tokens
    SGLang                … maximum context length of C tokens. You requested a total of N tokens: P tokens from the …
    LM Studio             Trying to keep the first P tokens when context the overflows. However, the model is loaded
                          with context length of only C tokens … or: … (n_keep: P >= n_ctx: C)
    llama-cpp-python      Requested tokens (P) exceed context window of C
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

from dify_mlx_provider.upstream.sse import join_surrogates

MAX_QUOTE_LENGTH = 500
"""Characters of a server's own message that are passed on."""

MAX_LISTED_MODELS = 12
"""Models that are named in a sentence."""

MAX_NAME_LENGTH = 100
"""Characters of a model's name that are shown."""

MIN_TRUNCATED_LENGTH = 16
"""Characters. A text that was refused as too long is cut down to this; if it still is, its length is not the reason."""

_A_MODEL = re.compile(r"\bmodel\b", re.IGNORECASE)
_TOO_LONG = re.compile(
    r"context|too (?:long|large)|maximum|exceed|max_?len|n_ctx|batch size|the model holds", re.IGNORECASE
)
_BUSY_CODES = ("queue_full", "rate_limit", "overloaded")
_EMPTY_MESSAGES = ("", "not found", "method not allowed")

_OVERFLOW_CODES = ("context_length_exceeded", "exceed_context_size")
_PROMPT_FIELDS = ("prompt_tokens", "n_prompt_tokens")
_CONTEXT_FIELDS = ("max_model_len", "n_ctx")

_CONTEXT = r"context[ _](?:length|size|window)|the context holds|n_ctx"
_OVERFLOW_SENTENCES = re.compile(
    rf"(?:{_CONTEXT}).{{0,80}}\b(?:requested|your (?:request|prompt|messages)|not enough)"
    rf"|\b(?:exceeds?|longer than|larger than|greater than|too (?:long|large))\b.{{0,40}}(?:{_CONTEXT})"
    rf"|(?:{_CONTEXT}) (?:was |is )?exceeded|when (?:the )?context (?:the )?overflows|prompt is too long",
    re.IGNORECASE | re.DOTALL,
)
_CONTEXT_NUMBER = re.compile(
    rf"(?:{_CONTEXT})(?:\s+(?:is|of|only))*[:\s(]*(\d+)|(\d+) maximum\b", re.IGNORECASE
)
_PROMPT_NUMBERS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(\d+) (?:tokens )?(?:in|from) the (?:input )?messages",
        r"(\d+) input tokens",
        r"\b(?:request|input|prompt|tokens)\s*\((\d+)",
        r"n_keep: (\d+)",
        r"keep the first (\d+) tokens",
        r"\bprompt (?:has|contains|is too long:) (\d+)",
        r"\brequested (\d+) tokens",
    )
)


class ServerError(Exception):
    """A request failed; the text is for people.

    `retry_after` is the seconds after which the server wants the request again, if it says so.
    """

    retry_after: float | None = None

    @property
    def is_length_error(self) -> bool:
        """Whether the server found a text too long; known by the words that servers use."""
        return _TOO_LONG.search(str(self)) is not None

    def with_retry_after(self, seconds: float | None) -> Self:
        """Return the error with `retry_after`, which the sentence names too."""
        number = "" if seconds is None else f"{seconds:.0f}"
        message = str(self)
        error = self if number in message else type(self)(f"{message.rstrip('.')}; try again in {number} s.")
        error.retry_after = seconds
        return error


class Unreachable(ServerError):
    """No server answers at the address."""


class Unavailable(ServerError):
    """A server answers, but cannot serve now."""


class Overloaded(ServerError):
    """The server asks us to wait."""


class KeyRefused(ServerError):
    """The server does not accept our key."""


class Refused(ServerError):
    """The server does not accept the request."""


class ModelNotFound(Refused):
    """The server does not serve the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextOverflow:
    """A prompt that did not fit, in tokens; None is what the server did not say."""

    prompt_tokens: int | None = None
    context_length: int | None = None


class PromptTooLong(Refused):
    """The conversation does not fit into the context. `overflow` holds the numbers, as far as the server gave them."""

    def __init__(self, message: str, overflow: ContextOverflow | None = None) -> None:
        super().__init__(message)
        self.overflow = overflow or ContextOverflow()


class NoSuchEndpoint(Refused):
    """Something answers, but has nothing at the path."""


def from_status(status: int, body: Any, *, address: str, location: str | None = None) -> ServerError | None:
    """Return the error that a status of 300 or more means; None if no OpenAI-compatible server sent it."""
    message, code = _message_and_code(body)
    if 300 <= status < 400:
        to = f" to {_without_secrets(location)}" if location else ""
        return Refused(f"{address} redirects{to}. Enter the address of the server itself.")
    if code == "model_not_found" or (status == 404 and _A_MODEL.search(message)):
        return ModelNotFound(message or "the server does not serve this model.")
    if status == 407:
        return Refused(
            f"a proxy between Dify and {address} asks for a password. Exclude the server from the proxy."
        )
    if code == "model_not_allowed":
        return Refused(message)
    if status in (401, 403):
        return KeyRefused(
            f"the server at {address} refused the API key{quote(message)} Enter the key the server was started with."
        )
    if (overflow := parse_context_overflow(message, _error_object(body))) is not None:
        return PromptTooLong(message or "the prompt is longer than the context.", overflow)
    if status == 429 or (status == 503 and code.startswith(_BUSY_CODES)):
        return Overloaded(message or "the server is busy; try again in a moment.")
    if status in (502, 504) and not message:
        return Unavailable(
            f"a proxy answers at {address} with status {status}: the server behind it does not. Start it, or enter "
            "its own address."
        )
    if status >= 500:
        return Unavailable(message or f"the server answered with status {status}.")
    if status in (404, 405) and message.lower() in _EMPTY_MESSAGES:
        return None
    return Refused(message or f"the server answered with status {status}.")


def join_names(names: Sequence[str]) -> str:
    """Join models' names for a sentence; a long list is cut, and says by how many."""
    shown = ", ".join(map(shortened_name, names[:MAX_LISTED_MODELS]))
    more = len(names) - MAX_LISTED_MODELS
    return f"{shown}, and {more} more" if more > 0 else shown


def shortened_name(name: str) -> str:
    """Return a model's name, on one line and of a length that fits into a sentence."""
    line = " ".join(join_surrogates(name).split())
    return line if len(line) <= MAX_NAME_LENGTH else line[: MAX_NAME_LENGTH - 1] + "…"


def _without_secrets(location: str) -> str:
    """Remove what an address must not show: a password, and a query, which may hold a token."""
    try:
        parts = urlsplit(location)
    except ValueError:
        return "another address"
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))[:MAX_QUOTE_LENGTH]


def unknown_host(address: str) -> Unreachable:
    """Return the error for a host whose name cannot be looked up."""
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


def parse_context_overflow(message: str, error: Any = None) -> ContextOverflow | None:
    """Return what an error says of a prompt that is too long; None if it is another error.

    `error` is the server's error object, if it sent one.
    """
    fields = error if isinstance(error, Mapping) else {}
    kind = f"{fields.get('type', '')} {fields.get('code', '')}"
    if not any(code in kind for code in _OVERFLOW_CODES) and not _OVERFLOW_SENTENCES.search(message):
        return None
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", message)
    context = _CONTEXT_NUMBER.search(text)
    prompt = next(filter(None, (pattern.search(text) for pattern in _PROMPT_NUMBERS)), None)
    return ContextOverflow(
        prompt_tokens=_count_in(fields, _PROMPT_FIELDS) or (int(prompt[1]) if prompt else None),
        context_length=_count_in(fields, _CONTEXT_FIELDS)
        or (int(context[1] or context[2]) if context else None),
    )


def _count_in(fields: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    counts = (fields.get(name) for name in names)
    return next((count for count in counts if type(count) is int and count > 0), None)


def from_error_object(error: Any) -> ServerError:
    """Return what an error object inside a stream means; there is no status that states its kind."""
    message, code = _message_and_code({"error": error})
    message = message or "the server reported an error."
    kind = f"{error.get('type', '')} {code}" if isinstance(error, Mapping) else ""
    if "model_not_found" in kind:
        return ModelNotFound(message)
    if (overflow := parse_context_overflow(message, error)) is not None:
        return PromptTooLong(message, overflow)
    if "invalid_request" in kind:
        return Refused(message)
    if "rate_limit" in kind or "429" in kind or any(busy in kind for busy in _BUSY_CODES):
        return Overloaded(message)
    if "authentication" in kind or "invalid_api_key" in kind:
        return KeyRefused(message)
    return Unavailable(message)


def _message_and_code(body: Any) -> tuple[str, str]:
    """The server's own message and error code, in any of the shapes servers use."""
    if not isinstance(body, Mapping):
        return "", ""
    error = body.get("error") or body.get("detail") or body.get("message")
    if isinstance(error, Mapping):
        message = error.get("message") or error.get("detail")
        return _shortened(message), str(error.get("code") or "")
    if isinstance(error, Sequence) and not isinstance(error, str):  # FastAPI lists what does not fit
        messages = [entry.get("msg") for entry in error if isinstance(entry, Mapping)]
        return _shortened("; ".join(str(message) for message in messages if message)), ""
    return _shortened(error), str(body.get("code") or "")


def _error_object(body: Any) -> Any:
    """What else a body says of an error: in `error`, or, as older servers have it, the body itself."""
    return body.get("error") or body if isinstance(body, Mapping) else None


def _shortened(message: Any) -> str:
    """A server's message without a traceback, cut to a length people read."""
    text = join_surrogates(str(message or "")).split("Traceback (most recent call last)")[0].strip()
    return text if len(text) <= MAX_QUOTE_LENGTH else text[: MAX_QUOTE_LENGTH - 1] + "…"


def quote(message: str) -> str:
    """Return a server's own message as the end of a sentence."""
    return f": {message.rstrip('.')}." if message else "."
