"""The WSGI application: addresses, methods, and one edge where everything raised becomes an error object.

One `on_<endpoint>` method for each address. Reading a request is `schemas`, what it means is `service`, what
goes back is `wire` and how it gets there `replies`; this module only leads from one to the next.
"""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from werkzeug import Request, Response
from werkzeug.exceptions import HTTPException
from werkzeug.routing import Map, Rule

from mlx_backend import __version__
from mlx_backend.server import auth, wire
from mlx_backend.server.errors import ApiError, as_api_error
from mlx_backend.server.logprobs import ChatLogprobs, TextLogprobs
from mlx_backend.server.replies import RunningReply, json_response, names
from mlx_backend.server.schemas import ChatBody, CompletionBody, parse_json
from mlx_backend.server.serving import WATCH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from _typeshed.wsgi import StartResponse, WSGIEnvironment

    from mlx_backend.reply import Reply
    from mlx_backend.server.logprobs import LogprobsFormat
    from mlx_backend.server.replies import Watch
    from mlx_backend.server.wire import Writer
    from mlx_backend.service import Service
    from mlx_backend.settings import Settings

log = logging.getLogger("mlx_backend.requests")

_OWN_HEADERS = "x-request-id, x-mlx-backend-effort, x-mlx-backend-ignored"
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
        return json_response(
            {
                "name": "mlx-backend",
                "version": __version__,
                "model": self._model,
                "api": "/v1/chat/completions, /v1/completions, /v1/models, /health",
            }
        )

    def on_health(self, _request: Request) -> Response:
        """200 while requests are served, 503 while the engine loads, restarts, or has been stopped."""
        status = self._service.engine.status()
        ready = status.state == "ready"
        state: dict[str, Any] = {
            "status": "ok" if ready else status.state,
            "model": self._model,
            "running": status.running,
            "waiting": status.waiting,
        }
        if status.detail:
            state["detail"] = status.detail
        return json_response(state, 200 if ready else 503)

    def on_models(self, _request: Request) -> Response:
        """List the one model."""
        return json_response({"object": "list", "data": [self._model_object()]})

    def on_model(self, _request: Request, name: str) -> Response:
        """Describe it."""
        self._check_model(name)
        return json_response(self._model_object())

    def on_chat(self, request: Request) -> Response:
        """Answer a conversation."""
        written = parse_json(self._body(request))
        body = ChatBody.read(written)
        self._check_model(body.model)
        reply = self._service.chat(body.request(written, self._settings))
        logprobs = ChatLogprobs(self._service.engine.tokenizer.bytes_of) if body.logprobs else None
        writer = wire.ChatWriter(
            call_id=reply.call_id,
            reasoning_format=body.shown_reasoning(self._settings),
            reasoning_field=self._settings.reasoning_field,
            logprobs=logprobs,
        )
        return self._answer(request, body, reply, writer, logprobs, chat=True)

    def on_completions(self, request: Request) -> Response:
        """Continue a text."""
        body = CompletionBody.read(parse_json(self._body(request)))
        self._check_model(body.model)
        reply = self._service.complete(body.request())
        bytes_of = self._service.engine.tokenizer.bytes_of
        logprobs = TextLogprobs(bytes_of) if body.logprobs is not None else None
        return self._answer(request, body, reply, wire.TextWriter(logprobs), logprobs, chat=False)

    # -- a reply on its way ----------------------------------------------------------------------------------

    def _answer(
        self,
        request: Request,
        body: ChatBody | CompletionBody,
        reply: Reply,
        writer: Writer,
        logprobs: LogprobsFormat | None,
        *,
        chat: bool,
    ) -> Response:
        envelope = wire.Envelope(self._model, self._fingerprint, chat=chat, logprobs=logprobs)
        run = RunningReply(reply, writer, envelope, body, self._settings.keepalive_seconds, _watch(request))
        response = run.stream() if body.stream else run.whole()
        response.headers["x-request-id"] = envelope.id
        if reply.effort is not None:
            response.headers["x-mlx-backend-effort"] = f"{reply.effort.effort} ({reply.effort.source})"
        if body.ignored:
            response.headers["x-mlx-backend-ignored"] = names(body.ignored)
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
        response = json_response(error.body, error.status)
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


def _watch(request: Request) -> Watch:
    watch: Watch | None = request.environ.get(WATCH)
    return watch or (lambda _left: nullcontext())
