"""What can go wrong with a request, as exceptions; the texts are for people. Knows no HTTP, no engine and no MLX.

RequestError          the server does not do what the request asks for
EngineError           the engine could not go on
├── EngineRefused     this request cannot be run
├── EngineBusy        the queue is full, or memory is short for now
├── EngineStopped     the engine thread has ended
└── EngineFailed      the engine broke in the middle of a reply and is being restarted
ReplySuperseded       the conversation has gone on without this reply

Errors about a model's name are in registry/errors.py; api/errors.py decides which HTTP status a client gets.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class RequestError(ValueError):
    """This server does not do what a request asks for. `param` names the field of the request.

    `numbers` holds the figures in the text that a program may want to use.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = None,
        numbers: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.numbers = numbers


CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""The `code` of an error about a prompt that does not fit; OpenAI's."""


def overflow_sentence(field: str, tokens: str, context_length: int) -> str:
    """Say that a field's text is too long as OpenAI does: agents that shorten a conversation look for these words."""
    return (
        f"This model's maximum context length is {context_length} tokens. However, your {field} resulted in {tokens} "
        f"tokens. Please reduce the length of the {field}."
    )


class EngineError(Exception):
    """The engine could not go on."""


class EngineRefused(EngineError):
    """This request cannot be run (bad token id, too long …); other requests are not affected.

    `field` names the field of the `GenerationRequest` that is wrong, if it is a single one; `code` and `numbers` are
    for programs.
    """

    def __init__(
        self,
        message: str,
        field: str | None = None,
        code: str | None = None,
        numbers: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.field = field
        self.code = code
        self.numbers = numbers


class EngineBusy(EngineError):
    """The queue is full or memory is short; try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineStopped(EngineError):
    """The engine thread has ended (shutdown, or it could not be restarted)."""


class EngineFailed(EngineError):
    """The engine broke in the middle of a reply and is being restarted; the same request may succeed then."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ReplySuperseded(Exception):
    """A reply was ended because a newer request continues what it had said: no client waits for it."""


MAX_QUOTE_LENGTH = 300
"""Characters of another program's error that are repeated: a server may have written them."""
_ERROR_NUMBER = re.compile(r"\[Errno -?\d+\] ")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text for people, not all of a long one; else its class's name.

    Without its full stop, and without the number that the system has for it.
    """
    lines = _ERROR_NUMBER.sub("", str(error)).strip().splitlines()
    line = lines[0].rstrip(" .:?") if lines else type(error).__name__
    return line if len(line) <= MAX_QUOTE_LENGTH else line[: MAX_QUOTE_LENGTH - 1] + "…"
