"""Everything that can go wrong, on one screen, and the one shape it has on the wire.

ApiError                     status, message, param, code: an OpenAI error object
├── raised by request bodies, auth and the app themselves
└── made by `as_api_error` from
    ├── werkzeug HTTPException     its own status (404, 405, 413 …)
    ├── RequestError               400  what the service cannot do, by field
    ├── HistoryError, EffortError  400  what the conversation core cannot read
    ├── UnknownModel               404
    ├── ModelNotAllowed            403
    ├── WrongType                  400
    ├── ModelPinned                409
    ├── ModelLoading               503  with Retry-After
    ├── InsufficientMemory         503  with Retry-After, unless waiting cannot help
    ├── EngineRefused              400  what the engine cannot run
    ├── EngineBusy                 503  with Retry-After
    ├── EngineFailed               503  with Retry-After: it broke and is being restarted
    ├── EngineStopped              503  with Retry-After if the whole server is being stopped
    ├── EngineError                500  in the engine's own words
    └── anything else              500  with an id; the cause is in the log under the same id, and only there
"""

from __future__ import annotations

import logging
import uuid
from typing import TYPE_CHECKING, Any

from werkzeug.exceptions import HTTPException, MethodNotAllowed

from mlx_backend.conversation.effort import EffortError
from mlx_backend.conversation.history import HistoryError
from mlx_backend.errors import (
    EngineBusy,
    EngineError,
    EngineFailed,
    EngineRefused,
    EngineStopped,
    RequestError,
)
from mlx_backend.registry.errors import (
    InsufficientMemory,
    ModelLoading,
    ModelNotAllowed,
    ModelPinned,
    UnknownModel,
    WrongType,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        numbers: Mapping[str, int] | None = None,
    ) -> None:
        """`numbers` are those of the message, for programs: they stand beside it."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers
        self.numbers = dict(numbers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The envelope every OpenAI client knows."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        told = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": told | self.numbers}


def later(seconds: int | None, message: str, code: str, param: str | None = None, **numbers: int) -> ApiError:
    """Make the 503 that says when to come back, if that would help."""
    if seconds is None:
        return ApiError(503, message, param=param, code=code, numbers=numbers)
    retry = (("Retry-After", str(seconds)),)
    told = {**numbers, "retry_after": seconds}
    return ApiError(503, message, param=param, code=code, headers=retry, numbers=told)


def shutting_down(message: str) -> ApiError:
    """Make the 503 of a server that is being stopped: another one may soon be in its place."""
    return later(10, message, "shutting_down")


def refuse(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Make the 400 that names a field."""
    return ApiError(400, message, param=param, code=code)


# What requests call what the engine calls otherwise.
_FIELDS: Mapping[str | None, str] = {"adapter": "adapters"}


def as_api_error(error: Exception) -> ApiError:
    """Map what was raised to what is sent. Never lets an unexpected exception's own words out."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, str(error), param=error.param, code=error.code, numbers=error.numbers)
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
        case ModelLoading():
            return later(error.retry_after, str(error), "model_loading", "model", percent=error.percent)
        case InsufficientMemory():
            return later(error.retry_after, str(error), "no_room", "model")
        case EngineRefused():
            return refuse(str(error), _FIELDS.get(error.field, error.field))
        case EngineBusy():
            return later(error.retry_after, str(error), "queue_full")
        case EngineFailed():
            return later(error.retry_after, str(error), "engine_failed")
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
