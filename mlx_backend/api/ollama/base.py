"""What every address of this API shares: its error, and how it writes names and times. Knows no endpoint."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from mlx_backend.api.addresses import Api
from mlx_backend.api.ollama.objects import OllamaError
from mlx_backend.errors import CONTEXT_LENGTH_EXCEEDED
from mlx_backend.models.names import LATEST

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_backend.api.errors import ApiError

STREAM_TYPE = "application/x-ndjson"
_WORDS: Mapping[str | None, str] = {
    CONTEXT_LENGTH_EXCEEDED: "the input length exceeds the context length",
    "model_not_found": "model not found",
}
"""By these, which the API's own errors have too, clients know what to do."""


def error_object(error: ApiError) -> OllamaError:
    """Build `{"error": message}`. The API has no field for the place: the message names it."""
    words = _WORDS.get(error.code)
    return {"error": f"{words}: {error.placed_message}" if words else error.placed_message}


OLLAMA = Api(OllamaError, error_object)


def tagged(name: str) -> str:
    """Return a name as it is listed. Open WebUI adds the tag to a name without one, and looks that up in the list."""
    return name if ":" in name else name + LATEST


def as_time(seconds: float) -> str:
    """Write a time, in seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """Return a duration as the API writes it."""
    return round(seconds * 1e9)
