"""The credential form, read once: raw strings from Dify become one frozen object, or a sentence for the user.

What the form leaves to the server (`auto`, or an empty field) is None here; `model_schema` asks the server for it.
"""

from __future__ import annotations

import re
import unicodedata
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast
from urllib.parse import urlsplit, urlunsplit

from dify_mlx_provider.upstream.server_kinds import Kind
from mlx_backend.conversation import effort as efforts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

type Reasoning = Literal["effort", "switch", "none"]

AUTO = "auto"
MAX_CHUNKS = 32
"""Texts of a request for vectors: enough to keep a server busy, and never long without an answer."""

EXAMPLE = "http://host.docker.internal:8080/v1"
# What people copy from a manual or a browser instead of the address itself; the longest first.
_ENDPOINTS = (
    *("/chat/completions", "/completions", "/embeddings", "/responses", "/messages", "/rerank"),
    *("/models", "/tokenize"),
)
_SLIPS = re.compile(r"^(https?)(?::/+|//+)", re.IGNORECASE)  # http:/host, http//host
_ROOT_PAGES = ("/health", "/docs", "/metrics")
_INVISIBLE = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff"))


class CredentialsError(ValueError):
    """A field of the form cannot be used; the text says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Where the server is, and what the user says of the model. Sizes are tokens, times are seconds."""

    base_url: str
    api_key: str = field(default="", repr=False)
    timeout: float = 600.0
    connect_timeout: float = 10.0
    server_kind: Kind | None = None
    display_name: str = ""
    context_size: int | None = None
    max_output_tokens: int | None = None
    tool_calling: bool | None = None
    vision: bool | None = None
    structured_output: bool | None = None
    reasoning: Reasoning | None = None
    effort: str | None = None
    max_chunks: int = MAX_CHUNKS
    query_prefix: str = ""
    document_prefix: str = ""

    @classmethod
    def read(cls, form: Mapping[str, Any]) -> Credentials:
        """Read Dify's form. Empty fields take their defaults; raises CredentialsError."""
        texts = {"endpoint_url": ""} | _filled(form)
        return cls(**{_attribute(name): _READERS[name](text) for name, text in texts.items()})

    @classmethod
    def legible(cls, form: Mapping[str, Any]) -> Credentials:
        """Read what can be read of a form: for questions that are answered whatever stands in it. Never raises.

        Without an address that can be read there is nobody to ask: the address is "".
        """
        values: dict[str, Any] = {"base_url": ""}
        for name, text in _filled(form).items():
            with suppress(CredentialsError):
                values[_attribute(name)] = _READERS[name](text)
        return cls(**values)


def base_url(text: str) -> str:
    """Bring a server's address to `http://host:port/v1`, however it was typed."""
    # Full-width letters come from an input method, invisible ones from a web page.
    typed = unicodedata.normalize("NFKC", text).translate(_INVISIBLE).strip().strip("\"'<>`").strip()
    typed = _SLIPS.sub(r"\1://", typed)
    if not typed:
        raise CredentialsError(f"The server's address is missing. Example: {EXAMPLE}")
    address = _with_brackets(typed if "://" in typed else f"http://{typed.lstrip('/')}")
    try:
        parts = urlsplit(address)
        usable = (
            parts.scheme in ("http", "https")
            and _may_be_host(parts.hostname or "")
            and (parts.port is None or parts.port > 0)
            and not re.search(r"\s", address)
        )
    except ValueError:
        usable = False
    if "@" in address.partition("://")[2].split("/")[0]:
        raise CredentialsError(
            "The address holds a user name or a password. Take them out (what stands before the @), and enter the "
            "key in the field API key."
        )
    if not usable:
        shown = typed if len(typed) <= 200 else typed[:199] + "…"
        raise CredentialsError(f"{shown!r} is not a server address. Example: {EXAMPLE}")
    if parts.query:
        raise CredentialsError(
            f"An address has no part behind a question mark; take it out. Example: {EXAMPLE}"
        )
    return urlunsplit((parts.scheme, parts.netloc.rstrip(":").lower(), _path(parts.path), "", ""))


def api_key(text: str) -> str:
    """Return the key as it was meant; raise CredentialsError without repeating it."""
    key = text.translate(_INVISIBLE).strip()
    if key.lower().startswith("bearer "):
        key = key[7:].strip()
    if not (key.isascii() and key.isprintable()):
        raise CredentialsError(
            "The API key holds characters that a key cannot have, such as a line break or full-width letters. "
            "Copy it again."
        )
    return key


