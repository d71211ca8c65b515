"""One reply on its way to its client: whole or streamed, kept alive, cancelled, logged.

Both ways consume the same events. Whatever happens, the engine is free afterwards and the log has one line.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from werkzeug import Response

from mlx_backend.api.errors import SUPERSEDED
from mlx_backend.conversation.events import StreamEnd
from mlx_backend.engine.base import Progress
from mlx_backend.errors import EngineStopped
from mlx_backend.server.errors import CLIENT_CLOSED_REQUEST
from mlx_backend.server.request_log import LEFT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from mlx_backend.api.addresses import OnDisconnect
    from mlx_backend.api.errors import ApiError
    from mlx_backend.api.writers import ReplyWriter
    from mlx_backend.chat.reply import Reply, ReplyEvent
    from mlx_backend.chat.reply_group import GroupEvent, ReplyGroup
    from mlx_backend.server.metrics import TokenClock
    from mlx_backend.server.pump import Pump
    from mlx_backend.server.request_log import RequestRecord


class ClientLeft(Exception):
    """The client disconnected before the reply was finished."""


class ReplyResponder:
    """Turns a running reply into a response. Call `whole` or `stream`, once."""

    def __init__(
        self,
        reply: Reply | ReplyGroup,
        writer: ReplyWriter,
        log: ReplyLog,
        tokens: TokenClock,
        *,
        keepalive_seconds: float,
        on_disconnect: OnDisconnect,
        pump: Pump | None,
        explain: Callable[[Exception], ApiError],
    ) -> None:
        """With a `pump` the reply's events are taken on its thread; without one whoever wants them waits for them."""
        self._reply = reply
        self._writer = writer
        self._log = log
        self._tokens = tokens
        self._keepalive_seconds = keepalive_seconds
        self._on_disconnect = on_disconnect
        self._pump = pump
        self._explain = explain
        self._left = False

    def whole(self) -> Response:
        """Wait for the end and answer with one body."""
        try:
            events = (event for event in self._all_events() if event and not isinstance(event, Progress))
            body = self._writer.fold(events, self._reply.usage)
        except ClientLeft:
            return Response(status=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            explained = self._explain(error)
            self._log.failed(explained)
            raise explained from error
        else:
            return Response(body, mimetype="application/json")
        finally:
            self._end()

    def _all_events(self) -> Iterable[ReplyEvent | GroupEvent | Progress | None]:
        if self._pump is None:
            return self._events(None)
        events: list[ReplyEvent | GroupEvent | Progress] = []
        self._pump.run(self._events(0), events.extend)
        return events

    def stream(self, media_type: str) -> Response:
        """Answer piece by piece, from now on."""
        response = Response(self._stream(), mimetype=media_type)
        response.headers["Cache-Control"] = "no-cache"
        response.headers["X-Accel-Buffering"] = "no"  # a proxy that buffers the stream defeats it
        # Also if the stream is never begun: a generator that was not started runs no `finally`.
        response.call_on_close(self._reply.close)
        return response

    def _stream(self) -> Iterator[bytes]:
        writer, keepalive = self._writer, self._keepalive_seconds
        try:
            yield writer.open()
            sent = time.monotonic()
            for event in self._events(keepalive if self._pump is None else 0):
                match event:
                    case None:
                        is_silent = time.monotonic() - sent >= keepalive
                        data = writer.keepalive(self._reply.queued()) if is_silent else b""
                    case Progress():
                        data = writer.progress(event)
                        if not data and time.monotonic() - sent >= keepalive:
                            data = writer.keepalive(event)
                    case StreamEnd():
                        data = writer.finish(event, self._reply.usage)
                    case _:
                        data = writer.feed(event)
                if data:
                    sent = time.monotonic()
                if data or event is None:  # nothing: there will be more later
                    yield data
        except ClientLeft:
            pass
        except Exception as error:
            explained = self._explain(error)
            self._log.failed(explained)
            yield writer.error(explained)
        finally:
            self._end()

    def _events(self, patience: float | None) -> Iterator[ReplyEvent | GroupEvent | Progress | None]:
        """Yield the reply's events up to its StreamEnd. Raises ClientLeft, or EngineStopped on shutdown."""
        if self._pump is not None:
            self._reply.notify(self._pump.resume)
        with self._on_disconnect(self._cancel):
            for event in self._reply.events(patience):
                match event:
                    case None | Progress():
                        pass
                    case StreamEnd(finish):
                        self._log.outcome = finish
                    case _:
                        self._log.first_event()
                        self._tokens.advance(self._reply.completion_tokens)
                yield event
        if self._reply.finish is None:
            raise ClientLeft if self._left else EngineStopped("The server is shutting down.")

    def _cancel(self) -> None:
        self._left = True
        self._reply.close()

    def _end(self) -> None:
        self._reply.close()
        self._log.write(self._reply)


class ReplyLog:
    """The line that says what a reply was and what it cost.

    Its outcome is that the client left until something better is known: it may be gone unnoticed when nothing can
    be written any more.
    """

    def __init__(self, record: RequestRecord, reply_id: str, model: str, ignored: Sequence[str]) -> None:
        self.outcome = LEFT
        self._record = record
        self._id = reply_id
        self._model = model
        self._ignored = ignored
        self._first: float | None = None

    def first_event(self) -> None:
        """Note when the first event came; later calls do nothing."""
        if self._first is None:
            self._first = time.perf_counter()

    def failed(self, error: ApiError) -> None:
        """Note what ended the reply before its end."""
        self.outcome = "error"
        if error.code == SUPERSEDED:
            self.outcome = SUPERSEDED
        self._record.error = error
        self._record.status = self._record.status or error.status

    def write(self, reply: Reply | ReplyGroup) -> None:
        """Log the line."""
        usage, effort = reply.usage, reply.effort
        speed = usage.completion_tokens / usage.decode_seconds if usage.decode_seconds else 0.0
        first = (self._first or time.perf_counter()) - self._record.started
        words = [
            f"{self._id} model={self._model}",
            f"effort={f'{effort.effort} ({effort.source})' if effort else '-'}",
            f"prompt={usage.prompt_tokens} cached={usage.cached_tokens}",
            f"completion={usage.completion_tokens} reasoning={usage.reasoning_tokens} {speed:.1f} tok/s",
            f"queue={usage.queue_seconds:.3f}s first={first:.3f}s finish={self.outcome}",
        ]
        if (count := len(reply.replies)) > 1:
            words.append(f"replies={count}")
        if usage.drafted_tokens:
            words.append(f"drafts={usage.accepted_tokens}/{usage.drafted_tokens}")
        if reply.priority:
            words.append(f"priority={reply.priority}")
        if usage.repeated_run is not None:
            words.append(f"stopped_by=repetition({usage.repeated_run})")
        matched = usage.match.tokens if usage.match is not None else None
        if usage.broken_by:
            words.append(f'matched={matched} broken_by="{usage.broken_by}"')
        if self._ignored:
            words.append(f"ignored={header_safe(self._ignored)}")
        fields = {
            "reply_id": self._id,
            "model": self._model,
            "effort": effort.effort if effort else None,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "reasoning_tokens": usage.reasoning_tokens,
            "queue_seconds": round(usage.queue_seconds, 4),
            "first_token_seconds": round(first, 4),
            "tokens_per_second": round(speed, 2),
            "finish": self.outcome,
            "repeated_run": usage.repeated_run,
            "matched_tokens": matched,
            "broken_by": usage.broken_by or None,
        }
        self._record.status = self._record.status or (CLIENT_CLOSED_REQUEST if self.outcome == LEFT else 200)
        self._record.end(" ".join(words), fields)


def header_safe(fields: Sequence[str]) -> str:
    """Write field names so that they fit in a header: they come from the client, so not every character may pass."""
    clean = [re.sub(r"[^\w.\[\]-]", "?", name, flags=re.ASCII)[:64] for name in fields[:32]]
    return ", ".join(clean)
