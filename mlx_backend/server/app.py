"""The WSGI application: addresses, methods, and one edge where everything raised becomes an error object.

One `on_<endpoint>` method for each address. Reading a request is `schemas`, what it means is `service`, what
goes back is `wire`; this module only leads from one to the next, and hears when the client leaves.
"""

from __future__ import annotations

import logging
import re
import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from werkzeug import Request, Response
from werkzeug.exceptions import HTTPException
from werkzeug.routing import Map, Rule

from mlx_backend import __version__
from mlx_backend.conversation.events import StreamEnd
from mlx_backend.engine.base import EngineStopped, Progress
from mlx_backend.server import auth, wire
from mlx_backend.server.errors import ApiError, as_api_error
from mlx_backend.server.schemas import ChatBody, CompletionBody, parse_json
from mlx_backend.server.serving import WATCH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from _typeshed.wsgi import StartResponse, WSGIEnvironment

    from mlx_backend.conversation.events import Event
    from mlx_backend.server.wire import Chunk, Envelope, Writer
    from mlx_backend.service import Reply, Service
    from mlx_backend.settings import Settings

# A context in which the callable given is called if the client leaves.
type Watch = Callable[[Callable[[], None]], AbstractContextManager[None]]

log = logging.getLogger("mlx_backend.requests")

_OWN_HEADERS = "x-request-id, x-mlx-backend-effort, x-mlx-backend-ignored"
_CLIENT_LEFT = 499
_CLOSE = (("Connection", "close"),)  # nobody knows where the next request would begin

_ROUTES = Map(
    [
        Rule("/", endpoint="home", methods=["GET"]),
        Rule("/health", endpoint="health", methods=["GET"]),
        *(
            Rule(prefix + path, endpoint=endpoint, methods=[method])
            for prefix in ("/v1", "")
            for path, endpoint, method in [
                ("/chat/completions", "chat", "POST"),
                ("/completions", "completions", "POST"),
                ("/models", "models", "GET"),
                ("/models/<path:name>", "model", "GET"),
            ]
        ),
    ],
    strict_slashes=False,
    merge_slashes=False,
)
_OPEN = ("home", "health")  # these need no key: they tell nothing and start nothing


