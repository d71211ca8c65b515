"""/v1/responses over a WebSocket: each message creates a response, and its events come back as messages.

The last response of a connection can be continued on it, even one that is not stored. A message that is refused
discards that one: its client then sends the whole conversation again.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from mlx_backend.api.addresses import Api
from mlx_backend.api.errors import ApiError
from mlx_backend.api.fields import Refusals, is_one_of
from mlx_backend.api.responses.body import ResponsesBody
from mlx_backend.api.responses.errors import error_object
from mlx_backend.api.responses.objects import SocketError
from mlx_backend.api.responses.stream import ResponseWriter
from mlx_backend.conversation.events import StreamEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mlx_backend.api.responses.body import ParsedRequest
    from mlx_backend.api.responses.store import ConnectionStore, ResponseStore
    from mlx_backend.chat.reply import Reply, ReplyEvent, Usage
    from mlx_backend.chat.reply_group import GroupEvent
    from mlx_backend.chat.service import Service
    from mlx_backend.engine.base import QueueClient

type Create = Callable[
    [ResponsesBody, Service, QueueClient, type[ResponseWriter]], tuple[Reply, ResponseWriter]
]

MAX_SECONDS = 3600.0
"""For which a connection takes messages, as OpenAI's and Open Responses' do."""


class CreateEvent(ResponsesBody):
    """A message. With `generate` = false its conversation is only read: the next message goes on from it."""

    refused: ClassVar[Refusals] = {
        **ResponsesBody.refused,
        "stream": (is_one_of(True), "a WebSocket sends each reply as events. Leave it out"),
    }

    type: Literal["response.create"]
    generate: bool | None = None

    @property
    def is_streamed(self) -> bool:
        """Always."""
        return True

    def request(
        self,
        store: ResponseStore | ConnectionStore,
        owner: str,
        final: Mapping[str, Any] | None = None,
    ) -> ParsedRequest:
        """Return the request. To read a conversation alone, the model says one token that nobody gets."""
        parsed = super().request(store, owner, final)
        return replace(parsed, chat=replace(parsed.chat, max_tokens=1)) if self.generate is False else parsed


class ReadWriter(ResponseWriter):
    """Writes the response to a conversation that is only read: nothing."""

    def feed(self, _event: ReplyEvent | GroupEvent) -> bytes:
        """Write nothing."""
        return b""

    def whole(self, _end: StreamEnd, usage: Usage) -> dict[str, Any]:
        """Return the whole response, which is complete."""
        return super().whole(StreamEnd("stop"), usage)


class ResponsesConnection:
    """Create responses over a WebSocket: each message is one, and each event a message."""

    def __init__(
        self, create: Create, store: ConnectionStore, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._create, self._store, self._clock = create, store, clock
        self._until = clock() + MAX_SECONDS

    def parse(self, message: Any) -> CreateEvent:
        """Parse a message. Raises ApiError."""
        try:
            if self._clock() > self._until:
                raise ApiError(
                    400,
                    f"A connection takes messages for {MAX_SECONDS / 60:.0f} minutes: open a new one.",
                    code="websocket_connection_limit_reached",
                )
            return CreateEvent.parse(message)
        except ApiError:
            self._store.forget()
            raise

    def start(self, body: CreateEvent, service: Service, client: QueueClient) -> tuple[Reply, ResponseWriter]:
        """Start a response."""
        writer = ReadWriter if body.generate is False else ResponseWriter
        return self._create(body, service, client, writer)

    def close(self) -> None:
        """Forget what was only for this connection."""
        self._store.close()


def _error_object(error: ApiError) -> SocketError:
    fields = error_object(error)["error"]
    return {"type": "error", "status": error.status, "error": fields}


SOCKET_API = Api(SocketError, _error_object)
