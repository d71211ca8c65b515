"""The credential form, parsed once: Dify's raw strings become one frozen model, or a sentence for the user.

A field that is left to the server (`auto`, or empty) is None here; `model_schema` asks the server for it.
"""

from __future__ import annotations

import re
import unicodedata
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self
from urllib.parse import urlsplit, urlunsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from dify_mlx_provider.upstream.sse import join_surrogates
from mlx_backend.conversation.effort import EffortError, parse_effort

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic_core import ErrorDetails

AUTO = "auto"
DEFAULT_MAX_CHUNKS = 32
"""Texts in one request for vectors: enough to keep a server busy, and never long without an answer."""

EXAMPLE = "http://host.docker.internal:8080/v1"
# What people copy from a manual or a browser instead of the address itself; the longest first.
_ENDPOINTS = (
    *("/chat/completions", "/completions", "/embeddings", "/responses", "/messages", "/rerank"),
    *("/models", "/tokenize"),
)
# http:/host and http//host are meant as http://host.
_SLIPS = re.compile(r"^(https?)(?::/+|//+)", re.IGNORECASE)
_ROOT_PAGES = ("/health", "/docs", "/metrics")
_INVISIBLE = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff"))


class ServerKind(StrEnum):
    """A make of server, as the form calls it."""

    MLX_BACKEND = "mlx-backend"
    MLX_LM = "mlx_lm.server"
    MLX_VLM = "mlx-vlm"
    RAPID_MLX = "rapid-mlx"
    LM_STUDIO = "lm-studio"
    LLAMA_CPP = "llama.cpp"
    OLLAMA = "ollama"
    VLLM = "vllm"
    OTHER = "other"


class CredentialsError(ValueError):
    """A field of the form cannot be used; the text says which and why."""


# -- one field ---------------------------------------------------------------------------------------
# A parser raises CredentialsError with a sentence, or ValueError with what the field must be.


def parse_base_url(text: str) -> str:
    """Bring a server's address to `http://host:port/v1`, however it was typed."""
    # Full-width letters come from an input method, invisible ones from a web page.
    typed = unicodedata.normalize("NFKC", text).translate(_INVISIBLE).strip().strip("\"'<>`").strip()
    typed = _SLIPS.sub(r"\1://", typed)
    if not typed:
        raise CredentialsError(f"The server's address is missing. Example: {EXAMPLE}")
    address = _with_brackets(typed if "://" in typed else f"http://{typed.lstrip('/')}")
    try:
        parts = urlsplit(address)
        is_usable = (
            parts.scheme in ("http", "https")
            and _is_possible_host(parts.hostname or "")
            and (parts.port is None or parts.port > 0)
            and not re.search(r"\s", address)
        )
    except ValueError:
        is_usable = False
    if "@" in address.partition("://")[2].split("/")[0]:
        raise CredentialsError(
            "The address holds a user name or a password. Remove them (everything before the @), and enter the "
            "key in the field API key."
        )
    if not is_usable:
        shown = typed if len(typed) <= 200 else typed[:199] + "…"
        raise CredentialsError(f"{shown!r} is not a server address. Example: {EXAMPLE}")
    if parts.query:
        raise CredentialsError(
            f"The address must not have a part after a question mark; remove it. Example: {EXAMPLE}"
        )
    return urlunsplit((parts.scheme, parts.netloc.rstrip(":").lower(), _base_path(parts.path), "", ""))


def parse_api_key(text: str) -> str:
    """Return the key without what came with it when it was copied; an error does not repeat it."""
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


def _is_possible_host(name: str) -> bool:
    """Whether a name can be looked up at all: its parts have 1 to 63 characters."""
    return len(name) < 254 and all(0 < len(part) < 64 for part in name.removesuffix(".").split("."))


def _base_path(path: str) -> str:
    path = re.sub(r"/{2,}", "/", path).rstrip("/")
    for endpoint in _ENDPOINTS:
        if path.endswith(endpoint):
            path = path.removesuffix(endpoint).rstrip("/")
            break
    if path in _ROOT_PAGES:
        path = ""
    return path or "/v1"


def _parse_number(value: str | float) -> float:
    typed = unicodedata.normalize("NFKC", str(value)).replace(",", "").replace("_", "").strip().lower()
    number = 0.0
    with suppress(ValueError):
        number = float(typed)
    if not 0 < number < 1e9:
        raise ValueError("a positive number")
    return number


def _parse_count(value: str | int) -> int:
    typed = unicodedata.normalize("NFKC", str(value)).strip().lower()
    # Of a context, 128k means 131072.
    scale = 1024 if typed.endswith("k") else 1
    with suppress(ValueError):
        count = _parse_number(typed.removesuffix("k") if scale > 1 else typed) * scale
        if 1 <= count < 1e9:
            return int(count)
    raise ValueError("a positive number of less than ten digits")