class App:
    """One loaded model behind OpenAI's addresses."""

    def __init__(self, service: Service, settings: Settings) -> None:
        self._service = service
        self._settings = settings
        self._model = service.engine.model_id
        self._names = {self._model, self._model.rpartition("/")[2], "default", ""}
        self._started = int(time.time())
        self._fingerprint = f"mlx-backend-{__version__}"

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        request = Request(environ)
        origin = self._allowed_origin(request)
        try:
            response = self._dispatch(request, origin)
        except Exception as error:
            response = self._refusal(as_api_error(error))
        if origin is not None:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = _OWN_HEADERS
        if self._settings.cors_origins:
            response.vary.add("Origin")
        return response(environ, start_response)

    def _dispatch(self, request: Request, origin: str | None) -> Response:
        adapter = _ROUTES.bind_to_environ(request.environ)
        if request.method == "OPTIONS":
            return self._options(request, origin, adapter.allowed_methods())
        try:
            endpoint, arguments = adapter.match()
        except HTTPException as error:
            raise self._no_such_address(request, error) from None
        if endpoint not in _OPEN:
            auth.check(request, self._settings.api_key)
        if request.method == "POST":
            self._check_origin(request, origin)
        handler: Callable[..., Response] = getattr(self, f"on_{endpoint}")
        return handler(request, **arguments)

    # -- the addresses ---------------------------------------------------------------------------------------

    def on_home(self, _request: Request) -> Response:
        """Say what this is."""
        return _json(
            {
                "name": "mlx-backend",
                "version": __version__,
                "model": self._model,
                "api": "/v1/chat/completions, /v1/completions, /v1/models, /health",
            }
        )

    def on_health(self, _request: Request) -> Response:
        """200 while the engine runs, 503 once it has died."""
        healthy = self._service.engine.healthy()
        state = {"status": "ok" if healthy else "engine stopped", "model": self._model}
        return _json(state, 200 if healthy else 503)

    def on_models(self, _request: Request) -> Response:
        """List the one model."""
        return _json({"object": "list", "data": [self._model_object()]})

    def on_model(self, _request: Request, name: str) -> Response:
        """Describe it."""
        self._check_model(name)
        return _json(self._model_object())

    def on_chat(self, request: Request) -> Response:
        """Answer a conversation."""
        written = parse_json(self._body(request))
        body = ChatBody.read(written)
        self._check_model(body.model)
        reply = self._service.chat(body.request(written, self._settings))
        writer = wire.ChatWriter(
            call_id=reply.call_id,
            reasoning_format=body.shown_reasoning(self._settings),
            reasoning_field=self._settings.reasoning_field,
        )
        return self._answer(request, body, reply, writer, chat=True)

    def on_completions(self, request: Request) -> Response:
        """Continue a text."""
        body = CompletionBody.read(parse_json(self._body(request)))
        self._check_model(body.model)
        reply = self._service.complete(body.request(self._settings))
        return self._answer(request, body, reply, wire.TextWriter(), chat=False)

    # -- a reply on its way ----------------------------------------------------------------------------------

    def _answer(
        self, request: Request, body: ChatBody | CompletionBody, reply: Reply, writer: Writer, *, chat: bool
    ) -> Response:
        envelope = wire.Envelope(self._model, self._fingerprint, chat=chat)
        run = _Run(reply, writer, envelope, body, self._settings, _watch(request))
        response = run.stream() if body.stream else run.whole()
        response.headers["x-request-id"] = envelope.id
        if reply.effort is not None:
            response.headers["x-mlx-backend-effort"] = f"{reply.effort.effort} ({reply.effort.source})"
        if body.ignored:
            response.headers["x-mlx-backend-ignored"] = _names(body.ignored)
        return response

    # -- who and what may ask --------------------------------------------------------------------------------

    def _body(self, request: Request) -> bytes:
        limit = self._settings.max_body_bytes
        source = request.environ["wsgi.input"]
        length = request.content_length
        in_chunks = length is None and request.environ.get("wsgi.input_terminated", False)
        wanted = limit + 1 if in_chunks else length or 0
        data = bytearray()
        try:
            while wanted - len(data) > 0 and wanted <= limit + 1:
                piece = source.read(min(wanted - len(data), 1 << 16))
                if not piece:
                    break
                data += piece
        except TimeoutError:
            raise ApiError(408, "The body did not arrive in time.", headers=_CLOSE) from None
        except (OSError, ValueError) as error:
            raise ApiError(400, f"The body could not be read: {error}.", headers=_CLOSE) from None
        if wanted > limit and (len(data) > limit or not in_chunks):
            raise ApiError(413, f"The body is larger than {limit} bytes, which is this server's limit.")
        if not in_chunks and len(data) < wanted:
            raise ApiError(400, f"The body ended after {len(data)} of its {wanted} bytes.")
        return bytes(data)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._names:
            raise ApiError(
                404,
                f"The model {name[:200]!r} is not served here; this server has {self._model!r} "
                "(or leave 'model' out, or say 'default').",
                param="model",
                code="model_not_found",
            )

    def _no_such_address(self, request: Request, error: HTTPException) -> ApiError:
        if error.code == 404:
            path = f"{request.method} {request.path[:200]!r}"
            return ApiError(404, f"There is no {path} here; try POST /v1/chat/completions or GET /v1/models.")
        return as_api_error(error)

    def _allowed_origin(self, request: Request) -> str | None:
        allowed, origin = self._settings.cors_origins, request.headers.get("Origin")
        if origin is None or not ("*" in allowed or origin in allowed):
            return None
        return "*" if "*" in allowed else origin

    def _check_origin(self, request: Request, allowed: str | None) -> None:
        """Keep foreign web pages from using a local server: browsers send their POSTs and name their origin."""
        origin = request.headers.get("Origin")
        if origin is None or allowed is not None or urlsplit(origin).netloc == request.host:
            return
        raise ApiError(
            403, "This web page may not use the server: start it with --cors-origin and the page's origin."
        )

    def _options(self, request: Request, origin: str | None, methods: Iterable[str]) -> Response:
        allow = ", ".join(sorted({*methods, "OPTIONS"}))
        response = Response(status=204, headers={"Allow": allow})
        if origin is not None:
            response.headers["Access-Control-Allow-Methods"] = allow
            asked = request.headers.get("Access-Control-Request-Headers", "authorization, content-type")
            response.headers["Access-Control-Allow-Headers"] = asked
            response.headers["Access-Control-Max-Age"] = "600"
        return response

    def _refusal(self, error: ApiError) -> Response:
        log.info("refused %d %s%s", error.status, error.message, f" [{error.code}]" if error.code else "")
        response = _json(error.body, error.status)
        response.headers.extend(error.headers)
        return response

    def _model_object(self) -> dict[str, Any]:
        length = self._service.engine.context_length
        return {
            "id": self._model,
            "object": "model",
            "created": self._started,
            "owned_by": "mlx-backend",
            "context_length": length,
            "max_model_len": length,
        }


