"""The WSGI application: addresses, methods, and one edge where everything raised becomes an error object.

One `on_<endpoint>` method for each address. Parsing a request is `api/`, what it means is `service`, what
goes back is `wire` and how it gets there `replies`; this module only leads from one to the next.
"""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from werkzeug import Request, Response
from werkzeug.exceptions import HTTPException
from werkzeug.routing import Map, Rule

from mlx_backend import __version__
from mlx_backend.api.errors import ApiError, as_api_error, shutting_down
from mlx_backend.api.json_body import decode_json
from mlx_backend.api.openai import stream, tokenize
from mlx_backend.api.openai.chat_body import ChatBody
from mlx_backend.api.openai.completions_body import CompletionBody
from mlx_backend.api.openai.embeddings import EmbeddingsBody
from mlx_backend.api.openai.logprobs import ChatLogprobs, TextLogprobs
from mlx_backend.api.openai.models import OWNER, model_object, model_objects
from mlx_backend.api.openai.rerank import RerankBody
from mlx_backend.errors import EngineStopped
from mlx_backend.models.description import ModelDescription
from mlx_backend.registry.errors import ModelError
from mlx_backend.server import auth
from mlx_backend.server.cors import Origins
from mlx_backend.server.in_flight import Visits
from mlx_backend.server.reply_response import CLIENT_LEFT, RunningReply, json_response, names
from mlx_backend.server.wsgi_server import WATCH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from _typeshed.wsgi import StartResponse, WSGIEnvironment

    from mlx_backend.api.openai.body import Body
    from mlx_backend.api.openai.logprobs import LogprobsFormat
    from mlx_backend.api.openai.stream import Writer
    from mlx_backend.chat.reply import Reply
    from mlx_backend.chat.service import Service
    from mlx_backend.embedding.service import Embedder, Running
    from mlx_backend.registry.base import Lease, ModelRegistry, ModelStatus
    from mlx_backend.server.in_flight import Visit
    from mlx_backend.server.reply_response import Watch
    from mlx_backend.settings import Settings

log = logging.getLogger("mlx_backend.requests")

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
                ("/tokenize", "tokenize", "POST"),
                ("/detokenize", "detokenize", "POST"),
                ("/embeddings", "embeddings", "POST"),
                ("/rerank", "rerank", "POST"),
                ("/models", "models", "GET"),
                ("/models/<path:name>/unload", "unload", "POST"),
                ("/models/<path:name>", "model", "GET"),
            ]
        ),
    ],
    strict_slashes=False,
    merge_slashes=False,
)
_OPEN = ("home", "health")  # these need no key: they tell nothing and start nothing


