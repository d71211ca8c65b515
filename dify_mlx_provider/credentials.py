"""The credential form, read once: raw strings from Dify become one frozen object, or a sentence for the user.

What the form leaves to the server (`auto`, or an empty field) is None here; `model_schema` asks the server for it.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast
from urllib.parse import urlsplit, urlunsplit

from mlx_backend.conversation import effort as efforts

from .servers import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        given = {
            key: text for key, value in form.items() if value is not None and (text := str(value).strip())
        }
        context_size = _number(given, "context_size", "Context size", whole=True)
        max_chunks = _number(given, "max_chunks", "Texts per request", whole=True)
        max_output = _number(given, "max_output_tokens", "Maximum output tokens", whole=True)
        return cls(
            base_url=base_url(given.get("endpoint_url", "")),
            api_key=api_key(given.get("api_key", "")),
            timeout=_number(given, "timeout", "Timeout") or 600.0,
            connect_timeout=_number(given, "connect_timeout", "Connection timeout") or 10.0,
            server_kind=_kind(given.get("server_kind", AUTO)),
            display_name=given.get("display_name", ""),
            context_size=None if context_size is None else int(context_size),
            max_output_tokens=None if max_output is None else int(max_output),
            tool_calling=_supported(given, "tool_calling", "Tool calling"),
            vision=_supported(given, "vision", "Image input"),
            structured_output=_supported(given, "structured_output", "Structured output"),
            reasoning=_reasoning(given.get("reasoning", AUTO)),
            effort=_effort(given.get("effort", AUTO)),
            max_chunks=int(max_chunks or MAX_CHUNKS),
            query_prefix=_prefix(form.get("query_prefix")),
            document_prefix=_prefix(form.get("document_prefix")),
        )


def base_url(text: str) -> str:
    """Bring a server's address to `http://host:port/v1`, however it was typed."""
    # Full-width letters come from an input method, invisible ones from a web page.
    typed = unicodedata.normalize("NFKC", text).translate(_INVISIBLE).strip().strip("\"'<>`").strip()
    if not typed:
        raise CredentialsError(f"The server's address is missing. Example: {EXAMPLE}")
    address = _with_brackets(typed if "://" in typed else f"http://{typed.lstrip('/')}")
    try:
        parts = urlsplit(address)
        usable = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
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
        raise CredentialsError(f"{typed!r} is not a server address. Example: {EXAMPLE}")
    if parts.query:
        raise CredentialsError(
            f"An address has no part behind a question mark; take '?{parts.query}' out. Example: {EXAMPLE}"
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


def _path(path: str) -> str:
    path = re.sub(r"/{2,}", "/", path).rstrip("/")
    for endpoint in _ENDPOINTS:
        if path.endswith(endpoint):
            path = path.removesuffix(endpoint).rstrip("/")
            break
    if path in _ROOT_PAGES:
        path = ""
    return path or "/v1"


def _number(given: Mapping[str, str], field: str, label: str, *, whole: bool = False) -> float | None:
    text = given.get(field)
    if text is None or text.lower() == AUTO:
        return None
    typed = unicodedata.normalize("NFKC", text).replace(",", "").replace("_", "").strip().lower()
    # 128k means 131072 to everybody who writes it of a context.
    scale = 1024 if whole and typed.endswith("k") else 1
    try:
        number = float(typed.removesuffix("k") if scale > 1 else typed) * scale
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9 or (whole and number < 1):
        raise CredentialsError(f"{label} must be a positive number, not {text!r}.")
    return number


def _prefix(value: Any) -> str:
    """What stands before a text. Forms lose the blank that most prefixes end with."""
    text = str(value or "").strip().replace("\\n", "\n")
    return f"{text} " if text.endswith(":") else text


def _supported(given: Mapping[str, str], field: str, label: str) -> bool | None:
    match given.get(field, AUTO):
        case "auto":
            return None
        case "supported":
            return True
        case "unsupported":
            return False
        case other:
            raise CredentialsError(f"{label} must be auto, supported or unsupported, not {other!r}.")


def _reasoning(text: str) -> Reasoning | None:
    if text == AUTO:
        return None
    if text not in ("effort", "switch", "none"):
        raise CredentialsError(f"Reasoning must be auto, effort, switch or none, not {text!r}.")
    return cast("Reasoning", text)


def _effort(text: str) -> str | None:
    if text == AUTO:
        return None
    try:
        return efforts.parse(text).value
    except efforts.EffortError as error:
        raise CredentialsError(
            f"Default reasoning effort must be auto, none, low, medium or high, not {text!r}."
        ) from error


def _kind(text: str) -> Kind | None:
    if text == AUTO:
        return None
    try:
        return Kind(text)
    except ValueError:
        kinds = ", ".join(Kind)
        raise CredentialsError(f"Server must be auto or one of {kinds}, not {text!r}.") from None