class _Run:
    """One reply between the service and the socket."""

    def __init__(
        self,
        reply: Reply,
        writer: Writer,
        envelope: Envelope,
        body: ChatBody | CompletionBody,
        settings: Settings,
        watch: Watch,
    ) -> None:
        self._model = envelope.model
        self._reply = reply
        self._writer = writer
        self._envelope = envelope
        self._body = body
        self._keepalive = settings.keepalive_seconds
        self._watch = watch
        self._left = False
        self._outcome = "cancelled"
        self._born = time.perf_counter()
        self._first: float | None = None

    def whole(self) -> Response:
        """Wait for the end and answer with one object."""
        chunks: list[Chunk] = []
        try:
            for step in self._steps(None, include_usage=True):
                if isinstance(step, list):
                    chunks += step
            if self._left:
                return Response(status=_CLIENT_LEFT)
            return _json(self._envelope.whole(chunks))
        finally:
            self._end()

    def stream(self) -> Response:
        """Answer with server-sent events, from now on."""
        response = Response(self._sse(), mimetype="text/event-stream", direct_passthrough=True)
        response.headers["Cache-Control"] = "no-cache"
        response.headers["X-Accel-Buffering"] = "no"  # a proxy that collects the stream defeats it
        # Also if the stream is never begun: a generator that was not started runs no `finally`.
        response.call_on_close(self._reply.close)
        return response

    def _sse(self) -> Iterator[bytes]:
        sse = self._envelope.sse
        try:
            for step in self._steps(self._keepalive, include_usage=self._body.include_usage):
                yield b"".join(map(sse, step)) if isinstance(step, list) else wire.comment(step)
        except Exception as error:
            self._outcome = "error"
            yield wire.error(as_api_error(error).body)
        else:
            yield wire.DONE
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
                        step = chunks + wire.last_chunks(finish, usage, include_usage=include_usage)
                        self._outcome = finish.finish or ""
                    case _:
                        step = self._write(event)
                if step:
                    yield step
                    spoken = time.monotonic()
        if self._reply.finish is None and not self._left:
            raise EngineStopped("The server is shutting down.")

    def _write(self, event: Event) -> list[Chunk]:
        if self._first is None:
            self._first = time.perf_counter()
        return self._writer.feed(event)

    def _leave(self) -> None:
        self._left = True
        self._outcome = "client left"
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
            f" ignored={_names(self._body.ignored)}" if self._body.ignored else "",
        )


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(wire.dumps(body) + "\n", status=status, mimetype="application/json")


def _names(fields: list[str]) -> str:
    """Field names fit for a header: they come from the client, so not every character may pass."""
    clean = [re.sub(r"[^\w.-]", "?", name, flags=re.ASCII)[:64] for name in fields[:32]]
    return ", ".join(clean)


def _watch(request: Request) -> Watch:
    watch: Watch | None = request.environ.get(WATCH)
    return watch or (lambda _left: nullcontext())