class App:
    """The models of a server behind OpenAI's addresses."""

    def __init__(self, models: ModelRegistry, settings: Settings) -> None:
        self._models = models
        self._settings = settings
        self._started = int(time.time())
        self._fingerprint = f"mlx-backend-{__version__}"
        self._origins = Origins(settings.cors_origins)
        self.visits = Visits()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        request = Request(environ)
        try:
            response = self._dispatch(request)
        except Exception as error:
            response = self._refusal(self._explained(error))
        self._origins.mark(request, response)
        return response(environ, start_response)

    def _dispatch(self, request: Request) -> Response:
        adapter = _ROUTES.bind_to_environ(request.environ)
        if request.method == "OPTIONS":
            return self._origins.options(request, adapter.allowed_methods())
        try:
            endpoint, arguments = adapter.match()
        except HTTPException as error:
            raise self._no_such_address(request, error) from None
        if endpoint not in _OPEN:
            auth.check(request, self._settings.api_key)
        if request.method == "POST":
            self._origins.check(request)
        handler: Callable[..., Response] = getattr(self, f"on_{endpoint}")
        return handler(request, **arguments)

    # -- the addresses ---------------------------------------------------------------------------------------

    def on_home(self, _request: Request) -> Response:
        """Say what this is."""
        return json_response(
            {
                "name": "mlx-backend",
                "version": __version__,
                "models": [state.name for state in self._models.statuses()],
                "api": "/v1/chat/completions, /v1/completions, /v1/embeddings, /v1/rerank, /v1/models, "
                "/v1/tokenize, /v1/detokenize, /health",
            }
        )

    def on_health(self, _request: Request) -> Response:
        """200 while requests are served; 503 while they cannot be, or the server is being stopped.

        That is up to the first model, if it is one that is always there. Those that come and go may fail.
        """
        status = "draining" if self.visits.closed else ""
        told = []
        for state in self._models.statuses():
            if state.state == "unloaded":
                continue
            entry = {"model": state.name, "state": state.state, "running": state.running}
            entry["waiting"] = state.waiting
            if state.state == "loading":
                entry["percent"] = state.percent
            if state.detail:
                entry["detail"] = state.detail
            told.append(entry)
        if not status:
            first = [state for state in self._models.statuses()[:1] if state.pinned]
            troubled = [state for state in first if state.state not in ("ready", "unloaded")]
            status = troubled[0].state if troubled else "ok"
        health = {"status": status, "server": OWNER, "version": __version__, "models": told}
        return json_response(health, 200 if status == "ok" else 503)

    def on_models(self, _request: Request) -> Response:
        """List the models that can be served."""
        data: list[dict[str, Any]] = []
        for status in self._models.statuses():
            data += model_objects(status, self._described(status), self._started)
        return json_response({"object": "list", "data": data})

    def on_model(self, _request: Request, name: str) -> Response:
        """Describe one."""
        status = self._models.status(name)
        alias = name if name in status.aliases else None
        return json_response(model_object(status, self._described(status), self._started, alias=alias))

    def on_unload(self, _request: Request, name: str) -> Response:
        """Take a model out of memory."""
        return json_response({"model": name, "message": self._models.unload(name)})

    def on_chat(self, request: Request) -> Response:
        """Answer a conversation."""
        written = decode_json(self._body(request))
        body = ChatBody.parse(written)
        with self._using(body.model) as lease:
            service = lease.service
            shown = body.reasoning_format_or(
                service.defaults.reasoning_format or self._settings.reasoning_format
            )
            reply = service.chat(body.request(written, shown))
            logprobs = ChatLogprobs(service.engine.tokenizer.bytes_of) if body.logprobs else None
            writer = stream.ChatWriter(
                call_id=reply.call_id,
                reasoning_format=shown,
                reasoning_field=self._settings.reasoning_field,
                logprobs=logprobs,
            )
            return self._answer(request, body, reply, writer, logprobs, lease, chat=True)

    def on_completions(self, request: Request) -> Response:
        """Continue a text."""
        body = CompletionBody.parse(decode_json(self._body(request)))
        with self._using(body.model) as lease:
            reply = lease.service.complete(body.request())
            bytes_of = lease.service.engine.tokenizer.bytes_of
            logprobs = TextLogprobs(bytes_of) if body.logprobs is not None else None
            writer = stream.TextWriter(logprobs)
            return self._answer(request, body, reply, writer, logprobs, lease, chat=False)

    def on_tokenize(self, request: Request) -> Response:
        """Count the tokens of a text, or of the prompt that a conversation becomes."""
        written = decode_json(self._body(request))
        body = tokenize.parse(written)
        with self._having(lambda wait: self._models.acquire_any(body.model, wait)) as visit:
            told = tokenize.answer(visit.service, body, written)
            visit.end()
        return _with_ignored(json_response(told), body)

    def on_detokenize(self, request: Request) -> Response:
        """Write tokens out as text."""
        body = tokenize.DetokenizeBody.parse(decode_json(self._body(request)))
        with self._using(body.model) as visit:
            text = body.text(visit.service)
            visit.end()
        return _with_ignored(json_response({"prompt": text}), body)

    def on_embeddings(self, request: Request) -> Response:
        """Make vectors of texts."""
        body = EmbeddingsBody.parse(decode_json(self._body(request)))
        wanted = body.request()
        with self._having(lambda wait: self._models.acquire_embedder(body.model, wait, "embedding")) as visit:
            running = visit.service.embed(wanted)
            return self._computed(request, body, running, visit, running.vectors, body.answer)

    def on_rerank(self, request: Request) -> Response:
        """Put documents in the order of their worth."""
        body = RerankBody.parse(decode_json(self._body(request)))
        wanted = body.request()
        with self._having(lambda wait: self._models.acquire_embedder(body.model, wait, "rerank")) as visit:
            running = visit.service.rank(wanted)
            scores = partial(running.scores, raw=body.raw_scores is True)
            return self._computed(request, body, running, visit, scores, body.answer)

    def _computed[F](
        self,
        request: Request,
        body: Body,
        running: Running,
        visit: Visit[Embedder],
        found: Callable[[], F | None],
        answer: Callable[[str, F, int], dict[str, Any]],
    ) -> Response:
        """Wait for what is being computed, and stop it if the client leaves."""
        begun = time.perf_counter()
        with _watch(request)(running.close):
            what = found()
        model = visit.service.engine.model_id
        visit.end()
        log.info(
            "%s model=%s texts=%d tokens=%d %.3fs%s%s",
            request.path,
            model,
            len(running.job.rows),
            running.tokens,
            time.perf_counter() - begun,
            f" cut={running.cut}" if running.cut else "",
            " client left" if what is None else "",
        )
        if what is None:
            return Response(status=CLIENT_LEFT)
        return _with_ignored(json_response(answer(model, what, running.tokens)), body)

    def _using(self, model: str | None) -> AbstractContextManager[Visit[Service]]:
        return self._having(lambda wait: self._models.acquire(model, wait))

    def _having[S](self, acquire: Callable[[float], Lease[S]]) -> AbstractContextManager[Visit[S]]:
        return self.visits.using(partial(acquire, self._settings.load_seconds))

    # -- a reply on its way ----------------------------------------------------------------------------------

    def _answer(
        self,
        request: Request,
        body: ChatBody | CompletionBody,
        reply: Reply,
        writer: Writer,
        logprobs: LogprobsFormat | None,
        visit: Visit[Service],
        *,
        chat: bool,
    ) -> Response:
        model = visit.service.engine.model_id
        envelope = stream.Envelope(model, self._fingerprint, chat=chat, logprobs=logprobs)
        keepalive = self._settings.keepalive_seconds
        run = RunningReply(reply, writer, envelope, body, keepalive, _watch(request), explain=self._explained)
        response = run.stream() if body.stream else run.whole()
        response.call_on_close(visit.end)
        response.headers["x-request-id"] = envelope.id
        if reply.effort is not None:
            response.headers["x-mlx-backend-effort"] = f"{reply.effort.effort} ({reply.effort.source})"
        return _with_ignored(response, body)

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

    def _no_such_address(self, request: Request, error: HTTPException) -> ApiError:
        if error.code == 404:
            path = f"{request.method} {request.path[:200]!r}"
            return ApiError(404, f"There is no {path} here; try POST /v1/chat/completions or GET /v1/models.")
        return as_api_error(error)

    def _explained(self, error: Exception) -> ApiError:
        """Say what an error means to a client; an engine that is stopped with the server is no fault."""
        if isinstance(error, EngineStopped) and self.visits.closed:
            words = (
                "The server is shutting down, and did not finish this reply. Send the request again later."
            )
            return shutting_down(words)
        return as_api_error(error)

    def _refusal(self, error: ApiError) -> Response:
        log.info("refused %d %s%s", error.status, error.message, f" [{error.code}]" if error.code else "")
        response = json_response(error.body, error.status)
        response.headers.extend(error.headers)
        return response

    def _described(self, status: ModelStatus) -> ModelDescription:
        try:
            return self._models.describe(status.name)
        except ModelError:  # it has left the list since a moment ago
            return ModelDescription()


def _with_ignored(response: Response, body: Body) -> Response:
    if body.ignored:
        response.headers["x-mlx-backend-ignored"] = names(body.ignored)
    return response


def _watch(request: Request) -> Watch:
    watch: Watch | None = request.environ.get(WATCH)
    return watch or (lambda _left: nullcontext())
