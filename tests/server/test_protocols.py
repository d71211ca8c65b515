"""The server knows no API's shape: a protocol that it has never seen is served by one line in the routes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from scripted_engine import ScriptedEngine, Transcript
from single_model import SingleModelRegistry
from werkzeug.test import Client

import mlx_backend.server
from mlx_backend.api.addresses import AnyCall, Api, BodyEndpoint, Operation, StartCall
from mlx_backend.api.errors import ApiError, refuse
from mlx_backend.api.fields import Body
from mlx_backend.api.writers import ReplyWriter
from mlx_backend.chat.request import ChatRequest
from mlx_backend.chat.service import Service
from mlx_backend.conversation.events import ContentDelta, StreamEnd
from mlx_backend.errors import EngineError
from mlx_backend.server.app import App
from mlx_backend.server.handlers import Route, reply_handler
from mlx_backend.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mlx_backend.chat.reply import Reply, ReplyEvent, Usage
    from mlx_backend.chat.reply_group import GroupEvent
    from mlx_backend.engine.base import Progress, QueueClient, Queued

ANSWER = "<|channel|>final<|message|>Paris.<|return|>"


class LineErrors(Api):
    def error(self, error: ApiError) -> bytes:
        return f"! {error.message}\n".encode()


class Line(Body):
    question: str
    stream: bool


class Lines(BodyEndpoint):
    """A protocol of lines: `> question` or `>> question` for a stream; answers begin with `<`, errors with `!`."""

    def parse(self, body: bytes) -> AnyCall:
        marks, _, question = body.decode().partition(" ")
        if not question:
            raise refuse("Ask something.")
        return self.call(Line(question=question, stream=marks == ">>"))


def start(line: Line, service: Service, client: QueueClient) -> tuple[Reply, LinesWriter]:
    asked = ChatRequest(messages=[{"role": "user", "content": line.question}])
    return service.chat(asked, client), LinesWriter("line-")


ERRORS = LineErrors(str, str)
OPERATION = Operation(summary="Answer a line", body=str, answer=str, event=str)
LINES = Lines(ERRORS, OPERATION, Line.parse, partial(StartCall, begin=start))


class LinesWriter(ReplyWriter):
    def open(self) -> bytes:
        return b"<\n"

    def feed(self, event: ReplyEvent | GroupEvent) -> bytes:
        return f"{event.text}\n".encode() if isinstance(event, ContentDelta) else b""

    def finish(self, end: StreamEnd, usage: Usage) -> bytes:
        return f"{end.finish} {usage.completion_tokens > 0}\n".encode()

    def keepalive(self, _reason: Progress | Queued | None = None) -> bytes:
        return b"\n"

    def error(self, error: ApiError) -> bytes:
        return ERRORS.error(error)

    def fold(self, events: Iterable[ReplyEvent | GroupEvent], _usage: Usage) -> bytes:
        return b"< " + b"".join(self.feed(event).strip() for event in events) + b"\n"


def client_of(engine: ScriptedEngine) -> Client:
    routes = [Route("POST", "/lines", reply_handler(LINES))]
    return Client(App(SingleModelRegistry(Service(engine)), Settings(), routes))


def test_another_protocol_is_one_line_in_the_routes() -> None:
    with ScriptedEngine(lambda _: ANSWER) as engine:
        client = client_of(engine)
        whole = client.post("/lines", data=b"> Capital of France?")
        assert whole.data == b"< Paris.\n"
        assert whole.headers["x-request-id"].startswith("req_")
        assert client.post("/lines", data=b">> Capital of France?").data == b"<\nPar\nis.\nstop True\n"


def test_its_errors_have_its_own_shape_before_the_stream_and_in_it() -> None:
    broken = Transcript(text="<|channel|>final<|message|>Par", failure=EngineError("It broke."))
    with ScriptedEngine(lambda _: broken) as engine:
        client = client_of(engine)
        refused = client.post("/lines", data=b">>")
        assert (refused.status_code, refused.data) == (400, b"! Ask something.\n")
        assert client.post("/lines", data=b"> ?").data == b"! It broke.\n"
        assert client.post("/lines", data=b">> ?").data == b"<\nPar\n! It broke.\n"


def test_an_unknown_address_is_answered_in_the_default_shape() -> None:
    with ScriptedEngine([]) as engine:
        response = client_of(engine).get("/nowhere")
        assert response.get_json()["error"]["message"].startswith("There is no GET '/nowhere' here")


@pytest.mark.parametrize(
    "word", ["[DONE]", "data: ", "choices", "chatcmpl", "invalid_request_error", '"error"', "delta"]
)
def test_no_module_of_the_server_contains_an_apis_words(word: str) -> None:
    [folder] = mlx_backend.server.__path__
    for path in Path(folder).rglob("*.py"):
        text = path.read_text(encoding="utf-8").replace('outcome = "error"', "")
        assert word not in text, path.name
