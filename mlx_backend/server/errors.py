"""What was raised while a request was handled, as an ApiError: werkzeug's exceptions, and a server that is draining."""

from __future__ import annotations

from werkzeug.exceptions import HTTPException

from mlx_backend.api import errors
from mlx_backend.api.errors import ApiError
from mlx_backend.errors import EngineBusy, EngineStopped
from mlx_backend.preparation import PreparationCancelled

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that has left. No client reads it; it is for the log of a proxy in between."""


def as_api_error(error: Exception, *, is_draining: bool) -> ApiError:
    """Map what was raised to what is sent. An engine that stops with its server has not failed."""
    match error:
        case HTTPException():
            return ApiError(error.code or 500, error.description or error.name)
        case PreparationCancelled(is_stopping=False):
            return ApiError(CLIENT_CLOSED_REQUEST, "The client left while its request was being prepared.")
        case PreparationCancelled():
            return errors.shutting_down(
                "The server is shutting down and did not begin this reply. Send the request again later."
            )
        case EngineStopped() if is_draining:
            return errors.shutting_down(
                "The server is shutting down and did not finish this reply. Send the request again later."
            )
        case RuntimeError() if "start new thread" in str(error):  # Python has no other way to tell
            return errors.as_api_error(EngineBusy("The system allows this server no further threads now."))
        case _:
            return errors.as_api_error(error)
