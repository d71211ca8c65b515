"""The credential form, read once: raw strings from Dify become one frozen object, or a sentence for the user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast
from urllib.parse import urlsplit, urlunsplit

if TYPE_CHECKING:
    from collections.abc import Mapping

type Reasoning = Literal["effort", "switch", "none"]

_ENDPOINTS = ("/chat/completions", "/completions", "/models")


class CredentialsError(ValueError):
    """A field of the form cannot be used; the text says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Where the server is, and what is known of the model. Sizes are tokens, `timeout` is seconds."""

    base_url: str
    api_key: str = ""
    timeout: float = 600.0
    context_size: int = 131_072
    max_output_tokens: int = 32_768
    tool_calling: bool = True
    vision: bool = False
    structured_output: bool = False
    reasoning: Reasoning = "effort"

    @classmethod
    def read(cls, form: Mapping[str, Any]) -> Credentials:
        """Read Dify's form. Empty fields take their defaults; raises CredentialsError."""
        given = {key: str(value).strip() for key, value in form.items() if value not in (None, "")}
        reasoning = given.get("reasoning", "effort")
        if reasoning not in ("effort", "switch", "none"):
            raise CredentialsError(f"Reasoning must be effort, switch or none, not {reasoning!r}.")
        api_key = given.get("api_key", "")
        if not (api_key.isascii() and api_key.isprintable()):
            raise CredentialsError("The API key holds characters that a key cannot have. Copy it again.")
        return cls(
            base_url=base_url(given.get("endpoint_url", "")),
            api_key=api_key,
            timeout=_number(given, "timeout", "Timeout", 600.0),
            context_size=int(_number(given, "context_size", "Context size", 131_072)),
            max_output_tokens=int(_number(given, "max_output_tokens", "Maximum output tokens", 32_768)),
            tool_calling=given.get("tool_calling", "supported") == "supported",
            vision=given.get("vision", "unsupported") == "supported",
            structured_output=given.get("structured_output", "unsupported") == "supported",
            reasoning=cast("Reasoning", reasoning),
        )


def base_url(text: str) -> str:
    """Bring a server's address to `http://host:port/v1`, however it was typed."""
    if not text:
        raise CredentialsError(
            "The server's address is missing. Example: http://host.docker.internal:8080/v1"
        )
    address = text if "://" in text else f"http://{text}"
    parts = urlsplit(address)
    try:
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable or " " in address:
        raise CredentialsError(
            f"{text!r} is not a server address. Example: http://host.docker.internal:8080/v1"
        )
    path = parts.path.rstrip("/")
    for endpoint in _ENDPOINTS:
        path = path.removesuffix(endpoint)
    return urlunsplit((parts.scheme, parts.netloc, path or "/v1", "", ""))


def _number(given: Mapping[str, str], field: str, label: str, default: float) -> float:
    text = given.get(field)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise CredentialsError(f"{label} must be a positive number, not {text!r}.")
    return number