def _with_brackets(address: str) -> str:
    """An IPv6 address needs brackets before a port can follow; `::1` alone is understood too."""
    scheme, _, rest = address.partition("://")
    host, slash, path = rest.partition("/")
    if host.count(":") > 1 and not host.startswith("[") and "@" not in host:
        host = f"[{host}]"
    return f"{scheme.lower()}://{host}{slash}{path}"


def _may_be_host(name: str) -> bool:
    """Whether a name can be looked up at all: its parts have 1 to 63 characters."""
    return len(name) < 254 and all(0 < len(part) < 64 for part in name.removesuffix(".").split("."))


def _path(path: str) -> str:
    path = re.sub(r"/{2,}", "/", path).rstrip("/")
    for endpoint in _ENDPOINTS:
        if path.endswith(endpoint):
            path = path.removesuffix(endpoint).rstrip("/")
            break
    if path in _ROOT_PAGES:
        path = ""
    return path or "/v1"


def _filled(form: Mapping[str, Any]) -> dict[str, str]:
    """The fields that say something: what is empty or `auto` is left to the defaults, or to the server."""
    texts = {name: str(form[name]).strip() for name in _READERS if form.get(name) is not None}
    return {name: text for name, text in texts.items() if text and (name in _FREE or text.lower() != AUTO)}


def _attribute(name: str) -> str:
    return "base_url" if name == "endpoint_url" else name


def _number(label: str, text: str) -> float:
    typed = unicodedata.normalize("NFKC", text).replace(",", "").replace("_", "").strip().lower()
    try:
        number = float(typed)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise CredentialsError(f"{label} must be a positive number, not {text!r}.")
    return number


def _count(label: str, text: str) -> int:
    typed = unicodedata.normalize("NFKC", text).strip().lower()
    # 128k means 131072 to everybody who writes it of a context.
    scale = 1024 if typed.endswith("k") else 1
    with suppress(CredentialsError):
        count = _number(label, typed.removesuffix("k") if scale > 1 else typed) * scale
        if 1 <= count < 1e9:
            return int(count)
    raise CredentialsError(f"{label} must be a positive number of less than ten digits, not {text!r}.")


def _prefix(text: str) -> str:
    """What stands before a text. Forms lose the blank that most prefixes end with."""
    text = text.replace("\\n", "\n")
    return f"{text} " if text.endswith(":") else text


def _supported(label: str, text: str) -> bool:
    if text not in ("supported", "unsupported"):
        raise CredentialsError(f"{label} must be auto, supported or unsupported, not {text!r}.")
    return text == "supported"


def _reasoning(text: str) -> Reasoning:
    if text not in ("effort", "switch", "none"):
        raise CredentialsError(f"Reasoning must be auto, effort, switch or none, not {text!r}.")
    return cast("Reasoning", text)


def _effort(text: str) -> str:
    try:
        return efforts.parse(text).value
    except efforts.EffortError as error:
        raise CredentialsError(
            f"Default reasoning effort must be auto, none, low, medium or high, not {text!r}."
        ) from error


def _kind(text: str) -> Kind:
    try:
        return Kind(text)
    except ValueError:
        kinds = ", ".join(Kind)
        raise CredentialsError(f"Server must be auto or one of {kinds}, not {text!r}.") from None


_READERS: Mapping[str, Callable[[str], Any]] = {
    "endpoint_url": base_url,
    "api_key": api_key,
    "timeout": partial(_number, "Timeout"),
    "connect_timeout": partial(_number, "Connection timeout"),
    "server_kind": _kind,
    "display_name": str,
    "context_size": partial(_count, "Context size"),
    "max_output_tokens": partial(_count, "Maximum output tokens"),
    "tool_calling": partial(_supported, "Tool calling"),
    "vision": partial(_supported, "Image input"),
    "structured_output": partial(_supported, "Structured output"),
    "reasoning": _reasoning,
    "effort": _effort,
    "max_chunks": partial(_count, "Texts per request"),
    "query_prefix": _prefix,
    "document_prefix": _prefix,
}
"""The form's fields, and how each is read. Each raises CredentialsError."""

_FREE = ("endpoint_url", "api_key", "display_name", "query_prefix", "document_prefix")
"""Fields in which `auto` is a word like any other."""
