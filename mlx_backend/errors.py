"""What can go wrong with a request, as exceptions; the texts are for people. Knows no HTTP, no engine and no MLX.

RequestError          the server does not do what the request asks for
EngineError           the engine could not go on
├── EngineRefused     this request cannot be run
├── EngineBusy        the queue is full, or memory is short for now
├── EngineStopped     the engine thread has ended
└── EngineFailed      the engine broke in mid-reply and is being restarted

What is wrong with a model's name is registry/errors.py's; which status a client gets is decided in api/errors.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class RequestError(ValueError):
    """This server does not do what a request asks for; the text is for people, `param` names the field.

    `numbers` are those of the text that a program may want to reckon with.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        numbers: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status
        self.numbers = numbers


class EngineError(Exception):
    """The engine could not go on; the text is for people."""


class EngineRefused(EngineError):
    """This request cannot be run (bad token id, too long …); others are not touched.

    `field` is what of the `GenerationRequest` is wrong, if it is one field.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class EngineBusy(EngineError):
    """The queue is full; try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineStopped(EngineError):
    """The engine thread has ended (shutdown, or it could not be started again)."""


class EngineFailed(EngineError):
    """The engine broke in mid-reply and is being restarted; the same request may well succeed then."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after