def _parse_prefix(text: str) -> str:
    """A prefix of texts. Forms strip the space that most prefixes end with."""
    text = text.replace("\\n", "\n")
    return f"{text} " if text.endswith(":") else text


def _parse_support(value: str | bool) -> bool:
    if value not in ("supported", "unsupported", True, False):
        raise ValueError("auto, supported or unsupported")
    return value in ("supported", True)


def _parse_effort(text: str) -> str:
    try:
        return parse_effort(text).value
    except EffortError:
        raise ValueError("auto, none, low, medium or high") from None


_Seconds = Annotated[float, BeforeValidator(_parse_number)]
_Count = Annotated[int, BeforeValidator(_parse_count)]
_Support = Annotated[bool, BeforeValidator(_parse_support)]
_Prefix = Annotated[str, BeforeValidator(_parse_prefix)]


# -- the form ----------------------------------------------------------------------------------------


class Credentials(BaseModel):
    """Where the server is, and what the user says of the model. Sizes are tokens, times are seconds.

    A field's title is its label in the form; errors name it.
    """

    # A form holds a key: no error of pydantic's may repeat what stood in a field.
    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    base_url: Annotated[str, BeforeValidator(parse_base_url)] = ""
    api_key: Annotated[str, BeforeValidator(parse_api_key)] = Field(default="", repr=False)
    timeout: _Seconds = Field(default=600.0, title="Timeout")
    connect_timeout: _Seconds = Field(default=10.0, title="Connection timeout")
    server_kind: ServerKind | None = Field(default=None, title="Server")
    display_name: str = ""
    context_size: _Count | None = Field(default=None, title="Context size")
    max_output_tokens: _Count | None = Field(default=None, title="Maximum output tokens")
    tool_calling: _Support | None = Field(default=None, title="Tool calling")
    vision: _Support | None = Field(default=None, title="Image input")
    structured_output: _Support | None = Field(default=None, title="Structured output")
    reasoning: Literal["effort", "switch", "none"] | None = Field(default=None, title="Reasoning")
    effort: Annotated[str, BeforeValidator(_parse_effort)] | None = Field(
        default=None, title="Default reasoning effort"
    )
    max_chunks: _Count = Field(default=DEFAULT_MAX_CHUNKS, title="Texts per request")
    query_prefix: _Prefix = ""
    document_prefix: _Prefix = ""

    @classmethod
    def from_form(cls, form: Mapping[str, Any]) -> Self:
        """Parse Dify's form. Empty fields take their defaults; raises CredentialsError."""
        try:
            return cls.model_validate({"base_url": ""} | _filled_fields(form))
        except ValidationError as error:
            # Without a cause: Dify's SDK logs tracebacks, and pydantic's error still holds the input.
            raise _credentials_error(error.errors()[0]) from None

    @classmethod
    def from_form_leniently(cls, form: Mapping[str, Any]) -> Self:
        """Parse a form, and take fields that cannot be used as empty. Never raises.

        For questions that must be answered whatever stands in the form. Without a usable address, base_url is "".
        """
        fields = _filled_fields(form)
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            unusable = {detail["loc"][0] for detail in error.errors()}
            return cls.model_validate({name: text for name, text in fields.items() if name not in unusable})


_FORM_NAMES = {"base_url": "endpoint_url"}
"""The form's names of fields, where they differ from ours."""

_FREE_TEXT = ("base_url", "api_key", "display_name", "query_prefix", "document_prefix")
"""Fields in which `auto` is a word like any other."""


def _filled_fields(form: Mapping[str, Any]) -> dict[str, str]:
    """The fields that say something: what is empty or `auto` is left to the defaults, or to the server."""
    values = {name: form.get(_FORM_NAMES.get(name, name)) for name in Credentials.model_fields}
    texts = {name: join_surrogates(str(value)).strip() for name, value in values.items() if value is not None}
    return {
        name: text for name, text in texts.items() if text and (name in _FREE_TEXT or text.lower() != AUTO)
    }


def _credentials_error(error: ErrorDetails) -> CredentialsError:
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, CredentialsError):
        return cause
    # For a choice pydantic itself says what was expected: "'effort', 'switch' or 'none'".
    expected = str(cause) if cause is not None else f"auto, {error['ctx']['expected'].replace("'", '')}"
    title = Credentials.model_fields[str(error["loc"][0])].title
    return CredentialsError(f"{title} must be {expected}, not {error['input']!r}.")
