"""One reply between the service and the socket: waited for or streamed, kept alive, cancelled, logged.

Both ways run through the same steps; a reply that is not streamed folds them, one that is writes them as they
come. Whatever happens, the engine is free afterwards and the log has one line.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from werkzeug import Response

from mlx_backend.api.errors import ApiError, as_api_error
from mlx_backend.api.openai import stream
from mlx_backend.conversation.events import StreamEnd
from mlx_backend.engine.base import Progress
from mlx_backend.errors import EngineStopped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlx_backend.api.openai.chat_body import ChatBody
    from mlx_backend.api.openai.completions_body import CompletionBody
    from mlx_backend.api.openai.stream import Chunk, Envelope, Writer
    from mlx_backend.chat.reply import Reply, ReplyEvent

# A context in which the callable given is called if the client leaves.
type Watch = Callable[[Callable[[], None]], AbstractContextManager[None]]

log = logging.getLogger("mlx_backend.requests")

_LEFT = "client left"
CLIENT_LEFT = 499  # nobody reads it; it is for the log of whatever stands in between


class RunningReply:
    """A reply and who waits for it. Call `whole` or `stream`, once."""

    def __init__(
        self,
        reply: Reply,
        writer: Writer,
        envelope: Envelope,
        body: ChatBody | CompletionBody,
        keepalive: float,
        watch: Watch,
        explain: Callable[[Exception], ApiError] = as_api_error,
    ) -> None:
        self._model = envelope.model
        self._reply = reply
        self._writer = writer
        self._envelope = envelope
        self._body = body
        self._keepalive = keepalive
        self._watch = watch
        self._explain = explain
        self._left = False
        # Whoever is gone is noticed by the watch, or when nothing can be written any more.
        self._outcome = _LEFT
        self._born = time.perf_counter()
        self._first: float | None = None

    def whole(self) -> Response:
        """Wait for the end and answer with one object."""
        chunks: list[Chunk] = []
        try:
            for step in self._steps(None, include_usage=True):
                if isinstance(step, list):
                    chunks += step
        except Exception:
            self._outcome = "error"
            raise
        else:
            if self._left:
                return Response(status=CLIENT_LEFT)
            return json_response(self._envelope.whole(chunks))
        finally:
            self._end()

    def stream(self) -> Response:
        """Answer with server-sent events, from now on."""
        response = Response(self._sse(), mimetype="text/event-stream")
        response.headers["Cache-Control"] = "no-cache"
        response.headers["X-Accel-Buffering"] = "no"  # a proxy that collects the stream defeats it
        # Also if the stream is never begun: a generator that was not started runs no `finally`.
        response.call_on_close(self._reply.close)
        return response

    def _sse(self) -> Iterator[bytes]:
        sse = self._envelope.sse
        try:
            for step in self._steps(self._keepalive, include_usage=self._body.include_usage):
                yield b"".join(map(sse, step)) if isinstance(step, list) else stream.comment(step)
        except Exception as error:
            self._outcome = "error"
            yield stream.error(self._explain(error).body)
        else:
            yield stream.DONE
        finally:
            self._end()

    def _steps(self, patience: float | None, *, include_usage: bool) -> Iterator[list[Chunk] | str]:
        """Yield chunks, and a comment for those who wait when nothing else was said for so many seconds."""
        with self._watch(self._leave):
            yield self._writer.open() or "accepted"
            spoken = time.monotonic()
            for event in self._reply.events(patience):
                step: list[Chunk] | str
                match event:
                    case None:
                        step = "keepalive"
                    case Progress(processed, total):
                        quiet = patience is None or time.monotonic() - spoken < patience
                        step = "" if quiet else f"keepalive {processed}/{total}"
                    case StreamEnd():
                        *chunks, finish = self._writer.feed(event)
                        usage = self._reply.usage
                        step = chunks + stream.last_chunks(finish, usage, include_usage=include_usage)
                        self._outcome = finish.finish or ""
                    case _:
                        step = self._write(event)
                if step:
                    yield step
                    spoken = time.monotonic()
        if self._reply.finish is None and not self._left:
            raise EngineStopped("The server is shutting down.")

    def _write(self, event: ReplyEvent) -> list[Chunk]:
        if self._first is None:
            self._first = time.perf_counter()
        return self._writer.feed(event)

    def _leave(self) -> None:
        self._left = True
        self._outcome = _LEFT
        self._reply.close()

    def _end(self) -> None:
        """Free the engine, and say in one line what the request was and what it cost."""
        self._reply.close()
        usage, effort = self._reply.usage, self._reply.effort
        speed = usage.completion_tokens / usage.decode_seconds if usage.decode_seconds else 0.0
        first = (self._first or time.perf_counter()) - self._born
        log.info(
            "%s model=%s effort=%s prompt=%d cached=%d completion=%d reasoning=%d %.1f tok/s "
            "queue=%.3fs first=%.3fs finish=%s%s",
            self._envelope.id,
            self._model,
            f"{effort.effort} ({effort.source})" if effort else "-",
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            usage.reasoning_tokens,
            speed,
            usage.queue_seconds,
            first,
            self._outcome,
            f" ignored={names(self._body.ignored)}" if self._body.ignored else "",
        )


def json_response(body: dict[str, Any], status: int = 200) -> Response:
    """Answer with one JSON object."""
    return Response(stream.dumps(body) + "\n", status=status, mimetype="application/json")


def names(fields: list[str]) -> str:
    """Write field names fit for a header: they come from the client, so not every character may pass."""
    clean = [re.sub(r"[^\w.-]", "?", name, flags=re.ASCII)[:64] for name in fields[:32]]
    return ", ".join(clean)
