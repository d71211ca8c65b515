"""Everything that can go wrong, on one screen, and the one shape it has on the wire.

ApiError                     status, message, param, code: an OpenAI error object
├── raised by schemas, auth and the app themselves
└── made by `as_api_error` from
    ├── werkzeug HTTPException     its own status (404, 405, 413 …)
    ├── RequestError               400  what the service cannot do, by field
    ├── HistoryError, EffortError  400  what the conversation core cannot read
    ├── UnknownModel               404
    ├── ModelNotAllowed            403
    ├── WrongType                  400
    ├── ModelPinned                409
    ├── ModelLoading, NoRoom       503  with Retry-After
    ├── EngineRefused              400  what the engine cannot run
    ├── EngineBusy                 503  with Retry-After
    ├── EngineFailed               503  with Retry-After: it broke and is being restarted
    ├── EngineStopped              503
    ├── EngineError                500  in the engine's own words
    └── anything else              500  with an id; the cause is in the log under the same id, and only there
"""

from __future__ import annotations

import logging
import uuid
from typing import Any

from werkzeug.exceptions import HTTPException, MethodNotAllowed

from mlx_backend.conversation.effort import EffortError
from mlx_backend.conversation.history import HistoryError
from mlx_backend.engine.base import EngineBusy, EngineError, EngineFailed, EngineRefused, EngineStopped
from mlx_backend.models.errors import (
    ModelLoading,
    ModelNotAllowed,
    ModelPinned,
    NoRoom,
    UnknownModel,
    WrongType,
)
from mlx_backend.service import RequestError

log = logging.getLogger(__name__)


class ApiError(Exception):
    """One reply that is not an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        """The envelope every OpenAI client knows."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code},
        }


def refuse(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Make the 400 that names a field."""
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: Exception) -> ApiError:
    """Map what was raised to what is sent. Never lets an unexpected exception's own words out."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(error.status, str(error), param=error.param, code=error.code)
        case HistoryError() | EffortError():
            return refuse(str(error), error.param)
        case UnknownModel():
            return ApiError(404, str(error), param="model", code="model_not_found")
        case WrongType():
            return refuse(str(error), "model", "wrong_model_type")
        case ModelPinned():
            return ApiError(409, str(error), param="model", code="model_pinned")
        case ModelNotAllowed():
            return ApiError(403, str(error), param="model", code="model_not_allowed")
        case ModelLoading() | NoRoom():
            code = "model_loading" if isinstance(error, ModelLoading) else "no_room"
            seconds = error.retry_after
            wait = () if seconds is None else (("Retry-After", str(seconds)),)
            return ApiError(503, str(error), param="model", code=code, headers=wait)
        case EngineRefused():
            return refuse(str(error))
        case EngineBusy():
            retry = (("Retry-After", str(error.retry_after)),)
            return ApiError(503, str(error), code="queue_full", headers=retry)
        case EngineFailed():
            retry = (("Retry-After", str(error.retry_after)),)
            return ApiError(503, str(error), code="engine_failed", headers=retry)
        case EngineStopped():
            return ApiError(503, str(error), code="engine_stopped")
        case EngineError():
            return ApiError(500, str(error), code="engine")
        case MethodNotAllowed():
            allowed = ", ".join(sorted(error.valid_methods or ()))
            message = f"This address does not know that method; it knows {allowed}."
            return ApiError(405, message, headers=(("Allow", allowed),))
        case HTTPException():
            return ApiError(error.code or 500, error.description or error.name)
        case _:
            number = uuid.uuid4().hex[:12]
            log.error("internal error %s", number, exc_info=error)
            return ApiError(
                500,
                f"Internal error {number}: the server's log says more under this number.",
                code="internal",
            )
