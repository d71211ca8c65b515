"""Everything that can go wrong, on one screen: what was raised, and what is sent to the client.

ApiError                     status, message, param, code
├── raised by request bodies and by server/
└── made by `as_api_error` from
    ├── RequestError               400  what the service cannot do, by field
    ├── HistoryError, EffortError  400  what the conversation core cannot parse
    ├── UnknownModel               404
    ├── ModelNotAllowed            403
    ├── WrongType                  400
    ├── ModelPinned                409
    ├── ModelLoading               503  with Retry-After
    ├── InsufficientMemory         503  with Retry-After, unless waiting cannot help
    ├── ReplySuperseded            409  the conversation has gone on without this reply
    ├── EngineRefused              400  what the engine cannot run
    ├── EngineBusy                 503  with Retry-After
    ├── EngineFailed               503  with Retry-After: it broke and is being restarted
    ├── EngineStopped              503
    ├── EngineError                500  in the engine's own words
    └── anything else              500  with an id; the cause is in the log under the same id, and only there

How an error is written is each API's (`Api` in addresses.py). Knows no HTTP but its status codes and Retry-After.
"""

from __future__ import annotations

import logging
import uuid
from typing import TYPE_CHECKING, Literal

from mlx_backend.conversation.effort import EffortError
from mlx_backend.conversation.history import HistoryError
from mlx_backend.errors import (
    EngineBusy,
    EngineError,
    EngineFailed,
    EngineRefused,
    EngineStopped,
    ReplySuperseded,
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


SUPERSEDED = "superseded"
type LimitKind = Literal["requests", "tokens"]


class ApiError(Exception):
    """A response that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: LimitKind | None = None,
        headers: tuple[tuple[str, str], ...] = (),
        numbers: Mapping[str, int] | None = None,
    ) -> None:
        """`param` is the field to blame, `kind` the limit that was reached.

        `numbers` are those of the message, for programs.
        """
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind
        self.headers = headers
        self.numbers = dict(numbers or {})

    @property
    def placed_message(self) -> str:
        """The message with the field to blame, for an API that has no place of its own for that."""
        return (
            f"{self.param}: {self.message}" if self.param and self.param not in self.message else self.message
        )


def unavailable(
    retry_after: int, message: str, code: str, param: str | None = None, **numbers: int
) -> ApiError:
    """Make a 503 that says in how many seconds to try again."""
    return ApiError(
        503,
        message,
        param=param,
        code=code,
        headers=(("Retry-After", str(retry_after)),),
        numbers={**numbers, "retry_after": retry_after},
    )


def shutting_down(message: str) -> ApiError:
    """Make the 503 of a server that is being stopped: another may soon take its place."""
    return unavailable(10, message, "shutting_down")


def refuse(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Make the 400 that names a field."""
    return ApiError(400, message, param=param, code=code)


# Engine fields that requests have by another name.
_REQUEST_FIELDS: Mapping[str | None, str] = {"adapter": "adapters"}


def as_api_error(error: Exception) -> ApiError:
    """Map what was raised to what is sent. The words of an unexpected exception are never sent."""
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
            return unavailable(error.retry_after, str(error), "model_loading", "model", percent=error.percent)
        case InsufficientMemory():
            if error.retry_after is None:
                return ApiError(503, str(error), param="model", code="no_room")
            return unavailable(error.retry_after, str(error), "no_room", "model")
        case ReplySuperseded():
            return ApiError(409, str(error), code=SUPERSEDED)
        case EngineRefused():
            field = _REQUEST_FIELDS.get(error.field, error.field)
            return ApiError(400, str(error), param=field, code=error.code, numbers=error.numbers)
        case EngineBusy():
            return unavailable(error.retry_after, str(error), "queue_full")
        case EngineFailed():
            return unavailable(error.retry_after, str(error), "engine_failed")
        case EngineStopped():
            return ApiError(503, str(error), code="engine_stopped")
        case EngineError():
            return ApiError(500, str(error), code="engine")
        case _:
            number = uuid.uuid4().hex[:12]
            log.error("internal error %s", number, exc_info=error)
            return ApiError(
                500, f"Internal error {number}: see the server's log under this number.", code="internal"
            )
